"""Starts a cluster: folder, network, containers in parallel, and the wait for Slurm.

Target: 10 nodes are IDLE within 10 s if the image exists.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from muster.slurm.image.build import ensure_cluster_image
from muster.slurm.image.engine import Engine, EngineError, deferred_interrupts, find_engine
from muster.slurm.image.recipe import Recipe
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.registry import (
    BY_HAND,
    LABEL,
    OWNER_LABEL,
    check_name,
    clusters_dir,
    container_name,
    network_name,
    owner_of_this_process,
    remove_cluster,
)
from muster.slurm.testcluster.spec import (
    ACCOUNTS,
    CONTROLLER,
    COORDINATOR_PORT,
    LOGIN,
    METRICS_NAME,
    METRICS_PORT,
    SLURMDBD_CONF,
    STANDBY,
    USERS,
    ClusterSpec,
)
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

_HERE = Path(__file__).resolve().parent
_TLS_FOLDER, _METRICS_FOLDER = "/run/cluster/tls", "/run/cluster/metrics"
"""Where init.sh installs the certificate of a coordinator's host, and on each host what its metrics are served with."""
_METRICS = f"""metrics_listen = "0.0.0.0:{METRICS_PORT}"
metrics_token = "{_METRICS_FOLDER}/token"
metrics_certificate = "{_METRICS_FOLDER}/coordinator.pem"
metrics_key = "{_METRICS_FOLDER}/coordinator.key"
"""
# A node has its own tree of cgroups (init.sh makes it writable). Its fake GPUs are loop devices, so that a cgroup can
# refuse one and grant another: empty ones, which the kernel makes, and none of the host's. Each is named, because
# version 1 refuses none of a range. Slurm binds tasks of other users: that takes SYS_NICE.
_CONFINED = (
    "--cgroupns=private",
    "--cap-add=SYS_NICE",
    *(f"--device-cgroup-rule=b 7:{number} rwm" for number in range(200, 208)),
)


def start(spec: ClusterSpec, name: str | None = None, *, by_hand: bool = False) -> Cluster:
    """Starts a cluster with the current source of Muster. Every node is IDLE when this returns.

    A cluster with `by_hand` outlives the process that started it. Any other cluster is stale when that process has
    exited. After an error or Ctrl-C nothing remains.
    """
    engine = find_engine()
    name = check_name(name or f"r{secrets.token_hex(3)}")
    folder = clusters_dir() / name
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise EngineError(f"a cluster {name!r} already exists; use another --name or remove it") from error
    try:
        _save(folder, owner=owner_of_this_process())  # if this process is killed, the cluster counts as stale
        recipe = Recipe.of(spec.suite, spec.tests_image, spec.accounting, spec.only_slurm)
        image = ensure_cluster_image(engine, recipe)
        owner = BY_HAND if by_hand else owner_of_this_process()
        with deferred_interrupts():
            subnet = _make_network(engine, name)
        _write_files(folder, spec)
        _save(folder, owner=owner_of_this_process(), spec=spec.to_json(), subnet=subnet, image=image)
        cluster = Cluster(engine, name, spec, subnet)
        with deferred_interrupts():
            _start_containers(cluster, image, owner)
        _wait_for(cluster, "every node is idle", _all_idle, "slurmctld")
        if spec.accounting:
            _make_accounts(cluster)
        if spec.daemons:
            _wait_for(cluster, "the coordinator listens", _coordinator_listens, "muster-coordinator")
        if spec.standby:  # not before the controller's coordinator leads: whichever takes the lease first is the leader
            with deferred_interrupts():
                _start_one(cluster, STANDBY, image, owner)
        _save(folder, owner=owner, spec=spec.to_json(), subnet=subnet, image=image)
    except BaseException:
        remove_cluster(engine, name)
        raise
    return cluster


def _save(folder: Path, **what: str) -> None:
    aside = folder / "cluster.json.new"
    aside.write_text(json.dumps(what))
    aside.rename(folder / "cluster.json")


def _wait_for(cluster: Cluster, what: str, condition: Callable[[Cluster], bool], service: str) -> None:
    """Waits for a condition. The error message includes the controller's log, because the cluster is removed after an
    error.
    """
    try:
        wait_until(lambda: condition(cluster), 60, what)
    except WaitTimeout as error:
        log = cluster.logs(CONTROLLER, service)[-1500:]
        states = cluster.exec(CONTROLLER, "sinfo", "-N", check=False).stdout
        raise EngineError(f"{error}\n{states}\nlog of {service}:\n{log}") from error


def _make_accounts(cluster: Cluster) -> None:
    accounts = sorted({account for of_user in ACCOUNTS.values() for account in of_user})
    lines = [f"account {','.join(accounts)}"]
    lines += [f"user {user} account={','.join(own)} defaultaccount={own[0]}" for user, own in ACCOUNTS.items()]
    cluster.sh(CONTROLLER, "; ".join(["set -e", *(f"sacctmgr -iQ add {line}" for line in lines)]))


def _make_network(engine: Engine, name: str) -> str:
    """Creates the network on a free subnet. Returns the subnet's first three numbers."""
    error_text = ""
    for _ in range(20):
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        made = engine.call(
            *("network", "create", "--internal", *engine.without_dns, "--subnet", f"{subnet}.0/24"),
            *("--label", f"{LABEL}={name}", network_name(name)),
        )
        if made.rc == 0:
            return subnet
        error_text = made.stderr
    raise EngineError(f"no free subnet for the cluster's network: {error_text.strip()}")


