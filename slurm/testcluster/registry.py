"""The clusters on this host: their folders, their containers, and their owners.

A cluster is Muster's if its containers carry Muster's labels. Nothing else is ever listed or removed. The folder of a
cluster (``clusters/NAME`` in the cache folder) holds:

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

from muster.slurm.image.engine import Engine, EngineError, cache_dir, deferred_interrupts
from muster.slurm.testcluster.host import start_time

LABEL = "muster.cluster"
OWNER_LABEL = "muster.owner"
BY_HAND = "by-hand"
_REMOVE_TIMEOUT_S = 10.0
"""Seconds in which the removal of a container is retried."""


def clusters_dir() -> Path:
    """The folder that holds the folders of all clusters."""
    path = cache_dir() / "clusters"
    path.mkdir(exist_ok=True)
    return path


def check_name(name: str) -> str:
    """Returns `name`. Raises `EngineError` if it cannot be part of a container's name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        raise EngineError(f"{name!r} can't name a cluster: use up to 31 lower-case letters, digits and dashes")
    return name


def container_name(cluster: str, host: str) -> str:
    """The container's name for a host of a cluster."""
    return f"muster-{cluster}-{host}"


def network_name(cluster: str) -> str:
    """The network's name for a cluster."""
    return f"muster-{cluster}"


def owner_of_this_process() -> str:
    """Identifies this process: pid and start time, so that a later process with the same pid differs."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def owner_has_exited(owner: str) -> bool:
    """Whether the owning process has exited. A cluster that was started by hand never counts as stale."""
    if owner == BY_HAND:
        return False
    pid, _, started = owner.partition("-")
    return not pid.isdigit() or start_time(int(pid)) != started


@dataclass(frozen=True)
class FoundCluster:
    """A cluster with a container or a folder on this host."""

    name: str
    owner: str


def find_clusters(engine: Engine) -> list[FoundCluster]:
    """All clusters of Muster with a container or a folder on this host, sorted by name."""
    owners = {folder.name: _owner_in(folder) for folder in clusters_dir().iterdir()}
    ids = engine.call("ps", "-aq", "--filter", f"label={LABEL}").checked().split()
    if ids:
        answer = engine.call("inspect", "--format", "{{json .Config.Labels}}", *ids)
        for line in answer.stdout.splitlines():
            labels = json.loads(line)
            owners.setdefault(labels[LABEL], labels.get(OWNER_LABEL, BY_HAND))
    return [FoundCluster(name, owner) for name, owner in sorted(owners.items())]


def remove_cluster(engine: Engine, name: str) -> None:
    """Removes the containers, the network and the folder of cluster `name`. It is no error if there are none.

    SIGINT and SIGTERM take effect after the removal (about two seconds): a partial removal is worse than none.
    """
    with deferred_interrupts():
        try:
            _remove_all(engine, check_name(name))
        except EngineError as error:
            raise EngineError(
                f"cluster {name} is only partly removed; `make cluster-down` removes the rest: {error}"
            ) from error


def _remove_all(engine: Engine, name: str) -> None:
    _remove_containers(engine, name)
    networks = engine.call("network", "ls", "--filter", f"label={LABEL}={name}", "--format", "{{.Name}}")
    for network in networks.checked().split():
        engine.call("network", "rm", network).checked()
    folder = clusters_dir() / name
    if folder.exists():
        engine.host("rm", "-rf", str(folder)).checked()


def _remove_containers(engine: Engine, name: str) -> None:
    # A container whose start was interrupted may still be in use by the engine: "device or resource busy".
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while ids := engine.call("ps", "-aq", "--filter", f"label={LABEL}={name}").checked().split():
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda i: engine.call("rm", "-f", *_kill_options(engine), i), ids))
        if time.monotonic() > deadline:
            for outcome in outcomes:
                outcome.checked()


def _kill_options(engine: Engine) -> tuple[str, ...]:
    return ("-t", "0") if engine.name == "podman" else ("-v",)


def _owner_in(folder: Path) -> str:
    try:
        return str(json.loads((folder / "cluster.json").read_text())["owner"])
    except (OSError, ValueError, KeyError):
        # A start writes its owner almost at once. If it has not after a minute, the start was killed.
        return BY_HAND if time.time() - folder.stat().st_mtime < 60 else "0-torn"
