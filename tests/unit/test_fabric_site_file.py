"""A site's fabric.toml: what it adds to Slurm's topology, and what is refused."""

from __future__ import annotations

import tomllib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.model.node import FailureDomain
from muster.fabric.sources.site_file import FabricFileError, SiteFabric, read_site
from muster.fabric.sources.slurm_topology import Kind, Reading, SlurmTopology, Unit, read_fabric
from muster.slurm.client.parsing.hostlist import expand

NODES = expand("n[0-7]")
FLAT = SlurmTopology(Kind.FLAT)
BLOCKS = SlurmTopology(Kind.BLOCK, (Unit("b1", NODES[:4]), Unit("b2", NODES[4:]), Unit("all", NODES, aggregated=True)))
WHOLE = """
[tiers.leaf]
gbit_per_s = 400
latency_us = 4
[tiers.any]
oversubscription = 4
[racks]
r1 = "n[0-3]"
r2 = "n[4-7]"
[power_feeds]
a = "n[0-1,4-5]"
[switches.s1]
nodes = "n[0-3]"
gbit_per_s = 80
[switches.s2]
nodes = "n[4-7]"
[switches.spine]
switches = ["s1", "s2"]
[[nodes]]
nodes = "n[0-7]"
gpus = 2
sockets = [0, 1]
nics = [{ name = "mlx5_0", gpus = [0] }, { name = "mlx5_1", gpus = [1] }]
"""


def site(text: str) -> SiteFabric:
    return read_site(tomllib.loads(text), expand, NODES)


def fabric(text: str, topology: SlurmTopology = FLAT) -> Reading:
    found = site(text)
    return read_fabric(topology, NODES, found.tiers, found.details, found.extra(topology))


def test_a_site_describes_a_network_of_which_slurm_knows_nothing() -> None:
    read = fabric(WHOLE)
    assert read.warnings == ()
    assert read.fabric.link("n0", "n1") == Link(4e-6, 50e9)
    assert read.fabric.link("n0", "n4") == Link(7e-6, 10e9)  # the slow uplink of s1
    assert read.fabric.loaded_link("n0", "n4") == Link(7e-6, 2.5e9)
    assert read.fabric.root.name == "spine"
    assert read.fabric.shared_failure_domains("n0", "n4") == {FailureDomain.POWER}
    assert read.fabric.shared_failure_domains("n0", "n3") == {FailureDomain.LEAF, FailureDomain.RACK}
    assert read.fabric.node("n3").nics[1].gpus == (1,)


def test_an_empty_file_says_nothing() -> None:
    assert site("") == SiteFabric()


def test_blocks_may_be_nvlink_domains() -> None:
    read = fabric("nvlink_blocks = true\n[tiers.nvlink]\ngbit_per_s = 7200", BLOCKS).fabric
    assert read.level_between("n0", "n3") is Level.NVLINK
    assert read.link("n0", "n3").bandwidth == 900e9
    assert read.level_between("n0", "n4") is Level.ANY
    assert fabric("", BLOCKS).fabric.level_between("n0", "n3") is Level.LEAF


def test_switches_above_slurms_blocks_are_added() -> None:
    lower = SlurmTopology(Kind.BLOCK, tuple(Unit(f"b{i}", NODES[2 * i : 2 * i + 2]) for i in range(4)))
    read = fabric('[switches.pod1]\nnodes = "n[0-3]"\n[switches.pod2]\nnodes = "n[4-7]"', lower)
    assert read.warnings == ()
    assert read.fabric.level_between("n0", "n1") is Level.LEAF
    assert read.fabric.level_between("n0", "n3") is Level.POD


def test_a_node_whose_link_has_negotiated_down_is_slow_to_everybody() -> None:
    read = fabric('[[nodes]]\nnodes = "n2"\ngbit_per_s = 8')
    assert read.fabric.link("n2", "n0").bandwidth == 1e9
    assert read.fabric.link("n1", "n0").bandwidth == 12.5e9


