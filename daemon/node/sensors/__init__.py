"""The sensors of a node: one file each, registered here with one line.

May import: `daemon.host`, `daemon.node.kernel`, `daemon.node.nvml`, `daemon.node.sysfs`, `slurm.client.parsing`.
"""

from __future__ import annotations

from collections.abc import Callable

from muster.daemon.node.sensors.host import HostSensor
from muster.daemon.node.sensors.infiniband import InfinibandSensor
from muster.daemon.node.sensors.kmsg import KernelLogSensor
from muster.daemon.node.sensors.nvml import NvmlSensor
from muster.daemon.node.sensors.sensor import Sensor, SensorPaths

SENSORS: tuple[Callable[[SensorPaths], Sensor], ...] = (
    KernelLogSensor,
    NvmlSensor,
    InfinibandSensor,
    HostSensor,
)
