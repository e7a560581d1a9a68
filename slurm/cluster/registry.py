"""The clusters on this host: their folders, their containers, and who owns them.

A cluster is ours when its containers carry Muster's labels; nothing else is ever listed or removed.
Folder of a cluster (in the cache folder, ``clusters/NAME``):

``cluster.json``  spec, subnet, image and owner
``slurm/``        /etc/slurm in every container
``muster/``       /etc/muster in every container
``cluster/``      init script and munge key
``shared/``       /shared in every container
"""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from muster.slurm.cluster.interrupts import held_back
from muster.slurm.image.engine import Engine, EngineError, cache_dir

LABEL = "muster.cluster"
OWNER_LABEL = "muster.owner"
BY_HAND = "by-hand"
_REMOVE_S = 10.0
"""How long the engine may go on refusing to remove a container."""


def clusters_dir() -> Path:
    """Where the folders of clusters lie."""
    path = cache_dir() / "clusters"
    path.mkdir(exist_ok=True)
    return path


def check_name(name: str) -> str:
    """`name` itself; raises `EngineError` for one that can't be part of a container's name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        raise EngineError(f"{name!r} can't name a cluster: use up to 31 lower-case letters, digits and dashes")
    return name


def container_name(cluster: str, host: str) -> str:
    """The engine's name of a host's container."""
    return f"muster-{cluster}-{host}"


def network_name(cluster: str) -> str:
    """The engine's name of a cluster's network."""
    return f"muster-{cluster}"


def owner_of_this_process() -> str:
    """A mark of this process that a later process with the same pid doesn't share."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether the owning process has ended; a cluster made by hand is never stale."""
    if owner == BY_HAND:
        return False
    pid, _, started = owner.partition("-")
    return not pid.isdigit() or _start_time(int(pid)) != started


@dataclass(frozen=True)
class Found:
    """A cluster that left something on this host."""

    name: str
    owner: str


def find_clusters(engine: Engine) -> list[Found]:
    """Every cluster of ours that has a container or a folder on this host, by name."""
    owners = {folder.name: _owner_in(folder) for folder in clusters_dir().iterdir()}
    ids = engine.call("ps", "-aq", "--filter", f"label={LABEL}").checked().split()
    if ids:
        answer = engine.call("inspect", "--format", "{{json .Config.Labels}}", *ids)
        for line in answer.stdout.splitlines():
            labels = json.loads(line)
            owners.setdefault(labels[LABEL], labels.get(OWNER_LABEL, BY_HAND))
    return [Found(name, owner) for name, owner in sorted(owners.items())]


def remove_cluster(engine: Engine, name: str) -> None:
    """Remove the containers, the network and the folder of cluster `name`; nothing of it is no error.

    An interrupt waits until it is done (two seconds or so): half a removal is worse than none.
    """
    with held_back():
        try:
            _remove_all(engine, check_name(name))
        except EngineError as error:
            raise EngineError(f"a part of cluster {name} is left, `make cluster-down` removes it: {error}") from error


def _remove_all(engine: Engine, name: str) -> None:
    _remove_containers(engine, name)
    networks = engine.call("network", "ls", "--filter", f"label={LABEL}={name}", "--format", "{{.Name}}")
    for network in networks.checked().split():
        engine.call("network", "rm", network).checked()
    folder = clusters_dir() / name
    if folder.exists():
        engine.host("rm", "-rf", str(folder)).checked()


def _remove_containers(engine: Engine, name: str) -> None:
    # One that was interrupted in its start may be in use by the engine for a moment: "device or resource busy".
    deadline = time.monotonic() + _REMOVE_S
    while ids := engine.call("ps", "-aq", "--filter", f"label={LABEL}={name}").checked().split():
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda i: engine.call("rm", "-f", *_at_once(engine), i), ids))
        if time.monotonic() > deadline:
            for outcome in outcomes:
                outcome.checked()


def _at_once(engine: Engine) -> tuple[str, ...]:
    return ("-t", "0") if engine.name == "podman" else ("-v",)


def _owner_in(folder: Path) -> str:
    try:
        return str(json.loads((folder / "cluster.json").read_text())["owner"])
    except (OSError, ValueError, KeyError):
        # No more than a moment passes before a start says whose it is; else that start was killed.
        return BY_HAND if time.time() - folder.stat().st_mtime < 60 else "0-torn"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
