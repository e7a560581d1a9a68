"""A rank that computes slowly: its process is stopped for most of the time, in pulses shorter than a step.

It is what a slow processor does to a rank: work takes longer, and a sleep takes as long as before. So a script that
only sleeps is not slowed. Limits of a cgroup were rejected: the containers run on hosts with cgroups of either version,
and Slurm makes none there.
"""

from __future__ import annotations

from muster.slurm.testcluster.hardware.faults import Hosts

RUNS_S, STOPS_S = 0.012, 0.028
"""Seconds of each pulse: the rank has 30 % of the time. Shorter pulses would cost the host more than the rank."""
_FOLDER = "/run/cluster/slow-ranks"

_PULSES = """
import os, signal, sys, time

name, mark, runs_s, stops_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])

def pids():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/comm").read().strip() == name:
                yield int(pid)
        except OSError:
            pass

def send(found, number):
    for pid in found:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

def is_wanted():
    try:
        return open(mark).read() == str(os.getpid())
    except OSError:
        return False

with open(mark, "w") as file:
    file.write(str(os.getpid()))  # another program that slows the same rank ends then
while is_wanted():
    found = list(pids())  # a restarted rank has another process
    for _ in range(25):
        send(found, signal.SIGSTOP)
        time.sleep(stops_s)
        send(found, signal.SIGCONT)
        time.sleep(runs_s)
"""


def slow_rank(hosts: Hosts, node: str, rank: int, *, clear: bool = False) -> None:
    """Slows this rank of every job on the node down to 30 %, and each process that takes its place; `clear`: no more.

    It takes up to a second until the rank is as fast as before.
    """
    mark = f"{_FOLDER}/rank{rank}"
    if clear:
        hosts.exec(node, "rm", "-f", mark)
        return
    pulses = ("python3", "-c", _PULSES, f"rank{rank}", mark, str(RUNS_S), str(STOPS_S))
    start = f'mkdir -p {_FOLDER} && {{ setsid "$@" >/dev/null 2>&1 </dev/null & }}'
    hosts.exec(node, "sh", "-c", start, "slow-rank", *pulses)


def speed_up_ranks(hosts: Hosts, node: str) -> None:
    """No rank of the node is slowed any more."""
    hosts.exec(node, "rm", "-rf", _FOLDER)
