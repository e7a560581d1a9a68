"""The ports of InfiniBand and RoCE adapters, as /sys/class/infiniband shows them.

A value that can't be read is None, and `failed` says why. No input makes this module fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from muster.daemon.node.sysfs.kernel_files import Unreadable, names, read_count, read_text

FOLDER = "sys/class/infiniband"
DOWN, INIT, ARMED, ACTIVE, ACTIVE_DEFER = 1, 2, 3, 4, 5
"""A port's logical state, as in the kernel's enum ib_port_state."""
MAX_DEVICES, MAX_PORTS = 64, 8
"""Adapters of a node, and ports of an adapter, at most; more are not read."""
COUNTERS = (
    "counters/link_downed",
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "counters/port_xmit_discards",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/roce_slow_restart",
)
_STATE = re.compile(r"([0-9]{1,2}): ?[A-Za-z_ -]{0,40}")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,2})?) Gb/sec[ -~]{0,40}")

_LINK_LAYER = re.compile(r"[A-Za-z]{1,20}")  # "Unspecified": an adapter of neither kind, as EFA
_BOARD = re.compile(r"[ -~]{0,64}")


@dataclass(slots=True)
class PortReading:
    """One port at one moment. `name`: "mlx5_0/1". `rate`: Gb/s. `counters`: by the end of the file's name.

    `failed`: why a file could not be read, by the file's name. `absent`: files that this port does not have.
    """

    name: str
    state: int | None = None
    state_words: str = ""
    link_layer: str = ""
    board: str = ""
    rate: float | None = None
    counters: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class FabricReading:
    """All ports. `unlisted`: adapters whose ports could not be listed; nothing is known of what they have."""

    ports: list[PortReading]
    unlisted: dict[str, str]


def read_ports(root: Path) -> FabricReading | None:
    """All ports below the root folder `root`; None: the kernel knows no such adapter.

    Raises:
        Unreadable: the list of adapters can't be read.
    """
    folder = root / FOLDER
    try:
        devices = names(folder, r".*", MAX_DEVICES)
    except Unreadable as error:
        if error.missing:
            return None
        raise
    reading = FabricReading([], {})
    for device in devices:
        try:
            ports = names(folder / device / "ports", r"[0-9]{1,3}", MAX_PORTS)
        except Unreadable as error:
            reading.unlisted[device] = str(error)
            continue
        reading.ports.extend(_read_port(folder / device, device, port) for port in ports)
    return reading


def _read_port(device: Path, name: str, port: str) -> PortReading:
    reading, folder = PortReading(f"{name}/{port}"), device / "ports" / port
    if found := _match(reading, folder, "state", _STATE):
        reading.state, reading.state_words = int(found[1]), found[0]
        if not DOWN <= reading.state <= ACTIVE_DEFER:
            reading.state, reading.failed["state"] = None, f"unknown: {found[0]!r}"
    if found := _match(reading, folder, "phys_state", _STATE):
        reading.state_words += f", physical {found[0]}"
    if found := _match(reading, folder, "rate", _RATE):
        reading.rate = float(found[1])
    if found := _match(reading, folder, "link_layer", _LINK_LAYER):
        reading.link_layer = found[0]
    if found := _match(reading, device, "board_id", _BOARD):
        reading.board = found[0]
    for counter in COUNTERS:
        try:
            reading.counters[counter.rpartition("/")[2]] = read_count(folder / counter)
        except Unreadable as error:
            _note(reading, counter, error)
    return reading


def _match(reading: PortReading, folder: Path, file: str, pattern: re.Pattern[str]) -> re.Match[str] | None:
    try:
        text = read_text(folder / file)
    except Unreadable as error:
        _note(reading, file, error)
        return None
    if not (found := pattern.fullmatch(text)):
        reading.failed[file] = f"not understood: {text[:40]!r}"
    return found


def _note(reading: PortReading, file: str, error: Unreadable) -> None:
    if error.missing:
        reading.absent.add(file)
    else:
        reading.failed[file] = str(error)
