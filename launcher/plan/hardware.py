"""Which accelerators there are, and which one a job uses. Reads the shipped table and the site's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from muster.daemon.transport import toml_text
from muster.fabric.cost import accelerators
from muster.fabric.cost.accelerators import Accelerator, AcceleratorError
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.plan.defaults import Defaults
from muster.launcher.spec.spec import Job

SITE_TABLE = Path("/etc/muster/accelerators.toml")
USUAL = "H100-SXM"
_TYPED_GRES = re.compile(r"(?:gres[:/])?gpu:([A-Za-z][\w.-]*)")


def load_table(site: Path = SITE_TABLE) -> dict[str, Accelerator]:
    """The site's own entries, then the shipped ones.

    Raises:
        SiteFault: the site's file can't be read, or is wrong.
    """
    packaged = resources.files("muster.fabric.cost").joinpath("accelerators.toml").read_text()
    shipped = accelerators.read(toml_text.loads(packaged), "accelerators.toml")
    try:
        own = accelerators.read(toml_text.loads(site.read_text()), str(site))
    except FileNotFoundError:
        own = {}
    except OSError as error:
        raise SiteFault(f"{site} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteFault(f"{site} is not TOML: {error}") from None
    except AcceleratorError as error:
        raise SiteFault(str(error)) from None
    return {**own, **{name: entry for name, entry in shipped.items() if name not in own}}


def accelerator_of(
    job: Job, given: str | None, table: Mapping[str, Accelerator], defaults: Defaults
) -> tuple[str, Accelerator]:
    """The accelerator that the command line names, else the one of the job's GRES, else a usual one.

    Raises:
        WrongInput: the table has no such accelerator.
    """
    typed = _TYPED_GRES.search(job.slurm.gres or "")
    try:
        if given:
            return accelerators.look_up(given, table)
        if typed:
            return accelerators.look_up(typed.group(1), table)
    except AcceleratorError as error:
        if given:
            raise WrongInput(str(error), "a site's own entries stand in /etc/muster/accelerators.toml") from None
    defaults.take("accelerator", USUAL, "usual", "--accelerator NAME, or GRES with a type")
    return USUAL, table[USUAL]