def test_the_link_between_gpus_holds_for_every_node() -> None:
    assert fabric("[tiers.node]\ngbit_per_s = 3600").fabric.node("n7").gpu_link.bandwidth == 450e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[switches.a]\nswitches = ["b"]\n[switches.b]\nswitches = ["a"]', "a loop: (a → b → a|b → a → b); a switch"),
        ('[switches.a]\nswitches = ["a"]', "a loop: a → a; a switch can't be below itself"),
        ('[switches.a]\nswitches = ["z"]', "switches.a: there is no switch 'z' in this file"),
        ("[switches.a]", "switches.a: it has neither nodes nor switches"),
        ('[racks]\nr1 = "n[7-9]"', "racks.r1: Slurm has no node n8, n9"),
        ('[racks]\nr1 = "n[0-3]"\nr2 = "n[3-5]"', "racks: node n3 is in r1 and in r2"),
        ('[racks]\nr1 = "n[0-"', "racks.r1: node list"),
        ('[racks]\nr1 = "n[0-999999999]"', "has more than 65536 numbers"),
        ('[racks]\nr1 = "n[5-2]"', "racks.r1: node list: '5-2' counts down: write the smaller number first"),
        ('[rack]\nr1 = "n0"', "rack: there is no such key; did you mean racks?"),
        ("[tiers.leaf]\ngbit_per_s = -3", "tiers.leaf.gbit_per_s: must be more than 0"),
        ("[tiers.leaf]\ngbit_per_s = 1e300", "tiers.leaf.gbit_per_s: must be 10000000 or less"),
        ("[tiers.leaf]\nlatency_us = inf", "tiers.leaf.latency_us: must be a finite number"),
        ("[tiers.leaf]\noversubscription = 0.5", "tiers.leaf.oversubscription: must be 1 or more"),
        ('[racks]\nr1 = ""', "racks.r1: must not be empty"),
        ('[racks]\nr1 = ","', "racks.r1: no node is named"),
        ('[racks]\n"a\\nb" = "n0"', r"racks.'a.*': must be letters"),
        ("[racks]\nr1 = 5", "racks.r1: must be a text"),
        ("[tiers.rack]\n", "tiers.rack: no such tier; the tiers are node, nvlink, leaf, pod, any"),
        ("[tiers.leaf]\ngbit_per_s = inf", "tiers.leaf.gbit_per_s: must be"),
        ("[tiers.leaf]\nlatency_us = nan", "tiers.leaf.latency_us: must be a finite number"),
        ("[tiers.leaf]\nlatency_us = -1", "tiers.leaf.latency_us: must be 0 or more"),
        ("[tiers.any]\noversubscription = 0.5", "tiers.any.oversubscription: must be 1 or more"),
        ("[tiers.leaf]\nspeed = 1\nrate = 2", r"tiers.leaf.speed: there is no such key \(1 other keys"),
        ('[[nodes]]\nnodes = "n0"\ngpus = 99999999999999999', r"nodes\[0\].gpus: must be 1024 or less"),
        ('[[nodes]]\nnodes = "n0"\ngpus = 2\nsockets = [0]', "1 socket for 2 GPUs"),
        ('[[nodes]]\nnodes = "n0"\nnics = [{ name = "a", gpus = [3] }]', "a is near GPU 3, and the node has 0 GPUs"),
        ('[[nodes]]\nnodes = "n0"\n[[nodes]]\nnodes = "n[0-1]"', r"nodes\[1\]: node n0 is described twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_one_message(text: str, words: str) -> None:
    with pytest.raises(FabricFileError, match=words) as error:
        site(text)
    assert "\n" not in str(error.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["n[0-3]", "n1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["nodes", "switches", "gpus", "nics", "name", "leaf", "a", "b"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
tables = st.dictionaries(
    st.sampled_from(["nvlink_blocks", "tiers", "racks", "power_feeds", "nvlink", "switches", "nodes", "x"]), values
)


@given(tables)
def test_any_table_is_a_fabric_of_all_nodes_or_one_error(table: dict[str, object]) -> None:
    with suppress(FabricFileError):
        found = read_site(table, expand, NODES)
        read = read_fabric(BLOCKS, NODES, found.tiers, found.details, found.extra(BLOCKS))
        assert read.fabric.nodes == set(NODES)
