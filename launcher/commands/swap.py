"""`muster swap JOB NODE`: a spare takes the place of a node at the end of a step. The node is not drained.

The command waits for the outcome, and exits with 1 if the node keeps its ranks. `--no-wait` only makes the request.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from muster.launcher.command import Command, connect, load_site, note_coordinator_unavailable, say
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.errors import EXIT_FAILED
from muster.v1.api_pb2 import GangView, RecoveryView, SwapReply
from muster.wording import counted


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")
    parser.add_argument("node", metavar="NODE", help="a node that carries ranks of the job")
    parser.add_argument("--reason", metavar="TEXT", default="", help="why; `muster events` shows it")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the node is left")


async def _run(options: argparse.Namespace) -> int:
    ref = gang_ref(options.job)
    async with connect(load_site(options)) as coordinator:
        reply = await coordinator.swap(ref, options.node, options.reason)
        say(reply.text)
        if options.no_wait:
            return 0
        async for view in coordinator.follow(ref, note_coordinator_unavailable):
            if outcome := outcome_of_swap(view, reply, options.node):
                say(outcome.words)
                return 0 if outcome.left else EXIT_FAILED
    return EXIT_FAILED


COMMAND = Command(_arguments, _run)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a swap. `left`: the ranks have left the node, and train on another one."""

    left: bool
    words: str


def outcome_of_swap(view: GangView, reply: SwapReply, node: str) -> Outcome | None:
    """What became of the swap that `reply` has promised; None: it is under way."""
    after = [recovery for recovery in view.recoveries if recovery.generation > reply.generation]
    if after and node in after[0].nodes_out and (trained := next((r for r in after if r.first_step_s), None)):
        return Outcome(True, _words_of_success(after[0], trained, reply, node))
    if after and node not in after[0].nodes_out and after[0].started_s:
        return Outcome(False, f"{node} keeps its ranks: {after[0].cause}")
    if view.final or view.phase == "REQUEUED":
        return Outcome(False, f"{node} was not swapped: the job is {view.phase}: {view.reason}")
    return None


def _words_of_success(left: RecoveryView, trained: RecoveryView, reply: SwapReply, node: str) -> str:
    repeated = max(0, left.step_before - left.step_restored)
    steps = f"{counted(repeated, 'step was', 'steps were') if repeated else 'no step was'} repeated"
    seconds = trained.first_step_s - reply.planned_s
    return f"{' '.join(left.nodes_in)} took the place of {node} after step {left.step_before}: {steps}, {seconds:.1f} s"
