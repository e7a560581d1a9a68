"""What `muster submit` tells the job of a user's own batch script: one private file in the job's run folder.

The script runs as it is. Where it calls srun, `muster-agent srun` reads this file and decides what becomes of the call.
The names of the files of such a job are here, too. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf import json_format

from muster.v1.common_pb2 import JobSpec

VERSION = 1
"""Of the file's form. A reader refuses any other."""


SETTINGS = "MUSTER_LAUNCH"
"""Environment variable of the script: the path of its settings."""
ALLOCATION = "MUSTER_ALLOCATION"
"""Likewise: the nodes of the job when the script started, spares included."""
JOB = "MUSTER_SCRIPT_JOB"
"""Likewise: the job of the script. A job that the script queues with sbatch has its variables and functions, too."""
PROLOG = "SLURM_PROLOG"
"""Likewise: what Slurm's srun starts before a step. Calls that come past Muster are noticed there."""
NAMED_BY_USER = "#MUSTER --launch-line names it"
"""`LaunchLine.why` of a line that the user has named."""
KNOWN_WHEN_IT_RUNS = "srun starts a shell, of which more is known when it runs"
"""Likewise of a line of which submit sees too little."""
BY_LAUNCHER = "a launcher starts the ranks"
"""Likewise of a line whose tasks are no ranks."""
BY_SRUN = "srun starts the ranks"
"""Likewise of a line whose tasks are the ranks."""


class WrongSettings(ValueError):
    """A text that is no launch settings. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """The line of the script whose command becomes the gang."""

    line: int
    """The first line of the command, counted from 1."""
    words: tuple[str, ...]
    """The first words of the command as the script has them, in which variables are not replaced yet."""
    why: str
    """Why this one, in words."""
    last_line: int = 0
    """The last line of the command. bash names one of its lines, by no simple rule. 0: `line`."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The settings of one job. In `spec`, nodes, command and ranks_per_node are not set: the launch says them."""

    gang: str
    """The gang id of the first launch of a job that is no array."""
    coordinator: str
    """host:port. If empty, the nodes use the address in their own muster.toml."""
    agent: str
    """The absolute path of muster-agent."""
    spares: int
    """So many nodes of the allocation, the last ones, are not the script's own."""
    spec: JobSpec
    launch: LaunchLine | None = None
    """None: the script names no line that is known before it runs."""

    def to_json(self) -> str:
        """The text of the file."""
        launch = self.launch and {**asdict(self.launch), "words": [*self.launch.words]}
        return json.dumps(
            {
                "version": VERSION,
                "gang": self.gang,
                "coordinator": self.coordinator,
                "agent": self.agent,
                "spares": self.spares,
                "spec": json_format.MessageToDict(self.spec, preserving_proto_field_name=True),
                "launch": launch,
            },
            indent=1,
        )


def read(text: str) -> LaunchSettings:
    """Reads the text of the file.

    Raises:
        WrongSettings: it is of another version, or damaged.
    """
    try:
        given = json.loads(text)
        if (version := given["version"]) != VERSION:
            raise WrongSettings(f"the launch settings have version {version!r}, and this Muster reads {VERSION}")
        return LaunchSettings(
            gang=given["gang"],
            coordinator=given["coordinator"],
            agent=given["agent"],
            spares=given["spares"],
            spec=json_format.ParseDict(given["spec"], JobSpec()),
            launch=_launch(given["launch"]),
        )
    except (KeyError, TypeError, json.JSONDecodeError, json_format.ParseError) as error:
        raise WrongSettings(f"the launch settings are damaged: {error}") from None


def _launch(given: Mapping[str, Any] | None) -> LaunchLine | None:
    if given is None:
        return None
    return LaunchLine(given["line"], tuple(given["words"]), given["why"], given.get("last_line", 0))


def settings_file(run_dir: str, gang: str) -> str:
    """The path of the settings."""
    return f"{run_dir}/{gang}.launch.json"


def bash_env_file(run_dir: str, gang: str) -> str:
    """The path of the shell lines that bash reads before the script (BASH_ENV)."""
    return f"{run_dir}/{gang}.bash_env.sh"


def environment_file(run_dir: str, gang: str) -> str:
    """The path of the environment of a launch: NAME=VALUE, each ended by a NUL."""
    return f"{run_dir}/{gang}.environment"


def binding_file(run_dir: str, gang: str) -> str:
    """The path of what srun would bind each task of a launch to."""
    return f"{run_dir}/{gang}.binding"


def program_folder(settings: str) -> str:
    """The folder that is first on the script's PATH, with an srun in it. `settings`: the path of the settings."""
    return f"{settings.removesuffix('.launch.json')}.bin"


def prolog_program(settings: str) -> str:
    """The path of the program that PROLOG names. `settings`: as for program_folder."""
    return f"{program_folder(settings)}/prolog"
