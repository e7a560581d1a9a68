"""The cluster tool: ``python -m muster.slurm.testcluster VERB``. Exit status: 0 success, 1 failure, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from muster.slurm.image.engine import EngineError, find_engine
from muster.slurm.image.nvml_stand_in import MAX_GPUS
from muster.slurm.image.recipe import SUITES
from muster.slurm.testcluster import registry
from muster.slurm.testcluster.cluster import COORDINATOR, Cluster
from muster.slurm.testcluster.hardware.pretended_host import HOSTS
from muster.slurm.testcluster.spec import CONTROLLER, LOGIN, PRIVATE_TMP, ClusterSpec, SpecError
from muster.slurm.testcluster.topologies import TOPOLOGIES
from muster.slurm.testcluster.waiting import WaitTimeout

DEFAULT_NAME = "dev"


def main(argv: list[str] | None = None) -> int:
    """Runs one verb."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)  # the command after -- has its own options
    args = _parser().parse_args(argv[:cut])
    args.command = argv[cut + 1 :]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupted `up` removes what it has started
    try:
        _check_node(args)
        return int(args.run(args) or 0)
    except (EngineError, SpecError, WaitTimeout) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m muster.slurm.testcluster", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: object, about: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=about, description=about)
        one.add_argument("--name", default=DEFAULT_NAME, help=f"the cluster (default: {DEFAULT_NAME})")
        one.set_defaults(run=run)
        return one

    up = verb("up", _up, "start a cluster and wait until every node is idle")
    up.add_argument("--nodes", type=int, default=10)
    up.add_argument("--topology", default="tree", choices=TOPOLOGIES, help="the network; default: tree")
    up.add_argument("--leaves", type=int, default=4, help="leaf switches, or blocks; default: 4")
    up.add_argument("--gpus", type=int, default=0, help="fake GPUs on each node, as Slurm GRES")
    up.add_argument(
        "--kind", action="append", default=[], dest="kinds", metavar="'NAMES KEY=VALUE ...'",
        help="nodes with these names and settings of slurm.conf, in place of --nodes and --gpus; may be repeated",
    )  # fmt: skip
    up.add_argument("--slurmd-timeout", type=int, default=10, metavar="SECONDS")
    up.add_argument("--suite", default="forky", choices=SUITES, help="Debian: Slurm 26.05 or 24.11")
    up.add_argument("--accounting", action="store_true", help="slurmdbd with accounts of alice and bob, and its limits")
    up.add_argument(
        "--confined", action="store_true", help="let Slurm confine jobs with cgroups; a node has the host's CPUs"
    )
    up.add_argument(
        "--private-tmp",
        nargs="?",
        const="tmpfs",
        default="",
        choices=PRIVATE_TMP,
        help="give each job /tmp and /dev/shm of its own, with Slurm's plugin tmpfs or linux",
    )
    up.add_argument("--no-daemons", action="store_true", help="do not start Muster's daemons")
    down = verb("down", _down, "remove a cluster")
    down.add_argument("--stale", action="store_true", help="remove all clusters whose owning process has exited")
    verb("list", _list, "list the clusters on this host and their owners")
    shell = verb("shell", _shell, "open a shell on the login container")
    shell.add_argument("host", nargs="?", default=LOGIN)
    shell.add_argument("--user", default="alice")
    run = verb("exec", _exec, "run a command on a host: exec HOST -- COMMAND ...")
    run.add_argument("host")
    run.add_argument("--user", default="root")
    logs = verb("logs", _logs, "print the logs of a host's daemons")
    logs.add_argument("host")
    logs.add_argument("service", nargs="?", default="*")
    for name, method, about in _NODE_VERBS:
        one = verb(name, _on_node(method), about)
        one.add_argument("node")
    kmsg = verb("kmsg", _kmsg, "append a line to a node's kernel log")
    kmsg.add_argument("node")
    kmsg.add_argument("line")
    throttle = verb("throttle", _throttle, "let a GPU of a node report that it slows down for heat")
    throttle.add_argument("node")
    throttle.add_argument("gpu", type=int, help="its index, from 0; the node gets GPUs up to that one")
    throttle.add_argument("--clear", action="store_true", help="the GPU is well again")
    memory = verb("gpu-ecc", _gpu_ecc, "let a GPU of a node report one more uncorrected memory error")
    memory.add_argument("node")
    memory.add_argument("gpu", type=int, help="its index, from 0; the node gets GPUs up to that one")
    memory.add_argument("--clear", action="store_true", help="the GPU is well again")

    hardware = verb("hardware", _hardware, "let a node have two sockets, GPUs and network adapters")
    hardware.add_argument("node")
    hardware.add_argument("host", choices=HOSTS, help="eight GPUs, or four whose order crosses the sockets")
    hardware.add_argument("--clique", type=int, help="an NVLink domain that nodes of the same number share")
    slow = verb("slow-rank", _slow_rank, "let a rank on a node compute at 30 %% of its speed")
    slow.add_argument("node")
    slow.add_argument("rank", type=int, help="its RANK, from 0")
    slow.add_argument("--clear", action="store_true", help="the rank is as fast as before")
    for name, method, about in _CLEARABLE_VERBS:
        one = verb(name, _clearable(method), about)
        one.add_argument("node")
        one.add_argument("--clear", action="store_true", help="the fault is over")
    verb("restart-slurmctld", lambda a: _cluster(a).restart_slurmctld(), "restart slurmctld")
    verb(
        "restart-coordinator",
        lambda a: _cluster(a).restart_coordinator() and None,
        "kill the coordinator (SIGKILL); it starts again",
    )
    verb(
        "kill-coordinator",
        lambda a: _cluster(a).kill_coordinator() and None,
        "kill the coordinator (SIGKILL); it stays down",
    )
    start = lambda a: _cluster(a).start_service(CONTROLLER, COORDINATOR)  # noqa: E731
    verb("start-coordinator", start, "start a killed coordinator")
    return parser


