"""Options of the launch that say where its output goes: which of them are srun's, and which the agents carry out. Pure.

Each of srun's tasks is an agent. If each task of the launch is a rank, agents do for ranks what differs from task to
task. srun also takes these options from its environment, which agents do not get.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from muster.daemon.agent.launch.file_patterns import OF_TASK, expand
from muster.daemon.agent.user_script.launch_rule import Decision, Kind
from muster.slurm.client.srun_options import SrunWords
from muster.v1.common_pb2 import ScriptOutput

_VARIABLES = {
    "output": ("SRUN_OUTPUT", "SLURM_STDOUTMODE"),
    "error": ("SRUN_ERROR", "SLURM_STDERRMODE"),
    "open-mode": ("SLURM_OPEN_MODE",),
}
_LABEL = "SLURM_LABELIO"
_NO_FILE = ("all", "none")


def script_output(
    words: SrunWords, environ: Mapping[str, str], decision: Decision, tasks: int, folder: str, stdout: str
) -> ScriptOutput:
    """What agents must know.

    Args:
        tasks: of the launch.
        folder: where it is started.
        stdout: the file that srun writes to without --output; empty: none.
    """
    names = {name: _file(words, environ, name, folder) for name in ("output", "error")}
    of_ranks = decision.kind is Kind.RANKS
    found = ScriptOutput(append=_value(words, environ, "open-mode") == "append")
    if of_ranks and _has_label(words, environ):
        found.label_width = len(str(tasks - 1))
    if not OF_TASK.search(names["output"]):
        found.file = names["output"] or ("" if _value(words, environ, "output") else stdout)
    elif of_ranks:
        found.of_rank = names["output"]
    else:
        found.apart = True
    if of_ranks:
        error = names["error"] or found.of_rank
        found.error_of_rank = error if OF_TASK.search(error) else ""
    return found


def srun_words(words: SrunWords, environ: Mapping[str, str], output: ScriptOutput, kind: Kind) -> list[str]:
    """The options of the agents' srun."""
    done = {"output": output.of_rank, "error": output.error_of_rank}
    values = {name: _value(words, environ, name) for name in _VARIABLES if not done.get(name)}
    label = ["--label"] if kind is Kind.LAUNCHER and _has_label(words, environ) else []
    return [*label, *(f"--{name}={value}" for name, value in values.items() if value)]


def _value(words: SrunWords, environ: Mapping[str, str], name: str) -> str:
    """The value of an option; empty: it is not given."""
    return words.value_or(name, _VARIABLES[name], environ)


def _has_label(words: SrunWords, environ: Mapping[str, str]) -> bool:
    return words.has("label") or environ.get(_LABEL, "0") not in ("", "0")


def _file(words: SrunWords, environ: Mapping[str, str], name: str, folder: str) -> str:
    """The name of a file, with what is known of its patterns; empty: it is none."""
    value = _value(words, environ, name)
    if not value or value in _NO_FILE or value.isdecimal():
        return ""
    if "\\" in value:  # srun replaces nothing
        value = value.replace("\\", "").replace("%", "%%")
    known = {
        "j": environ.get("SLURM_JOB_ID", ""),
        "A": environ.get("SLURM_ARRAY_JOB_ID", environ.get("SLURM_JOB_ID", "")),
        "a": environ.get("SLURM_ARRAY_TASK_ID", "4294967294"),  # as Slurm says of a job that is no array
        "u": environ.get("SLURM_JOB_USER", ""),
        "x": environ.get("SLURM_JOB_NAME", ""),
    }
    return os.path.join(folder, expand(value, {letter: text.replace("%", "%%") for letter, text in known.items()}))
