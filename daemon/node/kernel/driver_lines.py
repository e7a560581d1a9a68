"""Lines of drivers that speak of trouble and that Muster does not understand: counted for each driver.

So a site sees what a newer driver or kernel says in other words. Nothing follows from such a line, because a message
that starts with the name of a user's process can be taken for one. Details that follow an error that was understood are
none of them.

Pure: messages in, counts out.
"""

from __future__ import annotations

import re
from collections import Counter

from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY, KernelRecord, one_line

DETAILS_S = 1.0
"""Seconds after an error that was understood, in which lines of the same driver are its details."""
SHOWN_S = 3600.0
"""Seconds between two lines of one driver that are to be shown."""
_DRIVER = re.compile(
    r"(?P<driver>NVRM|nvidia-(?:nvswitch|nvlink|uvm|peermem|modeset)|nvidia|mlx[45]_(?:core|en|ib)|infiniband|ib_core"
    r"|bnxt_en|bnxt_re|efa|ena|irdma|ice|i40e|nvme|pcieport|pci|mce|EDAC|amdgpu)[0-9]{0,3}:? ",
    re.ASCII,
)
"""The drivers of what a node needs for training. Their names are labels of a metric, so there are few."""
_TROUBLE = re.compile(
    r"\b(?:errors?|fail(?:s|ed|ing|ures?)?|faults?|fatal|time[d -]{0,2}outs?|lost|hangs?|hung|stuck|dead"
    r"|abort(?:ed|ing)?|assert(?:ion|ed)?|corrupt(?:ed|ion)?|uncorrect\w+|unrecover\w+|not responding|not present"
    r"|link down|inaccessible|invalid|unable to|can't|overheat\w*|rejected|bad)\b",
    re.ASCII | re.IGNORECASE,
)
_NO_TROUBLE = re.compile(
    r"error containment capabilities|\bCorrect(?:ed|able)[ ,]|aer_status: |SUBNQN|device recovery s"
)
"""What drivers say of their abilities, and what they have mended."""


def driver_in_trouble(record: KernelRecord) -> str:
    """The driver whose trouble the record tells of, in whatever words; empty: it tells of none."""
    if record.facility != KERNEL_FACILITY or not (found := _DRIVER.match(record.message)):
        return ""
    told = _TROUBLE.search(record.message, found.end()) and not _NO_TROUBLE.search(record.message)
    return found["driver"] if told else ""


class DriverLines:
    """What was counted. `counts`, `newest`: the lines of each driver, and the newest one. `last`: the newest of all."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.newest: dict[str, str] = {}
        self.last = ""
        self._understood_at: dict[str, float] = {}
        self._shown_at: dict[str, float] = {}

    def note(self, record: KernelRecord, understood: bool, now: float) -> str:
        """Count the record if it is such a line. Returns it if one of its driver was not shown for SHOWN_S.

        Args:
            understood: the record told of an error.
            now: seconds of a clock that does not step back.
        """
        if understood and (found := _DRIVER.match(record.message)):
            self._understood_at[found["driver"]] = now
        if understood or not (driver := driver_in_trouble(record)):
            return ""
        if 0 <= now - self._understood_at.get(driver, float("-inf")) < DETAILS_S:
            return ""
        self.counts[driver] += 1
        self.newest[driver] = self.last = one_line(record.message)
        if now - self._shown_at.get(driver, float("-inf")) < SHOWN_S:
            return ""
        self._shown_at[driver] = now
        return self.newest[driver]
