"""The faults of the network adapter and of the memory that a node of the test cluster pretends to have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.sysfs.infiniband_ports import ACTIVE, COUNTERS, DOWN, PortReading, read_ports
from muster.slurm.image.engine import Outcome
from muster.slurm.testcluster import __main__ as tool
from muster.slurm.testcluster.hardware.faults import HOST_ROOT, mend_adapter_and_memory, set_link, set_memory_error
from muster.slurm.testcluster.spec import POLICY

CLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "testcluster"


class OneHost:
    """Runs the commands here, with the folders of the container replaced by those of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        mend_adapter_and_memory(self, "n0")

    def exec(self, host: str, *command: str, stdin: bytes | None = None, check: bool = True) -> Outcome:
        here = [word.replace(HOST_ROOT, str(self.root)).replace("/cluster/", f"{CLUSTER}/") for word in command]
        done = subprocess.run(here, input=stdin or b"", capture_output=True)
        outcome = Outcome(command, done.returncode, done.stdout.decode(), done.stderr.decode())
        if check:
            outcome.checked()
        return outcome

    @property
    def port(self) -> PortReading:
        reading = read_ports(self.root)
        assert reading is not None
        (port,) = reading.ports
        return port

    @property
    def memory_errors(self) -> str:
        return (self.root / "sys/devices/system/edac/mc/mc0/ue_count").read_text()


@pytest.fixture
def host(tmp_path: Path) -> OneHost:
    return OneHost(tmp_path)


def test_a_node_boots_with_a_healthy_port(host: OneHost) -> None:
    assert host.port == PortReading(
        name="mlx5_0/1",
        state=ACTIVE,
        state_words="4: ACTIVE, physical 5: LinkUp",
        link_layer="InfiniBand",
        board="MT_0000000838",
        rate=400.0,
        counters={counter.rpartition("/")[2]: 0 for counter in COUNTERS},
    )
    assert (host.root / "proc/meminfo").exists()


def test_a_link_goes_down_and_comes_up(host: OneHost) -> None:
    assert set_link(host, "n0", up=False) > 0
    assert (host.port.state, host.port.counters["link_downed"]) == (DOWN, 1)
    set_link(host, "n0", up=True)
    assert (host.port.state, host.port.counters["link_downed"]) == (ACTIVE, 1)
    set_link(host, "n0", up=False)
    assert host.port.counters["link_downed"] == 2


def test_memory_errors_are_counted_until_they_are_cleared(host: OneHost) -> None:
    for _ in range(2):
        assert set_memory_error(host, "n0", clear=False) > 0
    assert host.memory_errors == "2\n"
    set_memory_error(host, "n0", clear=True)
    assert host.memory_errors == "0\n"


def test_a_repair_undoes_every_fault(host: OneHost) -> None:
    healthy = host.port
    set_link(host, "n0", up=False)
    set_memory_error(host, "n0", clear=False)
    mend_adapter_and_memory(host, "n0")
    assert (host.port, host.memory_errors) == (healthy, "0\n")


def test_the_policy_of_the_test_cluster_waits_for_seconds(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    rules = Policy.load(tmp_path / "policy.toml").rules()
    (rule,) = [rule for rule in rules if (rule.kind, rule.code) == ("rdma-port", 1)]
    assert (rule.share, rule.window_s, rule.clear_s) == (0.9, 5, 20)


def test_musterd_reads_the_files_that_the_node_makes_when_it_boots() -> None:
    script = (CLUSTER / "init.sh").read_text()
    assert "run=/run/cluster\n" in script
    assert HOST_ROOT == "/run/cluster/host"
    assert script.index("healthy-host.sh $run/host") < script.index("--host-root $run/host")


@pytest.mark.parametrize("verb", ["link-down", "ecc"])
def test_the_tool_has_the_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([verb, "--help"])
    assert ended.value.code == 0
    assert "--clear" in capsys.readouterr().out
