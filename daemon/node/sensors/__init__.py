"""The sensors of a node: one file each, registered here by one line."""

from __future__ import annotations

from collections.abc import Callable

from muster.daemon.node.sensor import Roots, Sensor
from muster.daemon.node.sensors.kmsg import KernelLogSensor

SENSORS: tuple[Callable[[Roots], Sensor], ...] = (KernelLogSensor,)
