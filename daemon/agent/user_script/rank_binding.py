"""Options of the launch that give each task its share of a node: processors and GPUs.

Ranks are no tasks of srun. What srun would give to each task depends on the site's settings and plug-ins, so srun is
asked: it starts as many tasks with the same options, spares included, and each says what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from muster.daemon.agent.launch import task_binding
from muster.daemon.agent.user_script import helper_call, own_nodes
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.daemon.agent.user_script.own_nodes import Nodes
from muster.daemon.host import private_file
from muster.slurm.client.srun_options import SrunWords

_VARIABLES = {
    "cpu-bind": ("SLURM_CPU_BIND", "SRUN_CPU_BIND"),
    "cpus-per-task": ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"),
    "threads-per-core": ("SLURM_THREADS_PER_CORE",),
    "hint": ("SLURM_HINT",),
    "gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "gpu-bind": ("SLURM_GPU_BIND",),
    "tres-bind": ("SLURM_TRES_BIND",),
    "tres-per-task": ("SLURM_TRES_PER_TASK",),
    "ntasks-per-gpu": ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"),
}
"""Options that bind tasks, and the variables from which srun takes them, too."""
_BESIDE = ("distribution", "exact", "gres", "gres-flags", "gpus-per-node", "cpus-per-gpu", "ntasks-per-core")
"""Options that change how it binds them."""
_OF_GPUS = ("gres", "gpus-per-node", "gpus-per-task", "tres-per-task", "ntasks-per-gpu")
"""Options that say how many GPUs of a node, or of a task, the launch has."""
_NO_BINDING = ("", "none", "no")
_NOT_CARRIED = "mem-bind"
_OUTPUT = ("SRUN_OUTPUT", "SLURM_STDOUTMODE", "SLURM_LABELIO", "SLURM_OPEN_MODE")
_TIMEOUT_S = 30.0


def keep(path: str, words: SrunWords, environ: Mapping[str, str], decision: Decision, nodes: Nodes, srun: str) -> None:
    """Write to `path` what each rank is bound to, as far as the launch asks for it, and say what is not carried.

    Raises:
        OSError: the file can't be written.
    """
    lines, names = list[str](), asked(words, environ)
    if decision.kind is Kind.RANKS and names:
        probe, given = probe_words(words, names, nodes, decision.tasks_per_node), {**environ}
        if (gpus := own_nodes.gpus_option(environ, nodes)) and not words.has(*_OF_GPUS) and not {*_OF_GPUS} & {*names}:
            probe.insert(0, gpus)
            del given["SLURM_GPUS"]
        said = _ask(probe, given, nodes, srun)
        counts = task_binding.nodes_of(said)
        if all(counts.get(node) == decision.tasks_per_node for node in nodes.own):
            lines, names = said, []
    if words.has(_NOT_CARRIED):
        names.append(_NOT_CARRIED)
    if decision.kind is Kind.LAUNCHER:
        names = [name for name in names if name in (_NOT_CARRIED, "cpu-bind", "gpu-bind")]
    if names:
        print(f"muster: not carried to the ranks: {', '.join(f'--{name}' for name in names)}", file=sys.stderr)
    private_file.replace(Path(path), "\n".join(lines))


def asked(words: SrunWords, environ: Mapping[str, str]) -> list[str]:
    """The options that bind tasks."""
    found = {name: words.value_or(name, variables, environ) for name, variables in _VARIABLES.items()}
    return [name for name, value in found.items() if value not in _NO_BINDING]


def probe_words(words: SrunWords, names: Collection[str], nodes: Nodes, tasks_per_node: int) -> list[str]:
    """The words behind srun that start the tasks. `names`: the options that bind tasks."""
    kept = [word for option in words.options if option.name in (*_VARIABLES, *_BESIDE) for word in option.words]
    count = len(nodes.all)
    each = [] if "ntasks-per-gpu" in names else [f"--ntasks-per-node={tasks_per_node}"]  # srun refuses both
    size = [f"--nodes={count}", f"--ntasks={count * tasks_per_node}", *each]
    return [*kept, *size, "--overlap", "--mpi=none", "--input=none", "sh", "-c", task_binding.TASK]


def _ask(words: list[str], environ: Mapping[str, str], nodes: Nodes, srun: str) -> list[str]:
    given = {name: value for name, value in environ.items() if name not in _OUTPUT}
    text = helper_call.printed(srun, words, own_nodes.on_nodes(given, nodes.all), _TIMEOUT_S)
    return task_binding.said_by_tasks(text)
