"""What a command says of its version, and what follows from what the coordinator says of its own.

A command that reads goes on, and tells the user that the two do not fit. One that changes something is refused: by the
coordinator if that knows how, and `muster submit` by itself, before the job is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from muster import __version__, compatibility
from muster.launcher.errors import SiteFault

_HINT = "docs/operations/upgrade.md says which versions work together, and in which order to install them"

Metadata = Iterable[tuple[str, str | bytes]] | None


class VersionCheck:
    """One command's look at the coordinators that it calls. `tell`: tells the user that a coordinator does not fit."""

    def __init__(
        self, tell: Callable[[str], None] = lambda reason: None, mine: compatibility.Side | None = None
    ) -> None:
        self._side = mine or compatibility.own_side("the muster command")
        self.metadata = compatibility.metadata(self._side)
        """What each call carries."""
        self._tell = tell
        self._misfit = self._told = ""

    def meet(self, metadata: Metadata) -> None:
        """The coordinator has answered. An older one says nothing of its version."""
        theirs = compatibility.read_metadata("the coordinator", metadata)
        self._misfit = compatibility.misfit(self._side, theirs) or ""

    def tell(self) -> None:
        """Tell the user of a misfit, once."""
        if self._misfit and self._misfit != self._told:
            self._told = self._misfit
            self._tell(f"{self._misfit}. What follows may lack something")

    def check(self) -> None:
        """Raises SiteFault: the coordinator does not fit."""
        if self._misfit:
            raise SiteFault(self._misfit, _HINT)

    def refused(self, words: str, metadata: Metadata) -> SiteFault:
        """The error for a call that the coordinator does not know, or not from a command of this version."""
        self.meet(metadata)
        older = f"the coordinator is older than this command (muster {__version__}), and lacks this call: {words}"
        return SiteFault(f"{self._misfit or older}. Nothing was done", _HINT)