def _write_files(folder: Path, spec: ClusterSpec) -> None:
    for part in ("slurm", "muster", "cluster", "shared"):
        (folder / part).mkdir()
    (folder / "shared").chmod(0o1777)
    for file, text in spec.files().items():
        (folder / "slurm" / file).write_text(text)
    listening = ",".join(f"{host}:{COORDINATOR_PORT}" for host in spec.coordinators)
    connections = "plain text, the network is trusted" if spec.plain_text else "tls"
    (folder / "muster" / "muster.toml").write_text(
        f'coordinator = "{listening}"\nconnections = "{connections}"\n'
        f'tls_certificate = "{_TLS_FOLDER}/coordinator.pem"\ntls_key = "{_TLS_FOLDER}/coordinator.key"\n'
        + _METRICS
        * spec.metrics
    )
    _make_certificates(folder, spec)
    if spec.metrics:
        _make_metrics_proofs(folder / "cluster")
    (folder / "muster" / "policy.toml").write_text(spec.policy)
    if spec.accounting:
        (folder / "cluster" / "slurmdbd.conf").write_text(SLURMDBD_CONF)
    for script in ("init.sh", "healthy-host.sh", "mount_namespace.py"):
        shutil.copy(_HERE / script, folder / "cluster" / script)
    key = folder / "cluster" / "munge.key"
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(os.urandom(128))


def _make_certificates(folder: Path, spec: ClusterSpec) -> None:
    """As an administrator does. Each coordinator's host installs its own files (init.sh)."""
    made = folder / "cluster" / "pki"
    _make_authority(made, *spec.coordinators)
    (folder / "muster" / "tls").mkdir()
    shutil.copy(made / "authority.pem", folder / "muster" / "tls")


def _make_metrics_proofs(folder: Path) -> None:
    """One certificate for the metrics of all hosts. No caller of a coordinator trusts its authority."""
    _make_authority(folder / "metrics", METRICS_NAME)
    token = folder / "metrics" / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))


def _make_authority(folder: Path, *hosts: str) -> None:
    command = (sys.executable, "-m", "muster.launcher", "pki", "init", str(folder), *hosts)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _start_containers(cluster: Cluster, image: str, owner: str) -> None:
    """Starts the controller first, so that the nodes find it, then all others but the standby, a few at a time."""
    _start_one(cluster, CONTROLLER, image, owner)
    others = [host for host in cluster.spec.hosts if host not in (CONTROLLER, STANDBY)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda host: _start_one(cluster, host, image, owner), others))
    homes = " ".join(f"/shared/home/{user}" for user in USERS)
    owners = "".join(f"chown {user}: /shared/home/{user};" for user in USERS)
    cluster.sh(CONTROLLER, f"mkdir -p {homes}; {owners}")


def _start_one(cluster: Cluster, host: str, image: str, owner: str) -> None:
    spec, folder, engine = cluster.spec, cluster.folder, cluster.engine
    role = {CONTROLLER: "controller", LOGIN: "login", STANDBY: "standby"}.get(host, "node")
    mounts = {
        folder / "slurm": "/etc/slurm:ro",
        folder / "muster": "/etc/muster:ro",
        folder / "cluster": "/cluster:ro",
        folder / "shared": "/shared",
    }
    engine.call(
        *("run", "--detach", "--pull=never", "--name", container_name(cluster.name, host), "--hostname", host),
        *("--label", f"{LABEL}={cluster.name}", "--label", f"{OWNER_LABEL}={owner}"),
        *("--network", network_name(cluster.name), "--ip", cluster.address(host)),
        # The address must be the same after a reboot: the peers' ARP tables keep the old one for a minute.
        *("--mac-address", spec.mac(host, cluster.subnet)),
        *(f"--add-host={other}:{cluster.address(other)}" for other in spec.hosts if other != host),
        *(part for source, target in mounts.items() for part in ("--volume", f"{source}:{target}")),
        # The rights of root on a real node: debuggers, device files (fake GPUs), all system calls.
        *("--cap-add=SYS_PTRACE", "--cap-add=MKNOD", "--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined"),
        *(_CONFINED if spec.confined else ()),
        *("--shm-size=1g", "--pids-limit=-1", "--stop-signal=KILL", *engine.ulimits),
        *(
            image,
            *(("python3", "/cluster/mount_namespace.py") if spec.private_tmp and role == "node" else ()),
            "bash",
            "/cluster/init.sh",
            role,
            str(int(spec.daemons)),
            str(int(spec.standby)),
            str(int(spec.confined)),
        ),
    ).checked()


def _coordinator_listens(cluster: Cluster) -> bool:
    # Connect from inside the cluster: on the host another service may have the same address.
    connect = f">/dev/tcp/{CONTROLLER}/{COORDINATOR_PORT}"
    return cluster.exec(LOGIN, "bash", "-c", connect, check=False).rc == 0


def _all_idle(cluster: Cluster) -> bool:
    answer = cluster.exec(CONTROLLER, "sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
    states = answer.stdout.split()
    return len(states) == cluster.spec.nodes and set(states) == {"idle"}
