"""The shape of a test cluster, and the configuration files that result. Pure: no I/O.

A cluster has one controller ``ctl``, one login container ``login``, and compute nodes ``n0`` to ``n<N-1>``, or nodes of
several kinds with names of their own. The nodes hang on leaf switches ``s0`` to ``s<L-1>`` in contiguous groups, under
one ``spine``, or are joined by another topology (topologies.py). On request there is a second management node ``ctl2``,
which runs a standby coordinator.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from muster.slurm.client.parsing import hostlist
from muster.slurm.testcluster import topologies

CONTROLLER = "ctl"
LOGIN = "login"
STANDBY = "ctl2"
USERS = ("alice", "bob")  # ordinary users, uid 2001 and 2002; homes under /shared/home

COORDINATOR_PORT, METRICS_PORT = 7070, 9464
METRICS_NAME = "metrics"
"""The host that the certificate for metrics names."""
KMSG = "/var/log/muster-kmsg"
HEALTH_CHECK_INTERVAL_S = 20
"""Seconds between two runs of HealthCheckProgram. A test waits for one of them."""
EARLY_POLICY = """# A test cluster has more faults in an hour than a production cluster has in a year.
[limits]
nodes_per_hour = 1000
fraction = 1.0
swaps_per_hour = 1000
lemon_after = 0
# A test waits for seconds where a site waits for minutes.
[gpu-throttle.codes.64.when]
window_s = 15
clear_s = 20
[rdma-port.codes.1.when]
window_s = 5
clear_s = 20
[pool]
partition = "shared"
wait_s = 20
"""
"""What each version reads."""
POLICY = f"""{EARLY_POLICY}
[hooks.notes]
on = ["swap", "restart", "node", "end"]
command = ["/bin/sh", "-c", "(cat; echo) >> /tmp/hooks.jsonl"]
"""

# Neither version is named: slurmd takes that of the host. IgnoreSystemd: no systemd runs in the containers.
_CONFINED = """IgnoreSystemd=yes
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainDevices=yes
"""
PRIVATE_TMP = {
    "tmpfs": ("job_container.conf", "AutoBasePath=true\nBasePath=/var/spool/private\nDirs=/tmp,/dev/shm\n"),
    "linux": (
        "namespace.yaml",
        "defaults: {auto_base_path: true, base_path: /var/spool/private, dirs: '/tmp,/dev/shm', "
        "clone_ns_flags: [CLONE_NEWPID]}\n",
    ),
}
"""The file of each plugin that gives a job /tmp and /dev/shm of its own. `linux` gives it process numbers, too."""


ACCOUNTS = {"alice": ("physics", "biology"), "bob": ("biology",)}
"""The accounts of each user in a cluster with accounting, the default first."""
_ACCOUNTING = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": CONTROLLER,
    "AccountingStorageEnforce": "associations,limits,qos",
    "AccountingStoreFlags": "job_comment",
    "AccountingStorageTRES": "gres/gpu",
}
SLURMDBD_CONF = f"""DbdHost={CONTROLLER}
SlurmUser=slurm
AuthType=auth/munge
PidFile=/run/slurm/slurmdbd.pid
PrivateData=jobs,usage
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
"""


class SpecError(ValueError):
    """The requested cluster is not possible."""


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster's shape and Slurm's settings.

    `requeue_delay` is in seconds; None keeps Slurm's own value, 121 s. `extra` are additional slurm.conf lines.
    `daemons`: start Muster's daemons. `standby`: start a second coordinator. `plain_text`: Muster's connections use no
    TLS. `metrics`: the daemons serve metrics. `topology` is one of topologies.py; `topology_yaml` is the text of
    topology.yaml in its place. `suite` is the image's Debian: ``forky`` has Slurm 26.05, ``trixie`` has Slurm 24.11
    without pyslurm. `only_slurm`: Python and PyTorch are those of ``forky`` all the same. `tests_image`: use the image
    of the tests. The other image has no pyslurm, and its build takes a minute less. `accounting`: slurmdbd keeps
    Slurm's accounting in a database on the controller, and its limits hold.
    `kinds`: nodes of several kinds, in place of `nodes` and `gpus`. Each has names and what slurm.conf says of them, as
    in "gpu-a-[001-002] Gres=gpu:h100:4 Features=ib". GPUs have the device files in the order of their types.
    `policy`: the text of policy.toml. `confined`: Slurm limits jobs with cgroups, as most sites do; `cpus` is
    then at most what this host has. `private_tmp`: the plugin that gives each job /tmp and /dev/shm of its own, one of
    PRIVATE_TMP; empty: none.
    """

    nodes: int = 10
    cpus: int = 8
    memory_mib: int = 16384
    leaves: int = 4
    gpus: int = 0
    slurmd_timeout: int = 10
    return_to_service: int = 2
    expedited_requeue: bool = True
    requeue_delay: int | None = None
    daemons: bool = True
    standby: bool = False
    plain_text: bool = False
    metrics: bool = False
    topology: str = "tree"
    topology_yaml: str = ""
    suite: str = "forky"
    only_slurm: bool = False
    tests_image: bool = True
    accounting: bool = False
    confined: bool = False
    private_tmp: str = ""
    kinds: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    policy: str = POLICY

    def __post_init__(self) -> None:
        """Refuses a cluster that is not possible."""
        if self.kinds:
            object.__setattr__(self, "nodes", len(self.node_names))
        if not 1 <= self.nodes <= 200:
            raise SpecError(f"{self.nodes} nodes: a cluster has 1 to 200")
        if not self.leaves >= 1:
            raise SpecError(f"{self.leaves} leaf switches: at least 1 is needed")
        known = topologies.OLD_TOPOLOGIES if self.suite == "trixie" else topologies.TOPOLOGIES
        if self.topology not in known:
            raise SpecError(f"{self.suite} has no topology {self.topology!r}; choose one of {', '.join(known)}")
        plugins = ("tmpfs",) if self.suite == "trixie" else PRIVATE_TMP
        if self.private_tmp and self.private_tmp not in plugins:
            raise SpecError(
                f"{self.suite} has no private /tmp {self.private_tmp!r}; choose one of {', '.join(plugins)}"
            )

    @property
    def node_names(self) -> list[str]:
        """``n0`` and so on, or those of the kinds."""
        if self.kinds:
            return [name for kind in self.kinds for name in hostlist.expand(kind.split()[0])]
        return [f"n{index}" for index in range(self.nodes)]

    @property
    def hosts(self) -> list[str]:
        """All containers: the controller first, then the login container, then the nodes."""
        return [CONTROLLER, LOGIN, *self.node_names, *self.coordinators[1:]]

    @property
    def coordinators(self) -> list[str]:
        """The hosts on which a coordinator runs."""
        return [CONTROLLER, *([STANDBY] if self.standby else [])]

    def leaf_of(self, node: str) -> str:
        """The leaf switch of `node`."""
        leaves = min(self.leaves, self.nodes)
        return f"s{self.node_names.index(node) * leaves // self.nodes}"

    def address(self, host: str, subnet: str) -> str:
        """The fixed address of `host` in `subnet`, which is given as its first three numbers (``10.200.7``)."""
        return f"{subnet}.{10 + self.hosts.index(host)}"

    def mac(self, host: str, subnet: str) -> str:
        """The fixed hardware address of `host`: a locally administered address, made from the IP address."""
        numbers = (int(part) for part in self.address(host, subnet).split("."))
        return "02:4d:" + ":".join(f"{number:02x}" for number in numbers)

    def to_json(self) -> str:
        """The spec as JSON, for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ClusterSpec:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return ClusterSpec(**{**values, "extra": tuple(values["extra"]), "kinds": tuple(values["kinds"])})

    def files(self) -> dict[str, str]:
        """The files of /etc/slurm by name."""
        files = {
            "slurm.conf": self._slurm_conf(),
            **({"topology.yaml": self.topology_yaml} if self.topology_yaml else self._topology_files()),
            "cgroup.conf": _CONFINED if self.confined else "CgroupPlugin=disabled\n",
        }
        if lines := [line for kind in self._kinds() for line in _gres_lines(kind)]:
            files["gres.conf"] = "".join(f"{line}\n" for line in lines)
        if self.private_tmp:
            name, text = PRIVATE_TMP[self.private_tmp]
            files[name] = text
        return files

    def _topology_files(self) -> dict[str, str]:
        return topologies.files(self.topology, self._groups())

    def _slurm_conf(self) -> str:
        scheduler = [
            *("batch_sched_delay=0", "sched_interval=1", "sched_min_interval=0", "permit_job_expansion"),
            *([f"requeue_delay={self.requeue_delay}"] if self.requeue_delay is not None else []),
        ]
        settings = {
            "ClusterName": "muster",
            "SlurmctldHost": CONTROLLER,
            "SlurmUser": "slurm",
            "MailProg": "/bin/true",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "StateSaveLocation": "/var/spool/slurmctld",
            "SlurmdSpoolDir": "/var/spool/slurmd",
            "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
            "SlurmdPidFile": "/run/slurm/slurmd.pid",
            "ProctrackType": "proctrack/cgroup" if self.confined else "proctrack/linuxproc",
            "TaskPlugin": "task/cgroup,task/affinity" if self.confined else "task/none",
            **({"PrologFlags": "Contain,Alloc,X11"} if self.confined or self.private_tmp else {}),
            **(self._private_tmp() if self.private_tmp else {}),
            "Prolog": "/opt/muster/bin/muster-prolog",
            "Epilog": "/opt/muster/bin/muster-epilog",
            "HealthCheckProgram": "/opt/muster/bin/muster-healthcheck",
            "HealthCheckInterval": str(HEALTH_CHECK_INTERVAL_S),
            # Slurm 26.05 knows it, 60 s by default, and wants less than the interval.
            **({} if self.suite == "trixie" else {"HealthCheckTimeout": str(HEALTH_CHECK_INTERVAL_S // 2)}),
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory" if self.confined else "CR_Core",
            **topologies.settings(self.topology),
            "SlurmdParameters": "config_overrides",  # else a node that claims more resources than it has is INVAL
            "SlurmdTimeout": str(self.slurmd_timeout),
            "SlurmctldTimeout": "30",
            "ReturnToService": str(self.return_to_service),
            "InactiveLimit": "0",
            "MinJobAge": "3600",
            "SchedulerParameters": ",".join(scheduler),
            **({"SlurmctldParameters": "enable_expedited_requeue"} if self.expedited_requeue else {}),
            **({"GresTypes": "gpu"} if any("Gres=" in kind for kind in self._kinds()) else {}),
        }
        settings |= _ACCOUNTING if self.accounting else {}
        each = (
            f"CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 "
            f"RealMemory={self.memory_mib}"
        )
        every = ",".join(kind.split()[0] for kind in self._kinds())
        lines = [
            *(f"{key}={value}" for key, value in settings.items()),
            *self.extra,
            *(f"NodeName={kind} {each}{'' if 'State=' in kind else ' State=UNKNOWN'}" for kind in self._kinds()),
            f"PartitionName=main Nodes={every} Default=YES MaxTime=INFINITE State=UP",
            f"PartitionName=shared Nodes={every} MaxTime=INFINITE State=UP",
            *(
                f"PartitionName={name} Nodes={every} MaxTime=INFINITE State=UP Topology={name}"
                for name in topologies.partitions(self.topology)
            ),
        ]
        return "\n".join(lines) + "\n"

    def _kinds(self) -> tuple[str, ...]:
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        return self.kinds or (f"n[0-{self.nodes - 1}]{gres}",)

    def _private_tmp(self) -> dict[str, str]:
        # 25.11 renamed the plugins.
        key, room = ("JobContainerType", "job_container") if self.suite == "trixie" else ("NamespaceType", "namespace")
        return {key: f"{room}/{self.private_tmp}"}

    def _groups(self) -> dict[str, list[str]]:
        """The nodes of each leaf switch."""
        groups: dict[str, list[str]] = {}
        for node in self.node_names:
            groups.setdefault(self.leaf_of(node), []).append(node)
        return groups


def _gres_lines(kind: str) -> Iterator[str]:
    """The lines of gres.conf for the GPUs of a kind."""
    names, *settings = kind.split()
    gres, first = next((text.removeprefix("Gres=") for text in settings if text.startswith("Gres=")), ""), 0
    for part in filter(None, gres.split(",")):
        name, *of_type, count = part.split(":")
        last = first + int(count) - 1
        typed = "".join(f" Type={one}" for one in of_type)
        yield f"NodeName={names} Name={name}{typed} File=/dev/nvidia[{first}-{last}]"
        first = last + 1
