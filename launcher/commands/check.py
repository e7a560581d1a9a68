"""`muster check NODES`: checks nodes in a short Slurm job of their own, and pairs of them.

The exit status is 0 if all nodes have passed and no node and no link is slow, otherwise 1. It needs no coordinator.

The job is one srun, which gets an allocation of its own. Each task checks its node and prints a line. It then waits for
a line on its standard input, which srun gives to all tasks: which of the nodes form pairs. So pairs need no other
allocation, no other prolog and no other start of Python.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import muster
from muster.daemon.preflight import job_step
from muster.daemon.preflight.check_process import MOST_WAIT_FOR_CORES_S
from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.pairing import PairRate, localise, rounds
from muster.launcher.command import Command, print_note, say, screen, show
from muster.launcher.errors import EXIT_FAILED, SiteFault, Unavailable, WrongInput
from muster.launcher.output.check_tables import check_table, counter_lines, pair_lines
from muster.slurm.client.backends import run_command
from muster.slurm.client.errors import SlurmError
from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.submit_environment import for_commands, for_own_srun
from muster.wording import counted

MAX_NODES = 64
"""Nodes of one call. A fleet that checks itself at once trains nothing meanwhile, and loads PyTorch from one file
system."""
_NODE_DEADLINE_S = 15.0
"""Seconds for the check of one node."""
_CHECKS_DEADLINE_S = _NODE_DEADLINE_S + MOST_WAIT_FOR_CORES_S + 10.0
"""Seconds for all checks. A node of which nothing has come by then is silent."""
_PAIRS_DEADLINE_S = 150.0
"""Seconds for all pairs: 60 s for the start, 24 s if each round times out, and the rest for shared cores."""
_GRANT_TIMEOUT_S = 10
"""Seconds that srun waits for the nodes."""
_END_TIMEOUT_S = 5.0
"""Seconds that srun has to end once all tasks have said all."""
_TIME_LIMIT = "--time=6"
"""Minutes. Slurm ends the step if this process can't."""
_CANCEL_TIMEOUT_S = 10.0
_PORTS = range(20_000, 30_000)
"""Where the store of the pairs listens: below the ports that Linux gives to outgoing connections."""
# The shell tells when the task has ended, so that nobody waits for a task that could not start or has crashed.
_TELL_END = """"$@"; printf '\\n{"node": "%s", "ended": %d}\\n' "$SLURMD_NODENAME" $?"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("nodes", metavar="NODES", help='names as Slurm writes them: "n[1-8],n12"')
    parser.add_argument("--partition", metavar="NAME", default="", help="Slurm's partition for the job")
    parser.add_argument(
        "--python", metavar="PATH", default=sys.executable, help="an interpreter with PyTorch; default: this one"
    )
    parser.add_argument("--no-pairs", action="store_true", help="check each node, and no pairs of nodes")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each node and each pair")


async def _run(options: argparse.Namespace) -> int:
    nodes = _expand(options.nodes)
    found = await check_nodes(nodes, CheckOptions(options.python, options.partition, pairs=not options.no_pairs))
    _print(found.results, found.pairs, options.json)
    slow = localise(found.pairs)
    passed = all(result.outcome is Outcome.PASSED for result in found.results.values())
    good = passed and not slow.nodes and not slow.links
    return 0 if good else EXIT_FAILED


COMMAND = Command(_arguments, _run, remote=False)


def _expand(text: str) -> Sequence[str]:
    try:
        nodes = list(dict.fromkeys(expand(text)))
    except ValueError as error:
        raise WrongInput(str(error)) from None
    if not 1 <= len(nodes) <= MAX_NODES:
        raise WrongInput(
            f"{counted(len(nodes), 'node')}: a check takes 1 to {MAX_NODES}", "check the others in another call"
        )
    return nodes


def _print(results: dict[str, CheckResult], pairs: Sequence[PairRate], as_json: bool) -> None:
    if as_json:
        for node, result in results.items():
            print(json.dumps({"node": node, **json.loads(result.to_json())}))
        for pair in pairs:
            print(json.dumps(dataclasses.asdict(pair)))
    else:
        show(check_table(results, screen()))
        for line in (*counter_lines(results), *pair_lines(pairs)):
            say(line)
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """`python`: the interpreter on the nodes. `partition`: empty for Slurm's default. `pairs`: measure pairs, too."""

    python: str
    partition: str
    pairs: bool


@dataclass(slots=True)
class Checked:
    """The result of each node, and what each pair of the rounds has reached."""

    results: dict[str, CheckResult]
    pairs: list[PairRate] = field(default_factory=list)


async def check_nodes(nodes: Sequence[str], options: CheckOptions) -> Checked:
    """Check the nodes, then pairs of those that have passed.

    Raises:
        Unavailable: Slurm does not give the nodes.
        SiteFault: srun can't be started.
    """
    name = f"muster-check-{secrets.token_hex(4)}"
    try:
        stdin = asyncio.subprocess.PIPE if options.pairs else asyncio.subprocess.DEVNULL
        process = await run_command.start(
            [*_srun(nodes, options, name), *_program(options)], stdin=stdin, env=for_own_srun(os.environ)
        )
    except SlurmError as error:
        raise SiteFault(str(error)) from None
    errors = asyncio.create_task(_read_all(process.stderr))
    step = _Step(process, nodes)
    try:
        await step.read(lambda: step.has_all(nodes), _CHECKS_DEADLINE_S + _GRANT_TIMEOUT_S)
        checked = Checked(step.results())
        if options.pairs:
            checked.pairs = await _measure_pairs(step, checked.results)
        await step.wait_end()
    finally:
        if process.returncode is None:
            await _cancel(name)
        await run_command.kill(process)
    words = await errors
    if not step.lines and process.returncode:
        raise Unavailable(f"srun: {words or f'exit status {process.returncode}'}", "are the nodes idle and in service?")
    return checked