_NODE_VERBS = (
    ("power-off", "power_off", "cut the link, then kill all processes: peers receive nothing"),
    ("crash", "crash", "kill all processes: the peers' connections end at once"),
    ("partition", "partition", "cut the link; the processes continue"),
    ("heal", "heal", "restore the link"),
    ("pause", "pause", "freeze all processes"),
    ("unpause", "unpause", "resume all processes"),
    ("restart", "restart", "reboot and wait until Slurm can use the node"),
    ("repair", "repair", "undo all faults of the node and resume it in Slurm"),
    ("restart-slurmd", "restart_slurmd", "restart slurmd"),
)

_CLEARABLE_VERBS = (
    ("link-down", "link_down", "let the link of a node's InfiniBand port go down"),
    ("ecc", "memory_error", "let a node's memory have an error that ECC can't correct"),
)


def _cluster(args: argparse.Namespace) -> Cluster:
    return Cluster.attach(args.name)


def _check_node(args: argparse.Namespace) -> None:
    """Faults are those of compute nodes: the other hosts have neither musterd nor hardware.

    Raises:
        EngineError: the verb takes a node, and this is none.
    """
    if "node" not in args:
        return
    cluster = _cluster(args)
    if args.node not in cluster.nodes:
        raise EngineError(f"{args.node!r} is not a node of cluster {args.name} (nodes: {' '.join(cluster.nodes)})")


def _up(args: argparse.Namespace) -> None:
    began = time.monotonic()
    spec = ClusterSpec(
        suite=args.suite,
        nodes=args.nodes,
        gpus=args.gpus,
        kinds=tuple(args.kinds),
        topology=args.topology,
        leaves=args.leaves,
        slurmd_timeout=args.slurmd_timeout,
        accounting=args.accounting,
        daemons=not args.no_daemons,
        confined=args.confined,
        private_tmp=args.private_tmp,
        cpus=(os.cpu_count() or 1) if args.confined else ClusterSpec.cpus,
    )
    cluster = Cluster.up(spec, args.name, by_hand=True)
    print(f"cluster {cluster.name}: {spec.nodes} nodes idle after {time.monotonic() - began:.1f} s")
    print(f"shared folder: {cluster.shared}")


def _down(args: argparse.Namespace) -> None:
    engine = find_engine()
    names = [args.name]
    if args.stale:
        names = [one.name for one in registry.find_clusters(engine) if registry.owner_has_exited(one.owner)]
    existing = {one.name for one in registry.find_clusters(engine)}
    for name in names:
        registry.remove_cluster(engine, registry.check_name(name))
        print(f"cluster {name}: {'removed' if name in existing else 'does not exist'}")


def _list(_: argparse.Namespace) -> None:
    for one in registry.find_clusters(find_engine()):
        stale = " (stale: its owner has exited)" if registry.owner_has_exited(one.owner) else ""
        print(f"{one.name}\t{one.owner}{stale}")


def _shell(args: argparse.Namespace) -> int:
    home = "/root" if args.user == "root" else f"/shared/home/{args.user}"
    container = registry.container_name(args.name, args.host)
    options = ("-it", "-u", args.user, "-w", home, "-e", f"HOME={home}", "-e", f"USER={args.user}")
    return _cluster(args).engine.interactive("exec", *options, container, "bash", "-l")


def _exec(args: argparse.Namespace) -> int:
    if not args.command:
        raise EngineError("exec: no command given; write `exec HOST -- COMMAND ...`")
    return subprocess.call(_cluster(args).exec_argv(args.host, *args.command, user=args.user))


def _logs(args: argparse.Namespace) -> None:
    print(_cluster(args).logs(args.host, args.service))


def _kmsg(args: argparse.Namespace) -> None:
    _cluster(args).kmsg(args.node, args.line)


def _slow_rank(args: argparse.Namespace) -> None:
    """One rank of the node is slowed, or is as fast as before."""
    if args.rank < 0:
        raise EngineError(f"rank {args.rank}: ranks count from 0")
    _cluster(args).slow_rank(args.node, args.rank, clear=args.clear)


def _throttle(args: argparse.Namespace) -> None:
    _check_gpu(args.gpu)
    _cluster(args).throttle(args.node, args.gpu, clear=args.clear)


def _gpu_ecc(args: argparse.Namespace) -> None:
    _check_gpu(args.gpu)
    _cluster(args).gpu_ecc(args.node, args.gpu, clear=args.clear)


def _hardware(args: argparse.Namespace) -> None:
    host = HOSTS[args.host]
    if args.clique is not None:
        host = replace(host, cluster=f"{1:032x}", clique=args.clique)
    _cluster(args).give_hardware(args.node, host)


def _check_gpu(gpu: int) -> None:
    if not 0 <= gpu < MAX_GPUS:
        raise EngineError(f"GPU {gpu}: a node has the GPUs 0 to {MAX_GPUS - 1}")


def _clearable(method: str) -> object:
    return lambda args: getattr(_cluster(args), method)(args.node, clear=args.clear) and None


def _on_node(method: str) -> object:
    def run(args: argparse.Namespace) -> None:
        began, cluster = time.monotonic(), _cluster(args)
        getattr(cluster, method)(args.node)
        print(f"{args.node}: {method} took {(time.monotonic() - began) * 1000:.0f} ms")

    return run


if __name__ == "__main__":
    sys.exit(main())
