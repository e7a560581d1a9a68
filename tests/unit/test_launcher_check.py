"""`muster check`: its Slurm step, with an `srun` on PATH that runs each task on this host; and what it prints."""

from __future__ import annotations

import itertools
import json
import os
import socket
import stat
import subprocess
import sys
from datetime import UTC
from pathlib import Path

import pytest

import muster
from muster.daemon.preflight import job_step
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.pairing import PairRate
from muster.launcher.main import main, parser
from muster.launcher.output.check_tables import check_table, pair_lines
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.screen import Screen
from muster.v1.api_pb2 import NodeView
from muster.v1.common_pb2 import CheckOutcome, NodeCheck

SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
program = sys.argv[1 + len(options):]
nodes = next(word for word in options if word.startswith("--nodelist=")).partition("=")[2].split(",")
if "n9" in nodes:
    sys.exit("srun: error: Unable to allocate resources: Requested nodes are busy")
tasks = []
for node in nodes:
    broken = {{"PYTHONPATH": os.environ["BROKEN"]}} if node == "n1" and "BROKEN" in os.environ else {{}}
    environment = {{**os.environ, "SLURMD_NODENAME": node, **broken}}
    tasks.append(subprocess.Popen(program, env=environment, stdin=subprocess.PIPE))
line = sys.stdin.buffer.readline()
for task in tasks:
    task.communicate(line)
"""


TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)

class Tensor:
    value = 1.0
    def __eq__(self, other):
        return Tensor.Equal(self.value == other)
    class Equal:
        def __init__(self, whole):
            self.all = lambda: whole

ones = lambda size, device: Tensor()
"""
DISTRIBUTED = """
class TCPStore:
    def __init__(self, *words, **options): pass
    def set(self, key, value): pass
    def wait(self, keys): pass

init_process_group = barrier = lambda *words, **options: None
new_group = lambda ranks, **options: ranks

def all_reduce(data, group):
    data.value *= len(group)
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "srun"
    file.write_text(SRUN)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes have no numpy, so that a check takes a tenth of the time."""
    (tmp_path / "without" / "numpy").mkdir(parents=True)
    (tmp_path / "without" / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('numpy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "without"))


async def check(*words: str) -> int:
    options = parser().parse_args(["check", *words])
    return int(await options.row.run(options))


@pytest.mark.usefixtures("measures_nothing")
async def test_healthy_nodes_pass_and_without_pytorch_no_pairs_are_measured(
    srun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await check("n[0-1]", "--json") == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [(line["node"], line["outcome"]) for line in lines] == [("n0", "passed"), ("n1", "passed")]
    assert "no pair of nodes was measured" in printed.err


@pytest.mark.usefixtures("measures_nothing")
async def test_a_node_that_fails_is_named_and_the_status_is_1(
    srun: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (srun / "broken" / "numpy").mkdir(parents=True)
    (srun / "broken" / "numpy" / "__init__.py").write_text("raise OSError('no driver')")
    monkeypatch.setenv("BROKEN", str(srun / "broken"))
    assert await check("n0,n1", "--no-pairs") == 1
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "passed" in rows["n0"]
    assert "failed" in rows["n1"]
    assert "no driver" in rows["n1"]


async def test_nodes_on_which_the_check_can_not_start_have_failed_at_once(
    srun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await check("n[0-1]", "--json", "--python", "/no/python3") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    why = "the check could not run: exit status 127"
    assert [(line["node"], line["outcome"], line["reason"]) for line in lines] == [
        ("n0", "failed", why),
        ("n1", "failed", why),
    ]


async def test_only_nodes_that_have_passed_form_pairs(
    srun: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PyTorch of two modules stands in: its pairs need no network."""
    (srun / "broken" / "numpy").mkdir(parents=True)
    (srun / "broken" / "numpy" / "__init__.py").write_text("raise OSError('no driver')")
    monkeypatch.setenv("BROKEN", str(srun / "broken"))
    (srun / "torch").mkdir()
    (srun / "torch" / "__init__.py").write_text(TORCH)
    (srun / "torch" / "distributed.py").write_text(DISTRIBUTED)
    monkeypatch.setenv("PYTHONPATH", str(srun))
    assert await check("n[0-3]", "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outcomes = {line["node"]: line["outcome"] for line in lines if "node" in line}
    assert outcomes == dict.fromkeys(("n0", "n2", "n3"), "passed") | {"n1": "failed"}, lines
    pairs = {frozenset((line["first"], line["second"])) for line in lines if "first" in line}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(("n0", "n2", "n3"), 2)}


@pytest.mark.usefixtures("measures_nothing")
def test_a_task_prints_its_line_at_once_though_python_does_not_buffer() -> None:
    """The tasks of a step print beside each other. Each write to this socket is a message of its own."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    root = str(Path(next(iter(muster.__path__))).parent)
    command = [sys.executable, "-P", "-c", job_step.COMMAND, root, "60"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "SLURMD_NODENAME": "n0"}
    with reader:
        with writer:
            task = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, env=environment)
        written = [reader.recv(1 << 16), reader.recv(1 << 16)]
    assert (task.wait(), json.loads(written[0])["node"], written[0][-1:], written[1]) == (0, "n0", b"\n", b"")


@pytest.mark.parametrize(("nodes", "status"), [("n[1-65]", 64), ("", 64), ("n[", 64), ("n9", 69)])
def test_wrong_or_busy_nodes(nodes: str, status: int, srun: Path) -> None:
    assert main(["check", nodes]) == status


def test_a_site_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert main(["check", "n0"]) == 78


def test_slow_nodes_and_links_are_named() -> None:
    good = [PairRate("n0", "n1", 1.0), PairRate("n2", "n3", 1.0), PairRate("n0", "n2", 1.0)]
    lines = list(pair_lines([*good, PairRate("n1", "n3", 0.0, "timed out")]))
    assert lines == ["4 pairs of nodes: 0.00 to 1.00 GB/s", "slow link: n1 and n3: timed out"]
    bad = [PairRate("n3", "n1", 0.1), PairRate("n3", "n2", 0.1)]
    assert "slow node: n3, in all of its pairs" in list(pair_lines([good[0], good[2], *bad]))


def test_what_a_node_prints_reaches_no_terminal_as_it_is() -> None:
    shown = "".join(check_table({"n0": CheckResult(Outcome.FAILED, "\x1b[31mred", "\x1b]0;title\x07")}, Screen(80)))
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_nodes_show_their_newest_check_if_asked() -> None:
    found = NodeCheck(outcome=CheckOutcome.CHECK_OUTCOME_PASSED, gflops=56_000, memory_gb_s=2400, hardware="8 x H100")
    checked = NodeView(node="n0", verdict="FIT", node_check=found, checked_s=86_400, checked_in_job=12)
    lines = list(node_lines([checked, NodeView(node="n1", verdict="FIT")], Screen(zone=UTC), verbose=True))
    assert "passed\t1970-01-02 00:00:00+00:00\tjob 12" in lines[1]
    assert "56,000 GFLOP/s, 2,400 GB/s memory" in lines[1]
    assert "8 x H100" in lines[1]
    assert "never" in lines[2]
    assert "8 x H100" not in "".join(node_lines([checked], Screen()))
