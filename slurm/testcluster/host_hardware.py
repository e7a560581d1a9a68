"""The network adapter and the memory that a node pretends to have, and their faults: files in the place of /sys.

`healthy-host.sh` makes the files when the node boots. musterd reads them (`--host-root`).
"""

from __future__ import annotations

from muster.slurm.testcluster.gpus import Hosts
from muster.slurm.testcluster.waiting import wait_until

HOST_ROOT = "/run/cluster/host"
_PORT = f"{HOST_ROOT}/sys/class/infiniband/mlx5_0/ports/1"
_MEMORY = f"{HOST_ROOT}/sys/devices/system/edac/mc/mc0"
_PUT = 'put() { printf "%s\\n" "$2" >"$1.$$" && mv "$1.$$" "$1"; }; add() { put "$1" $(($(cat "$1") + 1)); };'
_LINK_DOWN = f'{_PUT} add "$1/counters/link_downed"; put "$1/phys_state" "2: Polling"; put "$1/state" "1: DOWN"'
_LINK_UP = f'{_PUT} put "$1/phys_state" "5: LinkUp"; put "$1/state" "4: ACTIVE"'
_MEMORY_ERROR = f'{_PUT} add "$1/ue_count"'
_NO_MEMORY_ERROR = f'{_PUT} put "$1/ue_count" 0'


def set_link(hosts: Hosts, node: str, *, up: bool) -> float:
    """Lets the node's InfiniBand port go down, or come up again. Returns the wall-clock time of it."""
    return _run(hosts, node, _LINK_UP if up else _LINK_DOWN, _PORT)


def set_memory_error(hosts: Hosts, node: str, *, clear: bool) -> float:
    """Counts one more uncorrectable error of the node's memory, or sets the count to 0. Returns the wall-clock time."""
    return _run(hosts, node, _NO_MEMORY_ERROR if clear else _MEMORY_ERROR, _MEMORY)


def mend_hardware(hosts: Hosts, node: str) -> None:
    """Undoes all faults of the node's network adapter and memory.

    A node that boots at this moment removes the folder and makes the files itself, so this may take several attempts.
    """
    script = ("bash", "/cluster/healthy-host.sh", HOST_ROOT)
    wait_until(lambda: hosts.exec(node, *script, check=False).rc == 0, 10, f"{node} has the files of a healthy host")


def _run(hosts: Hosts, node: str, script: str, folder: str) -> float:
    return float(hosts.exec(node, "sh", "-c", f"{script} && date +%s.%N", "fault", folder).stdout)
