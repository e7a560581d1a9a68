"""Files of the kernel about network adapters and the host. Whatever they hold, a signal needs what would justify it.

An input is a list of readings, divided by lines that are "=". A line "NAME TEXT" changes a file of `FILES` before the
reading, a line "NAME" removes it. A text that ends in a backslash has no line end, as one half written; "|" stands for
a line end within. All files are healthy at first.
"""

import re
import shutil
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from muster.daemon.node.sensors import host_conditions, infiniband_conditions
from muster.daemon.node.sensors.host_conditions import HostConditions
from muster.daemon.node.sensors.infiniband_conditions import FabricConditions
from muster.daemon.node.sensors.sensor import Sample
from muster.daemon.node.sysfs.host_files import HostFiles
from muster.daemon.node.sysfs.infiniband_ports import FabricReading, read_ports

_DEVICE, _MEMORY = "sys/class/infiniband/mlx5_0", "sys/devices/system/edac/mc/mc0"
_PORT, _CPU = f"{_DEVICE}/ports/1", "sys/devices/system/cpu/cpu0"
COUNTERS = {
    "downed": f"{_PORT}/counters/link_downed",
    "symbol": f"{_PORT}/counters/symbol_error",
    "recovery": f"{_PORT}/counters/link_error_recovery",
    "receive": f"{_PORT}/counters/port_rcv_errors",
    "integrity": f"{_PORT}/counters/local_link_integrity_errors",
    "overrun": f"{_PORT}/counters/excessive_buffer_overrun_errors",
    "discards": f"{_PORT}/counters/port_xmit_discards",
    "ack": f"{_PORT}/hw_counters/local_ack_timeout_err",
    "slow": f"{_PORT}/hw_counters/roce_slow_restart",
    "ue": f"{_MEMORY}/ue_count",
    "ce": f"{_MEMORY}/ce_count",
    "throttles": f"{_CPU}/thermal_throttle/package_throttle_count",
    "throttled": f"{_CPU}/thermal_throttle/package_throttle_total_time_ms",
}
_OTHERS = {
    "state": (f"{_PORT}/state", "4: ACTIVE"),
    "phys": (f"{_PORT}/phys_state", "5: LinkUp"),
    "rate": (f"{_PORT}/rate", "400 Gb/sec (4X NDR)"),
    "layer": (f"{_PORT}/link_layer", "InfiniBand"),
    "board": (f"{_DEVICE}/board_id", "MT_0000000838"),
    "package": (f"{_CPU}/topology/physical_package_id", "0"),
    "meminfo": ("proc/meminfo", "MemTotal: 1000 kB|MemAvailable: 500 kB"),
    "load": ("proc/loadavg", "0.00 0.00 0.00 1/1 1"),
    "mounts": ("proc/self/mountinfo", "25 1 259:2 / / rw - ext4 /dev/sda1 rw"),
}
FILES = {name: (path, "0") for name, path in COUNTERS.items()} | _OTHERS
MAX_READINGS = 20
_CODES = {11: "symbol", 12: "symbol", 13: "recovery", 14: "receive", 15: "integrity", 16: "overrun"}
_CODES |= {17: "discards", 18: "ack", 19: "slow"}
_STUCK = {2**bits - 1 for bits in (8, 16, 32, 64)}
_COUNT = re.compile(rb"[0-9]{1,20}\n")


