"""What `muster submit` says of a job beforehand: what its spares cost, and what is lost at its end. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from muster.slurm.client.parsing import hostlist
from muster.v1.common_pb2 import JobSpec

_STARTERS = re.compile(r"torchrun|srun|mpirun|mpiexec|deepspeed")
_STARTER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_SHELLS = re.compile(r"(ba|da|z|k)?sh")
_FOR_SHELLS = re.compile(r"&&|\|\|?|;|&|[\d&]?>.*|<|~/.*|.*\$(\w+|\{\w+\}).*|.*;")
"""Words that mean something to a shell alone: operators, redirections, variables, the home folder."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def notes(spec: JobSpec, limit_s: int | None, nodelist: str = "", reservation: str = "") -> Iterator[str]:
    """One line each. `limit_s`: the job's time limit in seconds; None: the job names none. `nodelist`, `reservation`:
    what these options of sbatch name."""
    if starter := _starter(spec.command):
        yield (
            f"command: {starter} starts processes of its own, and so does Muster: one for each rank. Name the script "
            'itself, as in ["python3", "train.py"], and their number with ranks_per_node'
        )
    if word := _word_for_shells(spec.command):
        yield (
            f"command: no shell reads it, and {word!r} reaches the program as it stands. Variables belong into [env]; "
            'a shell is called as in ["bash", "-c", "..."]'
        )
    if spec.spares:
        yield cost_of_spares(spec, limit_s)
        yield from _short_list(nodelist, spec.nodes + spec.spares)
    if reservation and limit_s is None:
        yield (
            f"the end of reservation {reservation} ends the job, and Muster does not see it come: with a time limit "
            "(slurm.time) the job ends before, and its ranks are asked to stop in time"
        )
    if spec.memory_checkpoint and not spec.durable_dir:
        yield "without durable_dir the state is kept in memory only: all steps are lost when the job ends"


def cost_of_spares(spec: JobSpec, limit_s: int | None) -> str:
    """The line that says what spares cost. `limit_s`: as for `notes`."""
    nodes = spec.nodes + spec.spares
    words = f"spares hold {spec.spares} of {nodes} nodes for the whole run"
    if limit_s is None:
        return f"{words}; no time limit is named"
    hours = limit_s / 3600
    return f"{words}: {hours * spec.spares:.4g} of {hours * nodes:.4g} node hours at the time limit"


def _short_list(nodelist: str, total: int) -> Iterator[str]:
    try:
        named = len(hostlist.expand(nodelist)) if "/" not in nodelist else 0  # a path names a file
    except ValueError:  # sbatch says it
        return
    if 0 < named < total:
        yield (
            f"--nodelist={nodelist} names {named} of {total} nodes, and Slurm chooses the others: any of them may be a "
            "spare"
        )


def _starter(command: Sequence[str]) -> str:
    """The program of the command that starts ranks itself; empty: it is none that is known."""
    program = command[0].rpartition("/")[2] if command else ""
    if _STARTERS.fullmatch(program) or (program == "accelerate" and "launch" in command[1:2]):
        return program
    return next((word for option, word in pairwise(command) if option == "-m" and word in _STARTER_MODULES), "")


def _word_for_shells(command: Sequence[str]) -> str:
    """The first word of the command that only a shell would understand; empty: there is none, or a shell is called."""
    program, *words = command or [""]
    if found := _ASSIGNMENT.match(program):
        return found[0]  # the value may be secret
    if _SHELLS.fullmatch(program.rpartition("/")[2]):
        return ""
    return next((word for word in words if _FOR_SHELLS.fullmatch(word)), "")
