"""`muster topo`: the network as a tree, with Slurm's commands as scripts."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from muster.fabric.model.level import Level
from muster.fabric.sources.node_reports import NodeReport
from muster.launcher.commands.topo import load
from muster.launcher.main import main
from muster.launcher.output.fabric_tree import tree_lines
from muster.launcher.output.screen import Screen
from muster.slurm.client.backends.commands import CliSlurm

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-3]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[4-7]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-7] Switches=s[0-1]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[0-3] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=n[4-7] BlockSize=4
"""


class Controller:
    """Scripts that answer as Slurm's commands do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = {f"n{index}": ["IDLE"] for index in range(8)}
        self.jobs: dict[int, str] = {}
        self.topology = TREE
        self.topoconf = ""
        self.gres = ""

    def write(self) -> None:
        nodes = [
            {"name": name, "state": states, "gres": self.gres, "reason": "Xid 79" if "DRAIN" in states else ""}
            for name, states in self.nodes.items()
        ]
        jobs = [
            {"job_id": id, "job_state": ["RUNNING"], "name": "gang", "user_name": "alice", "nodes": where}
            for id, where in self.jobs.items()
        ]
        for file, document in (("nodes", {"nodes": nodes}), ("jobs", {"jobs": jobs})):
            (self.folder / file).write_text(json.dumps(document, indent=1))
        (self.folder / "topology").write_text(self.topology)
        (self.folder / "topoconf").write_text(self.topoconf)
        partitions = [
            {"name": name, "topology": topology, "nodes": {"configured": f"n[0-{len(self.nodes) - 1}]"}}
            for name, topology in (("main", ""), ("block", "block"))
        ]
        (self.folder / "partitions").write_text(json.dumps({"partitions": partitions}, indent=1))
        self._script("squeue", f"cat {self.folder}/jobs")
        self._script(
            "scontrol",
            f'case "$*" in *"show node"*) cat {self.folder}/nodes;;\n*topoconf*) cat {self.folder}/topoconf;;\n'
            f"*partition*) cat {self.folder}/partitions;;\n*block*) cat {self.folder}/blocks;;\n"
            f'*) cut -c1-"${{SLURM_TOPO_LEN:-10000}}" {self.folder}/topology;; esac',
        )

    def _script(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Controller(tmp_path)


def topo(controller: Controller, *words: str) -> int:
    controller.write()
    return main(["topo", *words])


def test_the_tree_shows_states_and_jobs(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    controller.jobs = {17: "n[0-1,4]"}
    for node in ("n0", "n1", "n4"):
        controller.nodes[node] = ["ALLOCATED"]
    controller.nodes |= {"n5": ["IDLE", "DRAIN"], "n6": ["DOWN", "NOT_RESPONDING"]}
    assert topo(controller) == 0
    assert capsys.readouterr().out == (
        "topology/tree\n"
        "spine  any  8 nodes: 1 down, 1 drained, 3 idle, 3 in use  12.5 GB/s, 7 µs\n"
        "├─ s0  leaf  4 nodes: 2 idle, 2 in use  12.5 GB/s, 5 µs\n"
        "│  ├─ n[0-1]  ALLOCATED  job 17 (gang, alice)\n"
        "│  └─ n[2-3]  IDLE\n"
        "└─ s1  leaf  4 nodes: 1 down, 1 drained, 1 idle, 1 in use  12.5 GB/s, 5 µs\n"
        "   ├─ n4  ALLOCATED  job 17 (gang, alice)\n"
        "   ├─ n5  IDLE+DRAIN  Xid 79\n"
        "   ├─ n6  DOWN+NOT_RESPONDING\n"
        "   └─ n7  IDLE\n"
    )


def test_a_node_that_slurm_lacks_stays_on_the_map(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    del controller.nodes["n7"]
    controller.nodes["n8"] = ["IDLE"]
    assert topo(controller) == 0
    out, err = capsys.readouterr()
    assert "   └─ n7  ABSENT" in out
    assert "├─ n8  IDLE\n└─ spine" in out
    assert err == "muster: 1 node is in no switch or block of the topology: n8\n"


def test_each_node_has_a_line_on_request(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    controller.topology = BLOCKS
    assert topo(controller, "-v") == 0
    assert "topology/block\nany  8 nodes: 8 idle  12.5 GB/s, 7 µs\n├─ b1  leaf" in (out := capsys.readouterr().out)
    assert out.count("IDLE") == 8


def test_json_has_the_whole_tree(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    controller.jobs = {17: "n4"}
    assert topo(controller, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["root"]["name"], found["root"]["all_nodes"]) == ("tree", "spine", "n[0-7]")
    leaf = found["root"]["domains"][1]
    assert (leaf["level"], leaf["link"]) == ("leaf", {"latency_s": 5e-6, "bandwidth_bytes_per_s": 12.5e9})
    assert leaf["nodes"][0]["jobs"] == [{"id": 17, "name": "gang", "user": "alice"}]


def test_a_picture_has_the_same_words(controller: Controller, tmp_path: Path) -> None:
    assert topo(controller, "--svg", str(tmp_path / "t.svg")) == 0
    words = "".join(xml.etree.ElementTree.fromstring((tmp_path / "t.svg").read_text()).itertext())
    assert "├─\xa0s0\xa0\xa0leaf" in words
    assert topo(controller, "--svg", str(tmp_path)) == 64


def test_a_text_that_nobody_understands_is_a_flat_network(
    controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    controller.topology = TREE + "FancyName=f0 Nodes=n[0-3]\n"
    assert topo(controller) == 0
    out, err = capsys.readouterr()
    assert out == "topology/flat\nany  8 nodes: 8 idle  12.5 GB/s, 7 µs\n└─ n[0-7]  IDLE\n"
    assert "taken as flat: `scontrol show topology` prints a line of an unknown form: 'FancyName=f0" in err


def test_a_setting_that_cuts_slurms_lines_does_not_reach_it(
    controller: Controller, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TOPO_LEN", "42")
    assert topo(controller) == 0
    assert "├─ s0  leaf  4 nodes" in capsys.readouterr().out


def test_each_of_several_topologies_has_a_tree(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    controller.topoconf = (Path(__file__).parent / "slurm_topologies" / "several.topoconf").read_text()
    (controller.folder / "blocks").write_text(BLOCKS)
    assert topo(controller) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line.startswith("topology")]
    assert titles == [
        "topology tree (tree, the default)",
        "topology block (block, partition block)",
        "topology flat (flat)",
    ]
    assert topo(controller, "--topology", "block", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["partitions"], len(found["root"]["domains"])) == ("block", ["block"], 2)


def test_a_node_that_was_taken_out_of_a_topology_stays_on_its_map(
    controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `scontrol update nodename=n3 topology=` on Slurm 26.05."""
    controller.topoconf = (Path(__file__).parent / "slurm_topologies" / "several.topoconf").read_text()
    controller.topology = TREE.replace("n[0-3]", "n[0-2]").replace("n[0-7]", "n[0-2,4-7]")
    (controller.folder / "blocks").write_text(BLOCKS)
    assert topo(controller, "--topology", "tree") == 0
    out, err = capsys.readouterr()
    assert "├─ n3  IDLE\n" in out
    assert "1 node is in no switch or block of the topology: n3" in err


