"""Which accelerators there are, and which one a job uses. Reads the shipped table and the site's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from muster.daemon.host import toml_text
from muster.fabric.cost import accelerators
from muster.fabric.cost.accelerators import Accelerator, AcceleratorError
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.plan.assumptions import Defaults
from muster.launcher.spec.spec import Job

SITE_TABLE = Path("/etc/muster/accelerators.toml")
USUAL = "H100-SXM"
TYPED_GRES = re.compile(r"(?:gres[:/])?gpu:([A-Za-z][\w.-]*)")


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
    job: Job, given: str | None, on_nodes: str, table: Mapping[str, Accelerator], defaults: Defaults
) -> tuple[str, Accelerator]:
    """The accelerator that the command line names, else the one of the job's GRES, of the nodes' GRES, or a usual one.

    Args:
        job: the job.
        given: what the command line names.
        on_nodes: the type of GPU that Slurm's nodes have; empty if nobody knows.
        table: accelerators by name.
        defaults: takes note of a usual one.

    Raises:
        WrongInput: the command line names none that the table has.
    """
    if given:
        try:
            return accelerators.look_up(given, table)
        except AcceleratorError as error:
            raise WrongInput(str(error), "a site's own entries stand in /etc/muster/accelerators.toml") from None
    typed = TYPED_GRES.search(job.slurm.gres or "")
    for name in filter(None, (typed.group(1) if typed else "", on_nodes)):
        found = accelerators.fitting(name, table)
        if len(found) > 1:
            others = ", ".join(found[1:])
            defaults.take("accelerator", found[0], f"GRES {name} fits {others} too", "--accelerator NAME")
        if found:  # a site may call its GPUs as it likes
            return found[0], table[found[0]]
    defaults.take("accelerator", USUAL, "usual", "--accelerator NAME, or GRES with a type")
    return USUAL, table[USUAL]
