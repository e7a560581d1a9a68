"""Reads NVIDIA's lines in the kernel log: Xid, SXid, recovery actions, a GPU that fell off the bus.

Pure: text in, data out. The formats are those of the drivers since about 2010:

    NVRM: Xid (0000:03:00): 14, Channel 00000001                                  to 2012: no "PCI:"
    NVRM: Xid (PCI:0000:01:00): 31, Ch 00000008, ...                              2013 to 470
    NVRM: Xid (PCI:0000:b5:00): 79, pid='<unknown>', name=<unknown>, GPU has ...  515 to 565
    NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained: ...   a MIG slice
    NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (...) B100 and newer, NVLink
    NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
    XID 63 Dynamic Page Retirement: New retired page, ...                         before A100
    NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.                           without any Xid, or in 3 lines
    nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up

Kinds are those of the coordinator's policy.toml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BDF = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?"

_XID = re.compile(
    rf"NVRM: Xid \((?:PCI:)?(?P<bdf>{_BDF})(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\): (?P<xid>\d+)(?:, (?P<rest>.*))?$"
)
_RETIREMENT = re.compile(r"\bXID (?P<xid>6[34]) Dynamic Page Retirement")
_NVLINK5 = re.compile(r"[A-Z0-9_]+\s+(?P<severity>Fatal|Nonfatal)\s+XC\d\s+i\d\s+Link\s+-?\d+\s+\(")
_RECOVERY = re.compile(r"GPU recovery action changed from 0x[0-9a-f]+ \([^)]*\) to 0x(?P<to>[0-9a-f]+) \(")
_SXID = re.compile(rf"nvidia-nvswitch\d+: SXid \(PCI:(?P<bdf>{_BDF})\): (?P<sxid>\d+), (?P<severity>Fatal|Non-fatal), ")
_LOST = re.compile(rf"NVRM: GPU (?P<bdf>{_BDF}): GPU has fallen off the bus")
_LOST_FIRST = re.compile(rf"NVRM: The NVIDIA GPU (?P<bdf>{_BDF})\b")
_LOST_LAST = re.compile(r"NVRM: fallen off the bus and is not responding to commands")

_NVLINK5_CODES = range(144, 151)
_RECOVERY_CODE = 154


@dataclass(frozen=True, slots=True)
class KernelError:
    """One error in one line. `device`: the PCI address as printed, in lower case; empty if the line has none."""

    kind: str
    code: int
    device: str
    text: str


class KernelLineParser:
    """Parses line after line. Three lines together tell of a lost GPU without an Xid: the parser remembers the device
    of the first."""

    def __init__(self) -> None:
        self._first_device = ""

    def parse(self, line: str) -> KernelError | None:
        """Return the error in the line, or None."""
        if "NVRM" not in line and "SXid" not in line and "XID" not in line:
            return None  # nearly every line: skip the patterns
        if found := _XID.search(line):
            return _xid(found, line)
        if found := _SXID.search(line):
            kind = "sxid" if found["severity"] == "Fatal" else "sxid-nonfatal"
            return KernelError(kind, int(found["sxid"]), found["bdf"].lower(), line)
        if found := _RETIREMENT.search(line):
            return KernelError("xid", int(found["xid"]), "", line)
        return self._lost(line)

    def _lost(self, line: str) -> KernelError | None:
        if found := _LOST.search(line):
            return KernelError("gpu-lost", 0, found["bdf"].lower(), line)
        if found := _LOST_FIRST.search(line):
            self._first_device = found["bdf"].lower()
        if _LOST_LAST.search(line):
            return KernelError("gpu-lost", 0, self._first_device, line)
        return None


def _xid(found: re.Match[str], line: str) -> KernelError:
    code, rest, device = int(found["xid"]), found["rest"] or "", found["bdf"].lower()
    if code == _RECOVERY_CODE and (action := _RECOVERY.search(rest)):
        return KernelError("gpu-recovery", int(action["to"], 16), device, line)
    if code in _NVLINK5_CODES and (severity := _NVLINK5.search(rest)) and severity["severity"] == "Nonfatal":
        return KernelError("xid-nonfatal", code, device, line)
    return KernelError("xid", code, device, line)
