"""`muster run [options] train.py`: which words are Muster's and which torchrun's, and the command that reads these."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.launcher.errors import SiteFault

FLAGS = frozenset({
    "-h", "--help", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path", "--standalone",
    "--virtual-local-rank", "--virtual_local_rank", "--use-env", "--use_env",
})  # fmt: skip
"""Options of torchrun without a value. Each other one has a value, and no more needs to be known of it here."""
_SAY_NODES = ("--nnodes", "--standalone")
_MEETING_PLACE = frozenset({"--rdzv-endpoint", "--rdzv_endpoint"})


@dataclass(frozen=True, slots=True)
class TorchrunCall:
    """What is for torchrun: its options, and the script with its arguments."""

    options: tuple[str, ...]
    script: tuple[str, ...]

    @property
    def names_meeting_place(self) -> bool:
        """Whether the launchers of several hosts would meet."""
        return any(word.partition("=")[0] in _MEETING_PLACE for word in self.options)

    def command(self, nodes: int, environ: Mapping[str, str]) -> list[str]:
        """The command that reads the options: torchrun of the user's environment, else of this interpreter's.

        Args:
            nodes: on which the ranks run, if the options do not say how many.

        Raises:
            SiteFault: there is no torchrun.
        """
        given = {word.partition("=")[0] for word in self.options}
        says_nodes = "PET_NNODES" in environ or not given.isdisjoint(_SAY_NODES)
        return [_torchrun(environ), *([] if says_nodes else [f"--nnodes={nodes}"]), *self.options, *self.script]


def divide(words: Sequence[str], own: Mapping[str, argparse.Action]) -> tuple[list[str], TorchrunCall]:
    """Muster's options, and what is for torchrun. The options of both stand before the script, in any order.

    Args:
        own: the options of Muster.
    """
    mine: list[str] = []
    theirs: list[str] = []
    rest = [*words]
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        name, has_value, _ = word.partition("=")
        # `-r3` has its value in the same word.
        takes_value = own[name].nargs != 0 if name in own else name not in FLAGS and not _is_short_with_value(name)
        taken = [word, rest.pop(0)] if takes_value and not has_value and rest else [word]
        (mine if name in own else theirs).extend(taken)
    return mine, TorchrunCall(tuple(theirs), tuple(rest))


def _is_short_with_value(word: str) -> bool:
    return not word.startswith("--") and len(word) > len("-r")


def _torchrun(environ: Mapping[str, str]) -> str:
    beside = Path(sys.executable).parent / "torchrun"
    found = shutil.which("torchrun", path=environ.get("PATH", os.defpath)) or (str(beside) if beside.exists() else "")
    if not found:
        raise SiteFault("torchrun is not on PATH", "activate the environment in which PyTorch is installed")
    return found
