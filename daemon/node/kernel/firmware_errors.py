r"""Reads what a server's firmware reports of its hardware (APEI), in several lines of the kernel log.

    {1}[Hardware Error]: event severity: recoverable                 of all sections together
    {1}[Hardware Error]:  Error 0, type: recoverable                 of the section that follows
    {1}[Hardware Error]:   section_type: PCIe error                  pcie-aer; every other section: machine-check

A section alone says what has failed: an error of a network card is no error of the memory. A report without a number in
front (`[Hardware Error]: event severity: fatal`) is that of an earlier boot (BERT): the node has been started again
since, so it counts for nothing.
"""

from __future__ import annotations

import re

from muster.daemon.node.kernel.host_errors import AER, MACHINE_CHECK
from muster.daemon.node.kernel.kernel_error import KernelError, one_line

_START = r"(?P<report>\{\d{1,9}\})\[Hardware Error\]: "
_SEVERITY = re.compile(_START + r" {0,8}Error \d{1,5}, type: (?P<severity>corrected|recoverable|fatal)")
_SECTION = re.compile(_START + r" {0,8}section[_ ]type: (?P<section>\w.{0,80})")
_CODES = {
    MACHINE_CHECK: {"corrected": 1, "recoverable": 2, "fatal": 2},
    AER: {"corrected": 1, "recoverable": 2, "fatal": 3},
}
"""The codes of host_errors, by severity."""


class FirmwareErrors:
    """Reads message after message."""

    def __init__(self) -> None:
        self._report, self._severity = "", ""

    def parse(self, message: str) -> KernelError | None:
        """The error of which a whole message of the kernel tells; None: of none, or its section is still to come."""
        if found := _SEVERITY.match(message):
            self._report, self._severity = found["report"], found["severity"]
            return None
        found = _SECTION.match(message)
        if found is None or found["report"] != self._report:
            return None
        self._report = ""
        kind = AER if found["section"].startswith("PCIe") else MACHINE_CHECK
        text = one_line(f"[Hardware Error]: {self._severity}, section_type: {found['section']}")
        return KernelError(kind, _CODES[kind][self._severity], "", text)
