"""What bash reads before the user's script (BASH_ENV), and the environment that carries it there. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from muster.slurm.client.launch_settings import ALLOCATION, JOB, PROLOG, SETTINGS, program_folder, prolog_program
from muster.slurm.client.sbatch_options import SbatchOption

_OF_A_LAUNCH = frozenset(
    {
        *(SETTINGS, ALLOCATION, JOB, "MUSTER_SHELL", "MUSTER_LINES"),
        *("MUSTER_GANG", "MUSTER_SPEC", "MUSTER_POOL", "MUSTER_RESTARTS", "MUSTER_RANK_ENVIRONMENT"),
    }
)
"""Variables of a job of Muster that submits this one."""
_OF_GRPC = frozenset({"GRPC_SSL_CIPHER_SUITES", "GRPC_VERBOSITY"})
"""Variables that Muster sets for itself."""
_OF_A_SHELL = ("BASH_FUNC_srun%%", "BASH_FUNC_srun()")


@dataclass(frozen=True, slots=True)
class Exported:
    """How the environment reaches the job."""

    bash_env: str = ""
    """The user's own BASH_ENV, as the script would see it under sbatch."""
    shown: str = ""
    """SLURM_EXPORT_ENV as the script would see it. Empty: Slurm sets it."""
    options: tuple[SbatchOption, ...] = ()
    """What --export must be, so that BASH_ENV comes along."""


def exported(value: str | None, environ: Mapping[str, str]) -> Exported:
    """What follows from --export. `value`: what the user asks; None: nothing.

    Raises:
        ValueError: with this value no variable can be brought along.
    """
    own = environ.get("BASH_ENV", "")
    if value is None or value.upper() == "ALL":
        return Exported(own)
    if value.upper() == "NIL":
        raise ValueError("--export=NIL lets no variable through")
    if value.upper() == "NONE":
        return Exported(shown=value, options=(SbatchOption("export", "BASH_ENV"),))
    parts = value.split(",")
    named = dict(part.partition("=")[::2] for part in parts)
    kept = own if "BASH_ENV" in parts or "ALL" in parts else ""
    more = [part for part in parts if part.partition("=")[0] != "BASH_ENV"]
    return Exported(named.get("BASH_ENV") or kept, value, (SbatchOption("export", ",".join([*more, "BASH_ENV"])),))


def environment(environ: Mapping[str, str], at_start: Mapping[str, str]) -> dict[str, str]:
    """The environment of sbatch, without what belongs to a job of Muster that submits this one, and to gRPC in this
    process. `at_start`: the environment in which this process was started."""
    kept = {name: value for name, value in environ.items() if name not in _OF_A_LAUNCH | _OF_GRPC}
    kept |= {name: at_start[name] for name in _OF_GRPC if name in at_start}
    if settings := environ.get(SETTINGS):
        kept = {name: value for name, value in kept.items() if name not in _OF_A_SHELL}
        if kept.get(PROLOG) == prolog_program(settings):
            del kept[PROLOG]
        folders = kept.get("PATH", os.defpath).split(os.pathsep)
        kept["PATH"] = os.pathsep.join(folder for folder in folders if folder != program_folder(settings))
    return kept


def text(agent: str, settings: str, exported: Exported, job: str = "", alone: str = "") -> str:
    """The lines that bash reads. They leave the shell as they have found it, but for what the agent says.

    No line reads a variable that may be unset, because the script may begin with `bash -u`. A trace (`bash -x`) does
    not show them. A site's sbatch may be a script of bash itself, which has the variable too: only a new job follows.

    Args:
        agent: the absolute path of muster-agent.
        alone: a launcher that the script starts without srun.
        job: the id of the job in which `muster submit` is called; empty: it is called in none.
    """
    own = shlex.quote(exported.bash_env)
    restored = f"export BASH_ENV={own}" if exported.bash_env else "unset BASH_ENV"
    shown = [f"export SLURM_EXPORT_ENV={shlex.quote(exported.shown)}"] if exported.shown else []
    lines = [
        "# Written by muster submit. bash reads this before the batch script.",
        "{ case $- in *x*) set +x; muster_trace=x;; *) muster_trace=;; esac; } 2>/dev/null",
        f'if [ "${{SLURM_JOB_ID-}}" != {shlex.quote(job)} ]; then',
        *(f"  {line}" for line in (restored, *shown)),
        f"  if muster_lines=$({shlex.quote(agent)} shell {shlex.quote(settings)} --shell $$); then",
        '    eval "$muster_lines"',
        "    unset muster_lines",
        *(f"    {line}" for line in _function_of(alone)),
        "  else",
        f"    echo 'muster: the job ends: '{shlex.quote(agent)}' shell has failed on this node' >&2",
        "    exit 1",
        "  fi",
        "fi",
        *([f"if [ -r {own} ]; then . {own}; fi"] if exported.bash_env else []),
        "case $muster_trace in x) unset muster_trace; set -x;; *) unset muster_trace;; esac",
    ]
    return "\n".join(lines) + "\n"


def _function_of(program: str) -> list[str]:
    """A function in the place of a launcher: srun is Muster's own here. Other calls of Python and accelerate go on."""
    if not program:
        return []
    launches = {"accelerate": "' launch '*", "torchrun": "*", "accelerate-launch": "*"}
    pattern = launches.get(program, "*' -m torch.distributed.'* | *' -m accelerate.'*")
    return [
        f"{program}() {{",
        """  if [ "${SLURM_JOB_ID-}" != "${MUSTER_SCRIPT_JOB-${SLURM_JOB_ID-}}" ]; then""",
        f"""    command {program} "$@"; return; fi""",
        f"""  case " $* " in {pattern}) srun --nodes=1 --ntasks=1 {program} "$@";; *) command {program} "$@";; esac""",
        "}",
        f"export -f {program}",
    ]
