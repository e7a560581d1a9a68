r"""Reads NVIDIA's messages in the kernel log: Xid, SXid, recovery actions, a GPU that fell off the bus.

`KernelErrorParser` reads the messages about the host, too (`host_errors`).

Pure: records in, data out. The formats are those of the drivers since about 2010:

    NVRM: Xid (0000:03:00): 14, Channel 00000001                                  to 2012: no "PCI:"
    NVRM: Xid (PCI:0000:01:00): 31, Ch 00000008, ...                              2013 to 470
    NVRM: Xid (PCI:0000:b5:00): 79, pid='<unknown>', name=<unknown>, GPU has ...  515 to 565
    NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained: ...   a MIG slice
    NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (...) B100 and newer, NVLink
    NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
    XID 63 Dynamic Page Retirement: New retired page, ...                         before A100
    NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.                           without any Xid
    NVRM: GPU at 0000:01:00.0 has fallen off the bus.                             to 2016
    NVRM: The NVIDIA GPU 0000:18:00.0\nNVRM: (PCI ID: 10de:2330) installed ...    one message with line breaks
    NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.
    NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x62:0xffff:2142)             gpu-missing 2
    NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] ...   nvml-error 16
    nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
    nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12023, Correctable, Link 30 ...   sxid-nonfatal
    nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 10006, TSENSE OVERT ...           no word for how bad: see `_SXID_FATAL`

Kinds are those of the coordinator's policy.toml.

An error takes a node out of service, so a user must not be able to make the kernel print one. The kernel quotes users
in many messages. Hence:

1. Only a record of the kernel counts, and only its start: each pattern holds from the first character of the message.
2. A fragment of a line may start with a user's text. It is read only if it is the driver's. The driver flags each of
   its messages as a fragment (KERN_CONT), so the flag alone says nothing. A user's text starts a fragment only after
   "cpuset=": the name of a control group follows there as a part of its own. Every other text that the kernel adds to
   a line in parts starts with a space, a slash or the kernel's own words. So in the seconds after a record that ends
   with "cpuset=" no fragment is read, and at no time one that goes on as such a line does.
3. Where a message starts with the name of a process or a network device, the name has at most 15 characters, and other
   text of the kernel follows. No pattern matches that: each one needs more than 15 characters of the driver's own.
4. A netfilter rule starts a message with a text of up to 127 characters, and the site may have allowed that to users
   (net.netfilter.nf_log_all_netns). The text is followed by the interfaces of the packet, and by its addresses or, for
   a protocol that the kernel does not know, at most by the header of its link: such a message is not read.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from muster.daemon.node.kernel.host_errors import FirmwareErrors, host_error
from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY, KernelError, KernelRecord, one_line

_DRIVER_STARTS = ("NVRM: ", "nvidia-nvswitch", "XID ")
_ERROR_STARTS = ("NVRM: Xid", "XID ")
"""Messages of the driver that start so tell of errors."""
_FLAGGED_STARTS = ("NVRM: ", "XID ")
"""Messages that the driver flags as fragments. Those of NVSwitches have a level instead."""
NAME_AHEAD_S = 2.0
"""Seconds in which the rest of a line may follow a part of it. It takes microseconds, and more on a console that is
slow."""
_BDF = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?"
# The name of a process is a user's text, of at most 15 characters. It may contain commas and line breaks.
_PROCESS = r"(?:pid='?(?:[0-9]*|<unknown>)'?, (?:name=.{0,15}?, )?)?"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL | re.ASCII)


_XID = _pattern(
    rf"NVRM: Xid \((?:PCI:)?(?P<bdf>{_BDF})(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\): (?P<xid>\d{{1,5}})(?:, ?(?P<rest>.*))?"
)
_RETIREMENT = _pattern(r"XID (?P<xid>6[34]) Dynamic Page Retirement")
_NVLINK5 = _pattern(rf"{_PROCESS}[A-Z0-9_/]+\s+(?P<severity>Fatal|Nonfatal)\s+XC\d\s+i\d\s+Link\s+-?\d+\s+\(")
_RECOVERY = _pattern(
    rf"{_PROCESS}GPU recovery action changed from 0x[0-9a-f]+ \([^)]*\) to 0x(?P<to>[0-9a-f]{{1,4}}) \("
)
_SXID = _pattern(
    rf"nvidia-nvswitch\d{{0,3}}: SXid \(PCI:(?P<bdf>{_BDF})\): (?P<sxid>\d{{1,5}}), "
    r"(?!Severity |Data )(?P<severity>Fatal|Non-fatal|Correctable|)(?:, )?"
)
"""Two further lines with the same number tell details."""
_SXID_FATAL = (10006, 28005)
"""The switch or its optical modules shut down for heat: the line does not say Fatal."""
_NODE_REBOOT = _pattern(
    r"NVRM: (?:GPU\d{1,3} )?(?:\w{1,64}: )?uvm encountered global fatal error 0x[0-9a-f]{1,8}, "
    r"requiring (?i:os|system|node) reboot"
)
"""Concerns all GPUs of the node. Drivers before 565 print no Xid 154 after it."""
_LOST = _pattern(rf"NVRM: GPU (?:(?P<bdf>{_BDF}): GPU|at (?:PCI:)?(?P<old_bdf>{_BDF})) has fallen off the bus")
_NEEDS_RESET = _pattern(r"NVRM: (?:GPU\d{1,3} )?\w{1,64}: Assertion failed: Reset required \[NV_ERR_RESET_REQUIRED\] ")
"""A program wants to use a GPU that only a reset makes usable again. Drivers before 565 do not say it otherwise."""
_NOT_STARTED = _pattern(
    rf"NVRM: (?:GPU (?P<bdf>{_BDF}): )?(?:RmInitAdapter failed!|rm_init_adapter failed(?:,| for device bearing) )"
)
_LOST_END = _pattern(r"NVRM: fallen off the bus and is not responding to commands")
# One sentence in up to three lines. Each driver breaks it elsewhere.
_GPU = rf"The NVIDIA GPU (?P<bdf>{_BDF})(?: \(PCI ID: [0-9a-f]{{4}}:[0-9a-f]{{4}}\))?"
_LOST_SENTENCE = _pattern(
    rf"{_GPU} installed in this system has fallen off the bus and is not responding to commands\.?"
)
_LOST_BEGINNING = _pattern(rf"{_GPU}(?: installed in this system(?: has)?(?: fallen off the bus(?: and is)?)?)?")
# A packet that a netfilter rule logs. The name of a process has no room for this.
_PACKET = _pattern(r"IN=\S* OUT=\S* (?:.* )?(?:(?:MAC)?SRC=\S+ (?:MAC)?DST=|ARP HTYPE=|TRUNCATED|MAC source = )")
# A packet of a protocol that the kernel does not know (Linux 5.19 and newer). The name of a process has room for this,
# but the driver says more after a name.
_UNKNOWN_PACKET = _pattern(
    r"IN=\S* OUT=\S*(?: PHYSIN=\S*)?(?: PHYSOUT=\S*)?(?: MAC=[0-9a-f:]*(?: TUNNEL=[0-9.]*->[0-9.]*)?)?\s*\Z"
)

_NAME_AHEAD = _pattern(r"(?:.*[ ,])?cpuset=")
_AFTER_NAME = _pattern(r".*[ ,]mems_allowed=.*")

_NVLINK5_CODES = range(144, 151)
_RECOVERY_CODE = 154
_REBOOT_NODE = 2
"""The recovery action of NVIDIA's driver: the node must be started again."""