def test_an_unknown_topology_is_refused(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    assert topo(controller, "--topology", "x") == 64
    assert capsys.readouterr().err == "muster: Slurm has no topology 'x'; it has one topology, without a name\n"


def test_a_silent_controller_is_an_error(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    controller.write()
    (controller.folder / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2\nexit 1\n"
    )
    assert main(["topo"]) == 69
    assert "Slurm's nodes and network are not known here: " in capsys.readouterr().err


def test_the_sites_file_adds_speeds_and_racks(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    file = controller.folder / "fabric.toml"
    file.write_text('[tiers.any]\noversubscription = 4\ngbit_per_s = 400\n[racks]\nr1 = "n0"\n')
    assert topo(controller, "--json", "--fabric", str(file)) == 0
    found = json.loads(capsys.readouterr().out)["root"]
    assert (found["oversubscription"], found["link"]["bandwidth_bytes_per_s"]) == (4, 50e9)
    assert found["domains"][0]["nodes"][0]["rack"] == "r1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[racks]\nr1 = "n99"\n', "fabric.toml: racks.r1: Slurm has no node n99"),
        ("[racks", "fabric.toml is not TOML"),
        ("x = " + "[" * 5000, "fabric.toml is not TOML: more than 32 tables and lists inside each other"),
        ("x = " + "9" * 5000, "fabric.toml is not TOML: an integer has more than 64 bits"),
    ],
)
def test_a_wrong_site_file_is_the_sites_fault(
    controller: Controller, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = controller.folder / "fabric.toml"
    file.write_text(text)
    assert topo(controller, "--fabric", str(file)) == 78
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_slurm_knows_how_many_gpus_a_node_has(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    controller.gres = "gpu:h100:8(S:0-1),nic:2"
    file = controller.folder / "fabric.toml"
    file.write_text('[racks]\nr1 = "n0"\n[[nodes]]\nnodes = "n1"\ngpus = 4\n')
    assert topo(controller, "--json", "--fabric", str(file)) == 0
    leaf = json.loads(capsys.readouterr().out)["root"]["domains"][0]
    assert [(node["gpus"], node["rack"]) for node in leaf["nodes"]] == [(8, "r1"), (4, ""), (8, ""), (8, "")]


def test_the_nvlink_domains_that_nodes_report_are_drawn(controller: Controller) -> None:
    controller.write()
    reports = {"n0": NodeReport(nvlink_domain="c.1"), "n1": NodeReport(nvlink_domain="c.1")}
    (picture,) = asyncio.run(load(CliSlurm(), controller.folder / "fabric.toml", None, reports))
    assert [sorted(domain.nodes) for domain in picture.fabric.domains(Level.NVLINK)] == [["n0", "n1"]]
    assert any("c.1" in line for line in tree_lines(picture, Screen()))
    crossing = dict.fromkeys(("n3", "n4"), NodeReport(nvlink_domain="c.2"))
    (picture,) = asyncio.run(load(CliSlurm(), controller.folder / "fabric.toml", None, crossing))
    assert picture.warnings[0].startswith("the NVLink domain of n3, n4 is left out")


def test_a_line_for_each_node_names_its_rack_and_power_feed(
    controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    file = controller.folder / "fabric.toml"
    file.write_text('[racks]\nr1 = "n0"\n[power_feeds]\na = "n[0-1]"\n')
    assert topo(controller, "-v", "--fabric", str(file)) == 0
    shown = capsys.readouterr().out
    assert "─ n0  rack r1  power feed a  IDLE" in shown
    assert "─ n1  power feed a  " in shown
    assert "─ n2  " in shown


def test_adapters_that_have_negotiated_down_are_shown(controller: Controller) -> None:
    controller.write()
    reports = {"n1": NodeReport(adapter_bandwidth=2.5e9), "n0": NodeReport(adapter_bandwidth=50e9)}
    (picture,) = asyncio.run(load(CliSlurm(), controller.folder / "fabric.toml", None, reports))
    (line,) = [line for line in tree_lines(picture, Screen()) if "its link" in line]
    assert "─ n1  " in line
    assert line.endswith("its link 2.5 GB/s, 5 µs")


def test_without_an_answer_of_the_coordinator_the_network_is_drawn_with_a_note(
    controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = controller.folder / "secret"
    secret.write_text("x" * 64)
    secret.chmod(0o600)
    assert topo(controller, "--coordinator", "127.0.0.1:1", "--auth", f"secret:{secret}") == 0
    seen = capsys.readouterr()
    assert "s0" in seen.out
    assert "muster: what nodes report of NVLink and adapters is not known: the coordinator at 127.0.0.1:1" in seen.err
