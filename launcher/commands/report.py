"""`muster report JOB`: what the job did, what failed, what was done about it and what it cost, in one HTML file.

It asks the coordinator, or reads the journal of a coordinator that does not run. It changes nothing. The job may still
run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from muster.launcher.command import Command, time_arguments
from muster.launcher.errors import SiteFault

_EXTRA = ("matplotlib", "numpy")
"""What the extra `report` installs."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the file; default: report-JOB.html, here")
    parser.add_argument(
        "--journal", metavar="FOLDER", type=Path,
        help="read the journal in this state folder, and ask no coordinator",
    )  # fmt: skip
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    try:
        from muster.launcher.report import show  # only here: other commands need no pictures
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise SiteFault(f"muster report needs {missing}", "install it: pip install 'muster[report]'") from None
    return await show.run(options)


COMMAND = Command(_arguments, _run)
