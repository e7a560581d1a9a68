"""One host with systemd as its first process: slurmctld, the coordinator and a node daemon, as their units start them.

The containers of the test cluster have no systemd, so that faults can be timed. Here the units are what is tested.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from muster.slurm.image.build import ensure_cluster_image
from muster.slurm.image.engine import Engine, Outcome, find_engine
from muster.slurm.image.recipe import ROOT, Recipe
from muster.slurm.testcluster.registry import LABEL, OWNER_LABEL, owner_of_this_process
from muster.slurm.testcluster.spec import CONTROLLER, COORDINATOR_PORT, ClusterSpec
from muster.slurm.testcluster.waiting import wait_until

NODE = "n0"
SERVICES = ("munge", "slurmctld", "muster-coordinator", "musterd")
"""In the order in which they are started."""
_ADDRESS = "192.0.2.1"
"""Of the host, on no network. Slurm looks for no address where a host has loopback addresses only."""
_HERE = Path(__file__).resolve().parent
_SETTINGS = f'coordinator = "{CONTROLLER}:{COORDINATOR_PORT}"\nconnections = "plain text, the network is trusted"\n'
_PREPARE = """
ip link set lo up && ip address add {address}/32 dev lo
ln -sf /opt/muster/bin/muster* /usr/local/bin
head -c 1024 /dev/urandom >/etc/munge/munge.key && chown munge: /etc/munge/munge.key && chmod 400 /etc/munge/munge.key
cp /units/*.service /etc/systemd/system
cp /units/tmpfiles.d/* /etc/tmpfiles.d
echo 'MUSTERD_OPTIONS=--node {node}' >/etc/default/musterd
mkdir -p /etc/slurm /run/slurm && chown slurm: /run/slurm
systemd-tmpfiles --create muster.conf
systemctl daemon-reload
"""
_REMOVE_CGROUPS = """
mkdir /mnt/cgroup && mount -t cgroup2 none /mnt/cgroup
[ ! -d "/mnt/cgroup/$1" ] || find "/mnt/cgroup/$1" -depth -type d -exec rmdir {} +
"""


class SystemdNode:
    """The host. `sh` runs commands on it as root."""

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self._container = container

    def sh(self, script: str, *, check: bool = True, stdin: str = "") -> Outcome:
        """Run a shell script. With `check`, a failure raises EngineError."""
        done = self._engine.call("exec", "-i", self._container, "sh", "-c", script, stdin=stdin.encode())
        if check:
            done.checked()
        return done

    def property(self, service: str, name: str) -> str:
        """One property of a service, as `systemctl show` has it."""
        return self.sh(f"systemctl show {service} -P {name}").stdout.strip()

    def log(self, service: str) -> str:
        """What the service has logged since the host was started."""
        return self.sh(f"journalctl -u {service} --no-pager -o cat").stdout

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        self.sh(f"cat >{path}", stdin=text)


@contextmanager
def systemd_node() -> Iterator[SystemdNode]:
    """A running host with everything installed and no service started. At the end nothing of it remains."""
    engine = find_engine()
    name = f"muster-systemd-{secrets.token_hex(3)}"
    image = ensure_cluster_image(engine, Recipe.of("forky"))
    mounts = {_HERE / "systemd_node.sh": "/boot.sh:ro", ROOT / "systemd": "/units:ro"}
    try:
        engine.call(
            *("run", "--detach", "--pull=never", "--name", name, "--hostname", CONTROLLER, "--network=none"),
            *("--label", f"{LABEL}={name}", "--label", f"{OWNER_LABEL}={owner_of_this_process()}"),
            *(f"--add-host={host}:{_ADDRESS}" for host in (CONTROLLER, NODE)),
            # systemd mounts, and makes namespaces and devices for its services.
            *("--privileged", "--env=container=podman", "--tmpfs=/run", "--tmpfs=/tmp", "--stop-signal=KILL"),
            *(part for source, target in mounts.items() for part in ("--volume", f"{source}:{target}")),
            *engine.ulimits,
            *(image, "sh", "/boot.sh", name),
        ).checked()
        host = SystemdNode(engine, name)
        wait_until(lambda: "running" in host.sh("systemctl is-system-running", check=False).stdout, 60, "systemd is up")
        host.sh(_PREPARE.format(node=NODE, address=_ADDRESS))
        for file, text in ClusterSpec(nodes=1).files().items():
            host.write(f"/etc/slurm/{file}", text)
        host.write("/etc/muster/muster.toml", _SETTINGS)
        yield host
    finally:
        engine.call("rm", "--force", "--time=0", name)
        # Where the host has cgroups of version 1 only, nobody else removes the tree.
        clean = ("sh", "-c", _REMOVE_CGROUPS, "clean", name)
        engine.call("run", "--rm", "--pull=never", "--privileged", "--network=none", image, *clean)