class KernelErrorParser:
    """Parses record after record. `not_understood`: messages of errors of the driver that had another form than any
    known one.

    A file may hold the message about a lost GPU as two or three lines. The parser then remembers the beginning of the
    sentence, up to the kernel's next record.
    """

    def __init__(self) -> None:
        self._beginning = ""
        self._firmware = FirmwareErrors()
        self._name_ahead_at = -math.inf
        self.not_understood = 0

    def parse(self, record: KernelRecord) -> KernelError | Literal[False] | None:
        """Return the error in the record, or None. False: a user can have written the record, which is a fragment."""
        if record.facility != KERNEL_FACILITY:
            return None
        beginning, self._beginning = self._beginning, ""
        message = record.message
        if _NAME_AHEAD.fullmatch(message):
            self._name_ahead_at = record.at or 0.0
        if record.fragment and not self._is_drivers(record):
            return False
        if not message.startswith(_DRIVER_STARTS):
            error = self._error_of_host(message.rstrip())  # nearly every record: none
            return None if error and _is_of_packet(message) else error
        if _is_of_packet(message):
            return None
        error = _error(message.rstrip()) or self._lost_gpu(message.rstrip(), beginning)
        self.not_understood += error is None and message.startswith(_ERROR_STARTS)
        return error

    def _error_of_host(self, message: str) -> KernelError | None:
        return self._firmware.parse(message) if message.startswith("{") else host_error(message)

    def _is_drivers(self, fragment: KernelRecord) -> bool:
        """The fragment is a message of the driver, and no name of a control group."""
        at, message = fragment.at or 0.0, fragment.message
        name_may_follow = at - self._name_ahead_at < NAME_AHEAD_S
        return message.startswith(_FLAGGED_STARTS) and not name_may_follow and not _AFTER_NAME.fullmatch(message)

    def _lost_gpu(self, message: str, beginning: str) -> KernelError | None:
        if message.startswith("NVRM: The NVIDIA GPU "):
            beginning = ""
        lines = [line.strip().removeprefix("NVRM: ") for line in message.split("\n")]
        sentence = " ".join([beginning, *lines]).strip()
        if found := _LOST_SENTENCE.fullmatch(sentence):
            return KernelError("gpu-lost", 0, found["bdf"].lower(), f"NVRM: {sentence}")
        if _LOST_END.match(message):
            return KernelError("gpu-lost", 0, "", one_line(message))
        if _LOST_BEGINNING.fullmatch(sentence):
            self._beginning = sentence
        return None