async def _measure_pairs(step: _Step, results: dict[str, CheckResult]) -> list[PairRate]:
    nodes = [node for node, result in results.items() if result.outcome in (Outcome.PASSED, Outcome.SLOW)]
    nodes = nodes if len(nodes) > 1 else []
    await step.tell({"port": secrets.choice(_PORTS), "nodes": nodes})
    if not nodes:
        return []
    wanted = sum(len(pairs) for pairs in rounds(len(nodes)))
    await step.read(lambda: len(step.pairs(nodes)) >= wanted or step.ended.issuperset(nodes), _PAIRS_DEADLINE_S)
    found = step.pairs(nodes)
    if not found:
        print_note("muster: no pair of nodes was measured: it needs PyTorch on the nodes")
    return found


class _Step:
    """The running step. `lines`: the JSON that its tasks have printed. `ended`: the nodes whose task has ended."""

    def __init__(self, process: asyncio.subprocess.Process, nodes: Sequence[str]) -> None:
        self._process = process
        self._nodes = nodes
        self._late = False
        self.lines: list[dict[str, Any]] = []
        self.ended: set[str] = set()
        self._status: dict[str, object] = {}

    async def read(self, complete: Callable[[], bool], timeout_s: float) -> None:
        """Read lines until `complete`, or all tasks have ended, or the time is over."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while not complete() and not self._process.stdout.at_eof():
                    with suppress(ValueError, RecursionError):  # what libraries print, at any length
                        self._take(json.loads(await self._process.stdout.readline()))
        except TimeoutError:
            self._late = True
            print_note("muster: not all nodes have answered; the step is cancelled")

    def _take(self, line: Any) -> None:
        if not isinstance(line, dict):
            return
        self.lines.append(line)
        if "ended" in line and line.get("node") in self._nodes:
            self.ended.add(line["node"])
            self._status[line["node"]] = line["ended"]

    async def tell(self, message: dict[str, object]) -> None:
        """Give all tasks one line, the last one."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # srun has ended
            self._process.stdin.write(f"{json.dumps(message)}\n".encode())
            await self._process.stdin.drain()
            self._process.stdin.close()

    async def wait_end(self) -> None:
        """Wait until srun has ended, unless some of its tasks are known to be silent."""
        if not self._late:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await self._process.wait()

    def has_all(self, nodes: Sequence[str]) -> bool:
        """Each node has a result, or its task has ended."""
        return self._checks().keys() | self.ended >= set(nodes)

    def results(self) -> dict[str, CheckResult]:
        """The result of each node."""
        found = self._checks()
        return {node: found.get(node) or self._without_result(node) for node in self._nodes}

    def _without_result(self, node: str) -> CheckResult:
        if node in self.ended:
            return CheckResult(Outcome.FAILED, f"the check could not run: exit status {self._status[node]}")
        return CheckResult(Outcome.SILENT, f"nothing came from the node within {_CHECKS_DEADLINE_S:g} s")

    def _checks(self) -> dict[str, CheckResult]:
        found = {}
        for line in self.lines:
            with suppress(KeyError, TypeError, ValueError):
                found[line["node"]] = CheckResult.from_json(json.dumps(line["check"]))
        return found

    def pairs(self, nodes: Sequence[str]) -> list[PairRate]:
        """What the pairs of these nodes have reached so far."""
        found = []
        for line in self.lines:
            with suppress(KeyError, TypeError, ValueError):
                rate, error, shared = float(line["gb_s"]), str(line.get("error", "")), bool(line["cores_shared"])
                pair = PairRate(str(line["first"]), str(line["second"]), rate, error, shared)
                if {pair.first, pair.second} <= set(nodes):
                    found.append(pair)
        return found


def _program(options: CheckOptions) -> list[str]:
    root = str(Path(next(iter(muster.__path__))).parent)
    python = [options.python, "-P", "-c", job_step.COMMAND, root, str(_NODE_DEADLINE_S)]
    return ["sh", "-c", _TELL_END, "sh", *python]


def _srun(nodes: Sequence[str], options: CheckOptions, name: str) -> list[str]:
    partition = [f"--partition={options.partition}"] if options.partition else []
    return [
        "srun",
        f"--job-name={name}",
        f"--nodelist={','.join(nodes)}",
        f"--nodes={len(nodes)}",
        "--ntasks-per-node=1",
        "--exclusive",
        f"--immediate={_GRANT_TIMEOUT_S}",
        _TIME_LIMIT,
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        *partition,
    ]


async def _read_all(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return " ".join((await stream.read()).decode(errors="replace").split())


async def _cancel(name: str) -> None:
    with suppress(SlurmError):
        cancel = ["scancel", "--me", f"--name={name}"]
        await run_command.run(cancel, timeout_s=_CANCEL_TIMEOUT_S, env=for_commands(os.environ))
