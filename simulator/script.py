"""Scenarios as text: commands, each followed by everything that it led to.

    # A comment.
    > gang nodes=4 spares=2
    > until step 3
        0.000  Slurm starts job 1 (restart 0) on n0 n1 n2 n3 n4 n5
    > power_off n1
    > until generation 2

`play` takes such a text and returns it with what happens now, line by line as the log has it, or as the kinds of facts
that were decided. The former are documents (docs/scenarios), the latter tests that no change of wording breaks.
A command is `gang`, `until`, `wait`, `network`, `show`, or a method of Scenario that takes only words.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.fact_text import call_words
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.node_health import NodeHealth
from muster.simulator.environment.site_network import network_of
from muster.simulator.scenario import Scenario
from muster.simulator.world.world import NO_LIMITS

PROMPT = "> "
UNTIL_TIMEOUT_S = 600.0
"""Seconds of virtual time after which "until" gives up. Waiting for a requeued job takes longest."""


class InvalidScript(ValueError):
    """A command is wrong. The message says which one and what is right."""


def play(text: str, *, facts_alone: bool = False) -> str:
    """The script `text`, in which what each command leads to now replaces the old transcript.

    `facts_alone`: the kinds of facts, with the node that each is about, in place of lines of the log.

    Raises:
        InvalidScript: a command is unknown or has wrong arguments.
        TimeoutError: the condition of an "until" command does not come true.
    """
    return "\n".join(Player(facts_alone).lines(text.splitlines())) + "\n"


class Player:
    """One scenario, and how many lines of its transcript have been shown."""

    def __init__(self, facts_alone: bool = False) -> None:
        self._facts_alone = facts_alone
        self._world: Scenario | None = None
        self._lines_shown = 0

    def lines(self, script: list[str]) -> Iterator[str]:
        """Comments, commands, and what follows from each command."""
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
                if "network" in settings:
                    settings["fabric"] = _network(settings.pop("network"))
                limits = {name: settings.pop(name) for name in [*settings] if name in Limits.__slots__}
                self._world = Scenario(**settings, limits=replace(NO_LIMITS, **limits))
            elif name == "show":
                yield from self._show()
            else:
                self._execute(name, words)
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidScript(f"{command!r}: {error}; see {__name__} for the commands") from None
        all_lines = _kinds_of_facts(self.world) if self._facts_alone else self.world.transcript()
        new = all_lines[self._lines_shown :]
        self._lines_shown += len(new)
        yield from (f"    {kind}" for kind, _ in groupby(new)) if self._facts_alone else new

    def _execute(self, name: str, words: list[str]) -> None:
        world = self.world
        if name == "until":
            world.run_until(self._condition(*words), UNTIL_TIMEOUT_S)
        elif name == "wait":
            world.run_for(float(words[0]))
        elif name == "network":
            world.see_fabric(_network(words[0]))
        elif name in vars(Scenario) and not name.startswith("_"):
            getattr(world, name)(*words)
        else:
            raise ValueError("unknown command")

    def _condition(self, what: str, number: str = "") -> Callable[[], bool]:
        world = self.world
        if what == "step":
            return lambda: world.core.observed.gang("g").step_number >= int(number)
        if what == "generation":
            return lambda: world.gang.newest.stepped_generation == int(number)
        return lambda: world.gang.phase is Phase[what]

    def _show(self) -> Iterator[str]:
        """The state of the gang and of its nodes in a few lines."""
        world, gang = self.world, self.world.gang
        reason = "" if self._facts_alone else f": {gang.reason}"
        yield f"phase       {gang.phase}" + (f", exit code {gang.exit_code}{reason}" if gang.final else "")
        yield f"ranks on    {' '.join(seat.node for seat in gang.roster.seats)}"
        spares = [seat.node for seat in gang.roster.spares if not gang.roster.members[seat.node].removed]
        yield f"spares      {' '.join(spares) or 'none'}"
        unhealthy = sorted(
            (n for n in world.core.state.nodes.values() if n.health is not NodeHealth.FIT), key=lambda n: n.name
        )
        yield f"unhealthy   {', '.join(f'{n.name} {n.health}' for n in unhealthy) or 'none'}"
        calls = (f"{call.verb} {call.node}".strip() if self._facts_alone else call_words(call) for call in world.slurm)
        yield f"asked Slurm {', '.join(calls) or 'nothing'}"

    @property
    def world(self) -> Scenario:
        """The scenario. The first command creates it.

        Raises:
            ValueError: the scenario does not exist yet.
        """
        if self._world is None:
            raise ValueError('the first command creates the gang: "gang nodes=4 spares=2"')
        return self._world


def _kinds_of_facts(world: Scenario) -> list[str]:
    """With the node, but for nodes and agents that come in an order that nobody decides."""
    comes = (facts.NodeRegistered, facts.MemberJoined)
    decided = [
        (type(fact).__name__, "" if isinstance(fact, comes) else getattr(fact, "node", "")) for _, fact in world.journal
    ]
    return [f"{kind} {node}".strip() for kind, node in decided]


def _network(leaves: str) -> events.FabricSeen:
    """The network with these leaves s0, s1, ...: "n0+n1/n2+n3"."""
    return network_of({node: f"s{at}" for at, nodes in enumerate(leaves.split("/")) for node in nodes.split("+")})


def _value(text: str) -> object:
    if "," in text:
        return text.split(",")
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text else int(text) if text.isdigit() else text
