"""`muster flush JOB`: writes the newest step in memory to durable storage, while the job trains on.

The command waits until the checkpoint is complete and prints its folder. It exits with 1 if the flush has failed.
`--no-wait` only makes the request.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

from muster.launcher.command import Command, connect, load_site, note_coordinator_unavailable, say
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import EXIT_FAILED, NotNow
from muster.v1.api_pb2 import GangRef, GangView

WHOLE_VERSION_S, _ASK_AGAIN_S = 10.0, 0.2
"""Seconds for which the command asks again while the gang runs, and between two questions."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the checkpoint is complete")


async def _run(options: argparse.Namespace) -> int:
    ref = gang_ref(options.job)
    async with connect(load_site(options)) as coordinator:
        serial = await _order(coordinator, ref)
        if options.no_wait:
            say(f"flush {serial} is ordered")
            return 0
        async for view in coordinator.follow(ref, note_coordinator_unavailable):
            if outcome := outcome_of_flush(view, serial):
                say(outcome.words)
                return 0 if outcome.complete else EXIT_FAILED
    return EXIT_FAILED


COMMAND = Command(_arguments, _run)


async def _order(coordinator: CoordinatorClient, ref: GangRef) -> int:
    """Orders the flush. Where steps are short, the coordinator does not see a whole version at every moment.

    Raises:
        NotNow: the gang does not run, or no whole version was seen within WHOLE_VERSION_S.
    """
    deadline = asyncio.get_running_loop().time() + WHOLE_VERSION_S
    while True:
        try:
            return await coordinator.flush(ref)
        except NotNow:
            runs = (await coordinator.describe(ref)).phase == "RUNNING"
            if not runs or asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(_ASK_AGAIN_S)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a flush. `complete`: a durable checkpoint is there."""

    complete: bool
    words: str


def outcome_of_flush(view: GangView, serial: int) -> Outcome | None:
    """What became of flush `serial` of the gang; None: it runs."""
    newest = view.checkpoint
    if newest.flush_serial == serial and not newest.flushing:
        if newest.flush_error:
            return Outcome(False, f"flush {serial} failed: {newest.flush_error}")
        return Outcome(True, newest.durable_path)
    if newest.flush_serial > serial:
        return Outcome(False, f"flush {serial} was followed by another one before its end was seen: see muster events")
    if view.final:
        return Outcome(False, f"flush {serial} did not end: the job is {view.phase}: {view.reason}")
    return None
