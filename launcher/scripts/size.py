"""How many nodes a script asks for, and what becomes of its options of size when spares are added. Pure.

Where Slurm would choose the number of nodes, spares are refused: nobody would know which nodes they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.launcher.errors import WrongInput
from muster.launcher.scripts.asked import NOTHING, Asked, Given
from muster.slurm.client.parsing import gres, hostlist
from muster.slurm.client.sbatch_options import SbatchOption
from muster.slurm.client.srun_options import SrunWords

_COUNT = re.compile(r"(\d+)([kKmM]?)(?:-(\d+)([kKmM]?))?")
_TIMES = {"": 1, "k": 1024, "m": 1024 * 1024}
_SAYS_NOTHING = SrunWords((), ())


@dataclass(frozen=True, slots=True)
class Size:
    """Nodes of the script itself, without spares. None: Slurm chooses."""

    fewest: int | None
    most: int | None

    @property
    def nodes(self) -> int | None:
        """The number, if there is one alone."""
        return self.fewest if self.fewest == self.most else None


def size_of(asked: Asked, *, elastic: bool) -> Size:
    """The size that sbatch would give the job.

    Raises:
        WrongInput: a range of nodes, for a job that is not elastic.
    """
    if (one := asked.last("nodes")) is None:
        nodes = _derived(asked)
        return Size(nodes, nodes)
    found = _COUNT.fullmatch((one.option.value or "").strip())
    if found is None:
        raise WrongInput(f"{one}: Muster needs one number of nodes, as in --nodes=4", NOTHING)
    fewest = int(found[1]) * _TIMES[found[2].lower()]
    most = int(found[3]) * _TIMES[found[4].lower()] if found[3] else fewest
    if fewest < most and not elastic:
        raise WrongInput(
            f"{one} lets Slurm choose the number of nodes, which fits no job that must train on all of them",
            f"write --nodes={most}, or add a line `#MUSTER --elastic` if the script trains on any number. {NOTHING}",
        )
    return Size(fewest, most)


def likely_nodes(asked: Asked) -> int | None:
    """The number of nodes, if it is known. Nothing is refused."""
    try:
        return size_of(asked, elastic=True).nodes
    except WrongInput:
        return None


def tasks_per_node(asked: Asked, srun: SrunWords = _SAYS_NOTHING) -> int:
    """Tasks on each node of an srun; 0: nothing says it. `srun`: its own options, which come first."""
    nodes = _whole(srun.value("nodes")) or likely_nodes(asked)
    tasks, each = _whole(srun.value("ntasks")), _whole(srun.value("ntasks-per-node"))
    if not tasks and not each:
        tasks, each = _number(asked, "ntasks"), _number(asked, "ntasks-per-node")
    return tasks // nodes if tasks and nodes else each or 0


def _derived(asked: Asked) -> int | None:
    """The number of nodes of a script without --nodes; None: Slurm would choose it."""
    if (listed := asked.value("nodelist")) and "/" not in listed:
        return len(_expanded(listed)) or None
    if asked.last("nodefile", "nodelist"):
        return None
    gpus, per_node = (sum(gres.counts(asked.value(name) or "")) for name in ("gpus", "gpus-per-node"))
    if gpus:
        return 1 if gpus == 1 else gpus // per_node if per_node and gpus % per_node == 0 else None
    tasks, on_each = _number(asked, "ntasks"), _number(asked, "ntasks-per-node")
    if tasks in (None, 1):
        return 1
    return tasks // on_each if on_each and tasks % on_each == 0 else None


def grown(asked: Asked, size: Size, spares: int) -> Iterator[SbatchOption]:
    """The options that change for so many spares.

    Raises:
        WrongInput: an option can't grow with them. The message says what to write.
    """
    if not spares:
        return
    if size.fewest is None or size.most is None:
        raise WrongInput(
            f"{_who_chooses(asked)}: Slurm would choose the number of nodes, and nobody would know which "
            "nodes are spares",
            f"write --nodes=N beside it. {NOTHING}",
        )
    fewest, most = size.fewest + spares, size.most + spares
    yield SbatchOption("nodes", str(most) if fewest == most else f"{fewest}-{most}")
    if (one := asked.last("ntasks")) is not None:
        yield SbatchOption("ntasks", str(_share(one, _number(asked, "ntasks"), size) * most))
    if (of_all := asked.last("gpus")) is not None:
        gpus = gres.with_counts(of_all.option.value or "", lambda count: _share(of_all, count, size) * most)
        yield SbatchOption("gpus", gpus)
        if each := gpus_of_node(asked, size):  # else Slurm may choose a node with fewer, which is no spare for another
            yield SbatchOption("gpus-per-node", each)
    if (one := asked.last("segment")) and (segment := _number(asked, "segment")) and most % segment:
        raise WrongInput(
            f"{one} must divide the {most} nodes of the job with its spares",
            f"with --spares={segment - (most - spares) % segment} it does. {NOTHING}",
        )


def gpus_of_node(asked: Asked, size: Size) -> str:
    """What --gpus asks for on each node of the script, as --gpus-per-node takes it; empty: nothing, or the script says
    it itself."""
    if not size.nodes or asked.last("gpus-per-node", "gpus-per-task", "ntasks-per-gpu"):
        return ""
    return gres.of_each(asked.value("gpus") or "", size.nodes)


def _share(one: Given, count: int | None, size: Size) -> int:
    """What is on each node of the script.

    Raises:
        WrongInput: it is not the same on all nodes.
    """
    nodes = size.nodes
    if not count or not nodes or count % nodes:
        each = "ntasks-per-node" if one.option.name == "ntasks" else "gpus-per-node"
        shown = nodes or f"{size.fewest} to {size.most}"
        raise WrongInput(
            f"{one} is not the same on each of {shown} nodes, so that it can't grow with the spares",
            f"write --{each}=K in its place. {NOTHING}",
        )
    return count // nodes


def note_of_nodelist(asked: Asked, total: int) -> str:
    """What to say of a --nodelist that is shorter than the job; empty: nothing."""
    one = asked.last("nodelist")
    if one is None or "/" in (one.option.value or "") or (named := len(_expanded(one.option.value or ""))) >= total:
        return ""
    return (
        f"{one} names {named} of {total} nodes, and Slurm chooses the others. Spares are the last ones in Slurm's order"
    )


def _who_chooses(asked: Asked) -> str:
    one = asked.last("gpus") or asked.last("ntasks") or asked.last("nodefile", "nodelist")
    return f"{one} without --nodes" if one else "the script has no --nodes"


def _expanded(listed: str) -> tuple[str, ...]:
    try:
        return hostlist.expand(listed)
    except ValueError:  # sbatch says it
        return ()


def _number(asked: Asked, name: str) -> int | None:
    return _whole(asked.value(name))


def _whole(text: str | None) -> int | None:
    return int(text) if text and len(text) < 10 and text.isdecimal() else None
