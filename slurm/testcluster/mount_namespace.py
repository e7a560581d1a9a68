"""Runs a command in a mount namespace that can hold those of jobs: ``python3 mount_namespace.py COMMAND ...``

Slurm binds the mount namespace of each job to a file, to keep it. The kernel allows that if the namespace has a higher
number than the one around it. Linux 6.18 gives each CPU a range of numbers, so a newer namespace may have a lower
number: slurmstepd then ends with "Invalid argument", and the job never starts. Only the first namespace of a host is
lower than all others, and a container has another one. This one is made on the CPU with the lowest range.
Runs in a container, with nothing of Muster.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys

_CLONE_NEWNS = 0x00020000  # linux/sched.h
_NS_GET_MNTNS_ID = 0x8008B705  # linux/nsfs.h


def _enter_new(cpu: int) -> int:
    """Enters a new mount namespace, made on `cpu`. Returns its number; 0 from a kernel that does not tell it."""
    os.sched_setaffinity(0, {cpu})
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):  # os.unshare is new in Python 3.12
        raise OSError(ctypes.get_errno(), "no new mount namespace")
    with open("/proc/self/ns/mnt") as namespace:
        try:
            return int(struct.unpack("Q", fcntl.ioctl(namespace, _NS_GET_MNTNS_ID, bytes(8)))[0])
        except OSError:
            return 0


if __name__ == "__main__":
    cpus = os.sched_getaffinity(0)
    _enter_new(min(cpus, key=_enter_new))
    os.sched_setaffinity(0, cpus)
    os.execvp(sys.argv[1], sys.argv[1:])