class World:
    """The files, and what a careful reader may conclude from what they held."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts: dict[str, bytes] = {}
        self.counts: dict[str, list[int]] = defaultdict(list)
        self.readable: set[str] = set()
        self.states: list[bytes] = []
        self.changed: set[str] = set()
        for name, (_, text) in FILES.items():
            self.put(name, text.encode())

    def put(self, name: str, text: bytes | None) -> None:
        path = self.root / FILES[name][0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        whole = b"" if text is None else text[:-1] if text.endswith(b"\\") else text + b"\n"
        self.texts[name] = whole.replace(b"|", b"\n")
        if text is not None:
            path.write_bytes(self.texts[name])

    def change(self, lines: list[bytes]) -> None:
        for line in lines:
            name, space, text = line.partition(b" ")
            key = name.decode("ascii", "replace")
            if key in FILES:
                self.changed.add(key)
                self.put(key, text if space else None)

    def look(self) -> None:
        """What a reading would see now."""
        self.readable.clear()
        for name in COUNTERS:
            text = self.texts[name]
            if _COUNT.fullmatch(text) and int(text) < 2**64 and int(text) not in _STUCK:
                self.counts[name].append(int(text))
                self.readable.add(name)
        self.states.append(self.texts["state"])

    def has_grown(self, name: str) -> bool:
        """Whether the last reading confirms a growth, and the step before it was no jump back."""
        before, *steps = [-1, *self.counts[name]][-4:]
        return (
            name in self.readable
            and len(steps) == 3
            and steps[0] < steps[1] <= steps[2]
            and (before == -1 or before <= steps[0])
        )

    def was_active(self) -> bool:
        """Whether two readings in succession showed the port ACTIVE."""
        active = [state.lstrip(b"0").startswith(b"4:") for state in self.states]
        return any(one and two for one, two in pairwise(active))

    def justifies(self, sample: Sample) -> bool:
        state = self.states[-1].lstrip(b"0")
        match sample.kind, sample.code:
            case infiniband_conditions.PORT, infiniband_conditions.STAYS_DOWN:
                return state.startswith(b"1:") and self.was_active()
            case infiniband_conditions.PORT, infiniband_conditions.NOT_ACTIVE:
                return state.startswith((b"2:", b"3:")) and self.was_active()
            case infiniband_conditions.PORT, infiniband_conditions.WENT_DOWN:
                return self.has_grown("downed") or ("downed" not in self.readable and state.startswith(b"1:"))
            case infiniband_conditions.PORT, infiniband_conditions.SLOWER_THAN_BEFORE:
                return "rate" in self.changed
            case infiniband_conditions.PORT, code if code in _CODES:
                return self.has_grown(_CODES[code])
            case host_conditions.MEMORY, code:
                return self.has_grown("ue" if code == host_conditions.UNCORRECTABLE else "ce")
            case host_conditions.CPU, _:
                return self.has_grown("throttles") or self.has_grown("throttled")
            case host_conditions.FILE_SYSTEM, _:
                return "mounts" in self.changed
            case host_conditions.USE, _:
                return bool({"meminfo", "load"} & self.changed)
        return False


def check(data: bytes) -> None:
    """All readings of `data`, a second apart."""
    root = Path(tempfile.mkdtemp(prefix="muster-fuzz-"))
    try:
        _check(World(root), data)
    finally:
        shutil.rmtree(root)


def _check(world: World, data: bytes) -> None:
    fabric, host, files = FabricConditions(), HostConditions(), HostFiles(world.root, lambda _: 0.5)
    for second, block in enumerate(data.split(b"\n=\n")[:MAX_READINGS]):
        world.change(block.split(b"\n"))
        world.look()
        ports, reading = read_ports(world.root), files.read()
        assert ports is not None
        failed = [reading.failed, ports.unlisted, *(port.failed for port in ports.ports)]
        assert all(words.isprintable() for each in failed for words in each.values())
        _check_samples(world, [*fabric.samples(ports, float(second)), *host.samples(reading, float(second))], ports)


def _check_samples(world: World, samples: list[Sample], ports: FabricReading) -> None:
    assert [port.name for port in ports.ports] == ["mlx5_0/1"]
    for sample in samples:
        assert 0 <= sample.held <= 1
        assert sample.text.isprintable()
        assert len(sample.text) < 500
        assert sample.device.isascii()
        assert not sample.held or world.justifies(sample), sample
