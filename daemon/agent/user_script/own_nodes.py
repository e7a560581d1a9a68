"""Which nodes of the job are the script's own, and what Slurm's variables say of them alone. Pure.

The job has spares, of which its author knows nothing. The first nodes in Slurm's order are the script's own. Its
variables describe them as sbatch would for a job without spares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.slurm.client.parsing import gres, hostlist

_OF_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_LISTS = ("SLURM_NODELIST", "SLURM_JOB_NODELIST")
_TOTALS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GPUS")
"""Numbers that grow with the nodes."""
_PER_NODE = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
"""Numbers of each node, in the short form `2(x3),1`."""
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of the job when the script started, in Slurm's order."""

    own: tuple[str, ...]
    spares: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """All nodes."""
        return (*self.own, *self.spares)


def divide(allocation: Sequence[str], spares: int) -> Nodes:
    """The script's own nodes, at least one, and the spares."""
    own = max(len(allocation) - spares, 1)
    return Nodes(tuple(allocation[:own]), tuple(allocation[own:]))


def node_list(names: Sequence[str]) -> str:
    """Slurm's short form, or all names if the short form would change their order."""
    short = hostlist.collapse(names)
    return short if list(hostlist.expand(short)) == list(names) else ",".join(names)


def variables(environ: Mapping[str, str], nodes: Nodes) -> dict[str, str]:
    """The values of the variables in `environ` that differ without the spares."""
    own, count = len(nodes.own), len(nodes.all)
    values = {name: str(own) for name in _OF_NODES}
    values |= {name: node_list(nodes.own) for name in _LISTS}
    totals = {name: environ.get(name, "") for name in _TOTALS}
    values |= {name: gres.with_counts(total, lambda one: one * own // count) for name, total in totals.items()}
    values |= {name: _first_of(environ.get(name, ""), own) for name in _PER_NODE}
    return {name: value for name, value in values.items() if name in environ and value}


def on_nodes(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The environment of an srun on the nodes `names`. srun takes the nodes that it may use from these variables."""
    values = {name: str(len(names)) for name in _OF_NODES} | {name: node_list(names) for name in _LISTS}
    return {**environ, **{name: value for name, value in values.items() if name in environ}}


def gpus_option(environ: Mapping[str, str], nodes: Nodes) -> str:
    """What an srun of Muster's own asks of GPUs in a job with --gpus, from the script's variables. A step that says
    nothing of those of each node may get more on one than on another, and Slurm 24.11 creates none with --overlap.
    Empty: nothing, or the number is not the same on all nodes."""
    each = gres.of_each(environ.get("SLURM_GPUS", ""), len(nodes.own))
    return f"--gpus-per-node={environ.get('SLURM_GPUS_PER_NODE') or each}" if each else ""


def _first_of(text: str, count: int) -> str:
    """The first `count` numbers of `2(x3),1`, in the same form."""
    numbers: list[str] = []
    for item in filter(None, text.split(",")):
        found = _REPEATED.fullmatch(item)
        if found is None:
            return text
        numbers += [found[1]] * int(found[2] or 1)
    runs: list[tuple[str, int]] = []
    for number in numbers[:count]:
        if runs and runs[-1][0] == number:
            runs[-1] = (number, runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return ",".join(number if times == 1 else f"{number}(x{times})" for number, times in runs)
