"""The defaults that an estimate rests on. Each is named: a reader can tell them from what the job says. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Default:
    """A value that nobody gave."""

    name: str
    value: str
    """With its unit."""
    source: str
    """Where it comes from."""
    instead: str
    """How to give another one."""


@dataclass(slots=True)
class Defaults:
    """The defaults that were taken, in order."""

    taken: list[Default] = field(default_factory=list)

    def take(self, name: str, value: str, source: str, instead: str) -> None:
        """Notes a default."""
        self.taken.append(Default(name, value, source, instead))
