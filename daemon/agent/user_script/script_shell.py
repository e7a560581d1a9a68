"""`muster-agent shell SETTINGS`: what the shell of a user's batch script evaluates before its first line.

Slurm's variables then describe the script's own nodes, and `srun` is `muster-agent srun`: as a program, in a folder
that is first on PATH, and as an exported function, because `module load` and conda put other folders first. The
function goes on to programs that the script starts. An srun of Slurm that is called past both starts a program of
Muster's before its step, which says so.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from muster import exit_codes
from muster.daemon.agent.user_script import own_nodes, script_job
from muster.daemon.host import private_file
from muster.slurm.client import launch_settings
from muster.slurm.client.launch_settings import LaunchSettings, program_folder
from muster.slurm.client.parsing import hostlist

# Libraries that the script has chosen for its own programs could keep Muster's interpreter from starting.
# dash would drop the functions that the script has exported. With -p bash reads neither these nor BASH_ENV.
_PROGRAM = """#!/bin/bash -p
if [ -z "${{MUSTER_LAUNCH+x}}" ]; then export MUSTER_LAUNCH={settings}; fi
if [ "${{LD_LIBRARY_PATH+x}}" ]; then export {kept}LD_LIBRARY_PATH="$LD_LIBRARY_PATH"; unset LD_LIBRARY_PATH; fi
if [ "${{LD_PRELOAD+x}}" ]; then export {kept}LD_PRELOAD="$LD_PRELOAD"; unset LD_PRELOAD; fi
exec {python} -I -m muster.daemon.agent srun "$@"
"""
# It takes the place of the site's own program, which therefore follows.
_PROLOG = """#!/bin/sh
(unset LD_LIBRARY_PATH LD_PRELOAD; exec {python} -I -m muster.daemon.agent unseen "$@")
site=$(scontrol show config 2>/dev/null | sed -n 's/^SrunProlog *= *//p')
if [ -x "$site" ]; then exec "$site" "$@"; fi
"""
# In the script's own shell the program runs in the foreground, as srun does. In a subshell, `kill $!` means srun, but
# reaches the subshell: a function is not replaced by its last command. So the subshell passes signals on.
# Where the program is killed, the gang trains on. A second call waits for its end, so that what follows does not run
# beside it.
_FUNCTION = """srun() {{
  {{ local -; set +x; }} 2>/dev/null
  if [[ "${{SLURM_JOB_ID-}}" != "${{{job}-}}" ]]; then
    command srun "$@"
    return
  fi
  local muster_srun muster_status muster_signal muster_ended=
  while :; do
    if [[ $BASHPID == "$$" ]]; then
      {lines}={lines_value} {ended}=$muster_ended {program} "$@" && muster_status=0 || muster_status=$?
    else
      {lines}={lines_value} {ended}=$muster_ended {program} "$@" <&0 &
      muster_srun=$!
      for muster_signal in HUP INT QUIT TERM USR1 USR2 ALRM; do
        trap "kill -s $muster_signal $muster_srun 2>/dev/null" "$muster_signal"
      done
      wait "$muster_srun" || :
      while kill -0 "$muster_srun" 2>/dev/null; do wait "$muster_srun" || :; done
      wait "$muster_srun" && muster_status=0 || muster_status=$?
    fi
    if [[ $muster_status != {killed} || $muster_ended ]]; then
      [[ $BASHPID == "$$" ]] || trap - HUP INT QUIT TERM USR1 USR2 ALRM
      return "$muster_status"
    fi
    muster_ended=$muster_status
  done
}}
export -f srun
"""
# Only the script's own shell has lines that mean something: those of the call, and of the functions around it.
_LINES = '"$(IFS=" "; [[ $$ == "${MUSTER_SHELL%% *}" ]] && echo "${BASH_LINENO[*]}")"'


def prepare(path: str, environ: Mapping[str, str], shell: int) -> str:
    """The lines to evaluate; the program `srun` is written. `path`: of the settings. `shell`: the script's process.

    Raises:
        NoScriptJob: the settings can't be read, or the program can't be written.
    """
    settings = script_job.load(path)
    try:
        program = _write_programs(Path(program_folder(path)), path)
    except OSError as error:
        raise script_job.NoScriptJob(f"{error.filename} can't be written: {error.strerror}") from None
    return shell_lines(path, settings, environ, program, script_job.describe_shell(shell))


def _write_programs(folder: Path, settings: str) -> Path:
    """Writes the programs into `folder`, and returns the path of `srun`.

    Raises:
        OSError: it can't be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    new = folder / f".new.{os.uname().nodename}.{os.getpid()}"
    program, prolog = folder / "srun", Path(launch_settings.prolog_program(settings))
    for path, text in ((program, _program(settings)), (prolog, _PROLOG.format(python=shlex.quote(sys.executable)))):
        private_file.replace(new, text)
        new.chmod(0o700)
        new.replace(path)  # another task of an array may start it at this moment
    return program


def _program(settings: str) -> str:
    """What has lost its environment, but for PATH, still finds Slurm's srun."""
    return _PROGRAM.format(settings=shlex.quote(settings), python=shlex.quote(sys.executable), kept=script_job.KEPT)


def shell_lines(path: str, settings: LaunchSettings, environ: Mapping[str, str], program: Path, shell: str) -> str:
    """The lines to evaluate.

    Args:
        path: of the settings.
        program: the path of the program `srun`.
        shell: what script_job says of the shell that evaluates them.
    """
    allocation = environ.get("SLURM_JOB_NODELIST", "")
    nodes = own_nodes.divide(hostlist.expand(allocation), settings.spares)
    values = {
        **own_nodes.variables(environ, nodes),
        launch_settings.SETTINGS: path,
        launch_settings.ALLOCATION: ",".join(nodes.all),
        script_job.SHELL: shell,
        launch_settings.JOB: environ.get("SLURM_JOB_ID", ""),
    }
    values |= (
        {} if launch_settings.PROLOG in environ else {launch_settings.PROLOG: launch_settings.prolog_program(path)}
    )
    exports = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    function = _FUNCTION.format(
        program=shlex.quote(str(program)),
        job=launch_settings.JOB,
        lines=script_job.LINES,
        lines_value=_LINES,
        ended=script_job.ENDED,
        killed=exit_codes.of_shell(-signal.SIGKILL),
    )
    path_line = f'export PATH={shlex.quote(str(program.parent))}"${{PATH:+:$PATH}}"'
    return "\n".join([*exports, path_line, function])
