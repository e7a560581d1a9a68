"""What the readings of InfiniBand and RoCE ports say: samples of conditions that may be signals.

A port is judged from the moment at which two readings in succession showed it ACTIVE: a port that nobody uses is no
fault. A value that can't be read gives no sample. `counter_growth` says when a counter has grown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.daemon.node.sensors.sensor import Sample
from muster.daemon.node.sysfs.counter_growth import CounterGrowth
from muster.daemon.node.sysfs.infiniband_ports import ACTIVE, ARMED, DOWN, INIT, FabricReading, PortReading

PORT = "rdma-port"
"""The kind of all signals here. The device is "mlx5_0/1"."""
STAYS_DOWN, NOT_ACTIVE, MISSING, WENT_DOWN, SLOWER_THAN_BEFORE, SLOWER_THAN_SIBLINGS = 1, 2, 3, 4, 5, 6
"""Codes of what a port's state says."""
MOST_GROWTH_PER_S = 1e8
"""More errors in a second than a link has packets: a counter that jumps."""
MOST_RARE_GROWTH_PER_S = 1e3
"""The same for what happens to a link as a whole, not to a packet."""
ALIKE_PORTS = 4
"""Ports of one board type from which a single slower one stands out."""


@dataclass(frozen=True, slots=True)
class _Rate:
    """A counter that is judged by its rate: the condition holds while it grows by more than `per_s` a second."""

    code: int
    per_s: float
    words: str
    most_per_s: float = MOST_GROWTH_PER_S


_RATES = {
    "symbol_error": (
        _Rate(11, 10.0, "symbol errors"),
        _Rate(12, 0.0, "symbol errors"),
    ),
    "link_error_recovery": (_Rate(13, 0.0, "recoveries of the link"),),
    "port_rcv_errors": (_Rate(14, 10.0, "packets received with errors"),),
    "local_link_integrity_errors": (_Rate(15, 0.0, "local link integrity errors", MOST_RARE_GROWTH_PER_S),),
    "excessive_buffer_overrun_errors": (_Rate(16, 0.0, "buffer overruns", MOST_RARE_GROWTH_PER_S),),
    "port_xmit_discards": (_Rate(17, 100.0, "discarded packets"),),
    "local_ack_timeout_err": (_Rate(18, 1.0, "acknowledgements that did not come"),),
    "roce_slow_restart": (_Rate(19, 10.0, "slow restarts after congestion"),),
}
"""Thresholds of NVSentinel's NIC monitor (errors a second); the policy says for how long."""


@dataclass(slots=True)
class _Known:
    """What earlier readings of a port said. active: whether the port has carried traffic. rate: the best, Gb/s."""

    active: bool = False
    rate: float = 0.0
    last_state: int | None = None
    last_rate: float | None = None
    downed: CounterGrowth = field(default_factory=lambda: CounterGrowth(MOST_RARE_GROWTH_PER_S))
    growths: dict[str, CounterGrowth] = field(default_factory=dict)

    def take_in(self, port: PortReading) -> None:
        if port.state == ACTIVE == self.last_state:
            self.active = True
            if port.rate is not None and port.rate == self.last_rate:
                self.rate = max(self.rate, port.rate)
        self.last_state, self.last_rate = port.state, port.rate


class FabricConditions:
    """Turns each reading of all ports into samples. Keeps what earlier readings said of each port."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    @property
    def knows_ports(self) -> bool:
        """Whether any port was ever ACTIVE."""
        return any(known.active for known in self._known.values())

    def samples(self, reading: FabricReading, now: float) -> Iterator[Sample]:
        """The samples of one reading. `now`: monotonic seconds."""
        slow = _slower_than_siblings(reading.ports)
        for port in reading.ports:
            known = self._known.setdefault(port.name, _Known())
            went_down = _went_down(known, port, now)
            known.take_in(port)
            yield from _of_counters(known, port, now)
            if known.active:
                yield from _of_state(known, port, now)
                if went_down is not None:
                    yield _sample(WENT_DOWN, port, went_down, now, f"went down ({port.state_words})")
                yield from _beside_siblings(port, slow.get(port.name), now)
        yield from self._missing(reading, now)

    def _missing(self, reading: FabricReading, now: float) -> Iterator[Sample]:
        present = {port.name for port in reading.ports}
        for name, known in self._known.items():
            if known.active and name.partition("/")[0] not in reading.unlisted:
                words = f"port {name}: the kernel has it no longer"
                yield Sample(PORT, MISSING, name, float(name not in present), now, words)


def _of_state(known: _Known, port: PortReading, now: float) -> Iterator[Sample]:
    if port.state is None:
        return
    yield _sample(STAYS_DOWN, port, port.state == DOWN, now, port.state_words)
    yield _sample(NOT_ACTIVE, port, port.state in (INIT, ARMED), now, port.state_words)
    if port.state == ACTIVE and port.rate is not None and known.rate:
        words = f"{port.rate:g} Gb/s, it had {known.rate:g} Gb/s"
        yield _sample(SLOWER_THAN_BEFORE, port, port.rate < known.rate, now, words)


def _went_down(known: _Known, port: PortReading, now: float) -> bool | None:
    """Whether the port went down since the reading before: by its counter, else by its state; None: it is not known."""
    counted = port.counters.get("link_downed")
    growth = known.downed.next(counted, now)
    if growth is not None:
        return growth.amount > 0
    if counted is None and port.state is not None and known.last_state is not None:
        return known.last_state == ACTIVE and port.state == DOWN
    return None


def _of_counters(known: _Known, port: PortReading, now: float) -> Iterator[Sample]:
    for counter, rates in _RATES.items():
        kept = known.growths.setdefault(counter, CounterGrowth(rates[0].most_per_s))
        growth = kept.next(port.counters.get(counter), now)
        if growth is not None and known.active:
            for rate in rates:
                words = f"{growth.amount} {rate.words} in {growth.passed_s:.1f} s"
                yield _sample(rate.code, port, growth.per_s > rate.per_s, now, words)


def _slower_than_siblings(ports: list[PortReading]) -> dict[str, float]:
    """The port that alone is slower than all others of its board type and link layer, and their least rate."""
    alike: dict[tuple[str, str], list[PortReading]] = defaultdict(list)
    for port in ports:
        if port.state == ACTIVE and port.rate is not None and port.board:
            alike[port.board, port.link_layer].append(port)
    slow = {}
    for group in alike.values():
        slowest, *others = sorted(group, key=lambda port: port.rate or 0.0)
        least = min((port.rate or 0.0 for port in others), default=0.0)
        if len(group) >= ALIKE_PORTS and (slowest.rate or 0.0) < least:
            slow[slowest.name] = least
    return slow


def _beside_siblings(port: PortReading, siblings: float | None, now: float) -> Iterator[Sample]:
    if port.rate is not None:
        words = f"{port.rate:g} Gb/s" + (f", the others of {port.board} have {siblings:g} Gb/s" if siblings else "")
        yield _sample(SLOWER_THAN_SIBLINGS, port, siblings is not None, now, words)


def _sample(code: int, port: PortReading, held: bool, now: float, words: str) -> Sample:
    layer = f" ({port.link_layer})" if port.link_layer else ""
    return Sample(PORT, code, port.name, float(held), now, f"port {port.name}{layer}: {words}")