def _is_of_packet(message: str) -> bool:
    """A netfilter rule has logged a packet: the start of the message is the rule's."""
    return bool(_PACKET.search(message) or _UNKNOWN_PACKET.search(message))


def _error(message: str) -> KernelError | None:
    """The error of which one message tells."""
    text = one_line(message)
    if found := _XID.fullmatch(message):
        return _xid(found, text)
    if found := _SXID.match(message):
        code = int(found["sxid"])
        fatal = found["severity"] == "Fatal" or (not found["severity"] and code in _SXID_FATAL)
        return KernelError("sxid" if fatal else "sxid-nonfatal", code, found["bdf"].lower(), text)
    if found := _RETIREMENT.match(message):
        return KernelError("xid", int(found["xid"]), "", text)
    if _NODE_REBOOT.match(message):
        return KernelError("gpu-recovery", _REBOOT_NODE, "", text)
    if found := _LOST.match(message):
        return KernelError("gpu-lost", 0, (found["bdf"] or found["old_bdf"]).lower(), text)
    if _NEEDS_RESET.match(message):
        return KernelError("nvml-error", 16, "", text)
    if found := _NOT_STARTED.match(message):
        return KernelError("gpu-missing", 2, (found["bdf"] or "").lower(), text)
    return None


def _xid(found: re.Match[str], text: str) -> KernelError:
    code, rest, device = int(found["xid"]), found["rest"] or "", found["bdf"].lower()
    if code == _RECOVERY_CODE and (action := _RECOVERY.match(rest)):
        return KernelError("gpu-recovery", int(action["to"], 16), device, text)
    if code in _NVLINK5_CODES and (severity := _NVLINK5.match(rest)) and severity["severity"] == "Nonfatal":
        return KernelError("xid-nonfatal", code, device, text)
    return KernelError("xid", code, device, text)
