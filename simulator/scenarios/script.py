"""Rehearsals as text: commands, each followed by all that it led to.

    # A line of comment.
    > gang nodes=4 spares=2
    > until step 3
        0.000  Slurm starts job 1 (restart 0) on n0 n1 n2 n3 n4 n5
    > power_off n1
    > until generation 2

`play` takes such a text and gives it back with what happens now. docs/ladder has one for each scenario.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.fact_text import call_words
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase, Verdict
from muster.simulator.scenarios.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS

PROMPT = "> "
UNTIL_TIMEOUT_S = 600.0
"""No scenario has to wait longer, not even for a job that Slurm has requeued."""
_COMMANDS = (
    "crash", "power_off", "pause", "resume", "kill_rank", "kill_agent", "signal", "sigterm", "requeue", "finish",
    "restart_coordinator", "repair", "start_other_job", "hang_rank", "declared_phase",
)  # fmt: skip
"""Methods of Scenario that take words alone."""


class InvalidScript(ValueError):
    """A command that can't be right: which, and what would be."""


def play(text: str) -> str:
    """The script `text` with what each of its commands leads to now, in place of what stands there.

    Raises:
        InvalidScript: a command is unknown, or has the wrong words.
        TimeoutError: what a command waits for does not happen.
    """
    return "\n".join(Player().lines(text.splitlines())) + "\n"


class Player:
    """One world, and how much of its transcript has been told."""

    def __init__(self) -> None:
        self._world: Scenario | None = None
        self._lines_shown = 0

    def lines(self, script: list[str]) -> Iterator[str]:
        """Comments, commands, and what follows from each."""
        for line in script:
            if line.startswith(PROMPT):
                yield line
                yield from self._run_command(line.removeprefix(PROMPT))
            elif line.startswith("#") or not line.strip():
                yield line

    def _run_command(self, command: str) -> Iterator[str]:
        name, *words = shlex.split(command)
        try:
            if name == "gang":
                settings: dict[str, Any] = {key: _value(value) for key, value in (word.split("=", 1) for word in words)}
                limits = {name: settings.pop(name) for name in [*settings] if name in Limits.__slots__}
                self._world = Scenario(**settings, limits=replace(NO_LIMITS, **limits))
            elif name == "show":
                yield from self._show()
            else:
                self._execute(name, words)
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidScript(f"{command!r}: {error}; see {__name__} for the commands") from None
        new = self.world.transcript()[self._lines_shown :]
        self._lines_shown += len(new)
        yield from new

    def _execute(self, name: str, words: list[str]) -> None:
        world = self.world
        if name in _COMMANDS:
            getattr(world, name)(*words)
        elif name == "until":
            world.run_until(self._condition(*words), UNTIL_TIMEOUT_S)
        elif name == "wait":
            world.run_for(float(words[0]))
        elif name == "cancel":
            world.post_event(events.CancelAsked("g", "uid 1000"))
        elif name == "scancel":
            world.world.cluster.cancel(world.gang.job)
        elif name == "full_storage":
            world.world.durable_storage.fails_until = world.now + float(words[0])
        else:
            raise ValueError("there is no such command")

    def _condition(self, what: str, number: str = "") -> Callable[[], bool]:
        world = self.world
        if what == "step":
            return lambda: world.core.observed.gang("g").step >= int(number)
        if what == "generation":
            return lambda: world.gang.stepped == int(number)
        return lambda: world.gang.phase is Phase[what]

    def _show(self) -> Iterator[str]:
        """How things stand, on a few lines."""
        world, gang = self.world, self.world.gang
        yield f"phase       {gang.phase}" + (f", exit code {gang.exit_code}: {gang.reason}" if gang.final else "")
        yield f"ranks on    {' '.join(seat.node for seat in gang.seats)}"
        yield f"spares      {' '.join(seat.node for seat in gang.spares if not gang.members[seat.node].out) or 'none'}"
        blamed = sorted(
            (n for n in world.core.state.nodes.values() if n.verdict is not Verdict.FIT), key=lambda n: n.name
        )
        yield f"blamed      {', '.join(f'{n.name} {n.verdict}' for n in blamed) or 'nobody'}"
        yield f"asked Slurm {', '.join(map(call_words, world.slurm)) or 'nothing'}"

    @property
    def world(self) -> Scenario:
        """The world; the first command makes it.

        Raises:
            ValueError: it has not been made.
        """
        if self._world is None:
            raise ValueError('the first command makes the gang: "gang nodes=4 spares=2"')
        return self._world


def _value(text: str) -> object:
    if "," in text:
        return text.split(",")
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text else int(text) if text.isdigit() else text
