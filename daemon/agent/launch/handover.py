"""What a launcher hands over: the command of one rank, and how it would have started it. Pure.

`user_path/sitecustomize.py` writes it in the user's interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.daemon.transport.job_limits import MAX_FAILURES, MAX_RANKS_PER_NODE
from muster.v1.common_pb2 import JobSpec
from muster.wording import counted

MACRO = "${local_rank}"
"""What torch replaces by the local rank in the words of a rank: `python -m torch.distributed.launch` uses it."""
_READ_LATE = ("TORCHELASTIC_", "ROLE_NAME", "NCCL_", "GLOO_")
"""Beginnings of names that no import reads: what torchrun adds, and what a group reads as it is made."""


class WrongHandover(ValueError):
    """A launch that the gang can't run. The message says what would be right."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How a launcher would show the output of its ranks.

    silent: local ranks whose output goes to their logs alone.
    marks: what stands in front of each line of a local rank, with ${rank} and ${hostname} for its rank and node; empty:
        nothing.
    """

    silent: frozenset[int] = frozenset()
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Handover:
    """What one launcher would have started on this node.

    argv, environment, folder: of each rank.
    min_nodes, max_nodes: for how many launchers it would have waited.
    max_restarts: how often it would have started the ranks again.
    processors: those that the launcher may use.
    limits: its limits (the name after RLIMIT_), soft and hard.
    forks: pids of forks of the launcher that have reached the socket for them.
    imported_with: the environment with which they have imported PyTorch.
    """

    argv: tuple[str, ...]
    ranks_per_node: int
    environment: Mapping[str, str]
    folder: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    shown: Shown
    processors: frozenset[int]
    limits: Mapping[str, tuple[int, int]]
    umask: int
    forks: frozenset[int] = frozenset()
    imported_with: Mapping[str, str] = field(default_factory=dict)

    def imports_as(self, environment: Mapping[str, str]) -> bool:
        """Whether ranks with this environment would have imported PyTorch as the launcher has: libraries read variables
        as they are imported."""
        differ = {name for name, _ in self.imported_with.items() ^ environment.items()}
        return all(name.startswith(_READ_LATE) for name in differ)

    def of_job(self, spec: JobSpec) -> JobSpec:
        """The job with this launch.

        Raises:
            WrongHandover: the launcher would wait for more nodes than the job has, or for fewer; it starts no rank on a
                node, or too many; or a word is no UTF-8.
        """
        if not 0 < self.ranks_per_node <= MAX_RANKS_PER_NODE:
            raise WrongHandover(
                f"--nproc-per-node={self.ranks_per_node}: a node runs at least 1 rank, and at most {MAX_RANKS_PER_NODE}"
            )
        if not self.min_nodes <= spec.nodes <= self.max_nodes:
            asked = f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes < self.max_nodes else f"{self.min_nodes}"
            raise WrongHandover(
                f"the launcher asks for --nnodes={asked}, and the ranks are to run on {counted(spec.nodes, 'node')}: "
                "write --nnodes=$SLURM_NNODES for torchrun, and no --nnodes for muster run"
            )
        made = JobSpec()
        made.CopyFrom(spec)
        if self.min_nodes < self.max_nodes and made.min_nodes in (0, made.nodes):
            made.min_nodes = self.min_nodes
        if self.max_restarts:
            made.max_failures = min(max(made.max_failures, self.max_restarts + 1), MAX_FAILURES)
        del made.command[:]
        try:
            made.command.extend(self.argv)
            made.ranks_per_node, made.work_dir = self.ranks_per_node, self.folder
        except UnicodeEncodeError as error:
            raise WrongHandover(f"{error.object!r} is no UTF-8") from None
        return made


def read(line: bytes) -> Handover:
    """The hand-over in one line.

    Raises:
        WrongHandover: it is none.
    """
    try:
        found = json.loads(line)
        return Handover(
            argv=tuple(map(str, found["argv"])),
            ranks_per_node=int(found["ranks"]),
            environment={str(name): str(value) for name, value in found["environment"].items()},
            folder=str(found["folder"]),
            min_nodes=int(found["min_nodes"]),
            max_nodes=int(found["max_nodes"]),
            max_restarts=int(found.get("max_restarts", 0)),
            shown=Shown(frozenset(map(int, found.get("silent", ()))), tuple(map(str, found.get("marks", ())))),
            processors=frozenset(map(int, found["processors"])),
            limits={str(name): _pair(limits) for name, limits in found["limits"].items()},
            umask=int(found["umask"]),
            forks=frozenset(map(int, found.get("forks", ()))),
            imported_with={str(name): str(value) for name, value in found.get("imported_with", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongHandover(f"this is no hand-over of a launcher: {error!r}") from None


def _pair(limits: Sequence[int]) -> tuple[int, int]:
    soft, hard = map(int, limits)
    return soft, hard
