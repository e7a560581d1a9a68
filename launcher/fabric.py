"""The site's fabric, for the commands of the launcher: `muster.slurm.site.fabric` with the launcher's errors; and what
nodes have reported of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster.daemon.transport import toml_text
from muster.fabric.sources.site_file import SiteFabric
from muster.launcher.errors import SiteFault, Unavailable
from muster.slurm.client.types import Unknown
from muster.slurm.site.fabric import FABRIC_FILE, SiteFileError, fabric_of, read_site_file

__all__ = ["FABRIC_FILE", "ReportedDomains", "fabric_of", "known", "load_site_fabric"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReportedDomains:
    """The NVLink domains of several nodes that nodes have reported to the coordinator."""

    sizes: tuple[int, ...] = ()
    """Nodes of each domain."""
    silent: int = 0
    """Nodes that Slurm has, and that have reported nothing."""


def known(answer: T | Unknown) -> T:
    """Slurm's answer.

    Raises:
        Unavailable: it is none.
    """
    if isinstance(answer, Unknown):
        raise Unavailable(f"Slurm does not answer: {answer.reason}")
    return answer


def load_site_fabric(path: Path, nodes: Collection[str]) -> SiteFabric:
    """What the site's file says of `nodes`, which are all nodes that Slurm has. Without a file: nothing.

    Raises:
        SiteFault: the file can't be read, or is wrong.
    """
    try:
        return read_site_file(path, nodes, toml_text.loads)
    except SiteFileError as error:
        raise SiteFault(str(error)) from None
