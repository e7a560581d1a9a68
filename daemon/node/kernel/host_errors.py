r"""Reads what the kernel says of the host: memory, disks, file systems, network cards, the PCIe bus, stuck CPUs.

Pure: a message in, an error out. Kinds and codes are those of the coordinator's policy.toml.

    Out of memory: Killed process 7 (python) total-vm:...            oom-kill 2; before 5.0 "Kill process"
    Memory cgroup out of memory: Killed process 7 (python) ...       oom-kill 1
    mce: [Hardware Error]: Machine check events logged               machine-check 1
    mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400     2 if the bank says "uncorrected"
    mce: Uncorrected hardware memory error in user-access at 1a2b3c000          machine-check 2
    [Hardware Error]: Corrected error, no action required.           machine-check, AMD
    [Hardware Error]: CPU:3 (17:31:0) MC17_STATUS[Over|CE|MiscV|-|Scrub]: 0xdc2041000000011b     machine-check, AMD
    {1}[Hardware Error]:  Error 0, type: recoverable                 by the firmware: see `FirmwareErrors`
    EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 ...)    edac 1; "UE": 2
    EXT4-fs (sda1): Remounting filesystem read-only                  filesystem 1; "EXT4-fs error (device sda1): ": 2
    XFS (nvme0n1p1): Filesystem has been shut down due to log error (0x2).
    NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out    nic 1
    mlx5_core 0000:3b:00.0 eth0: TX timeout detected                 nic 1
    mlx5_core 0000:3b:00.0: device's health compromised - reached miss count                     nic 2
    mlx5_core 0000:3b:00.0: Health issue observed, firmware internal error, severity(3) ERROR:   nic 2; from 4 on nic 4
    ixgbe 0000:3b:00.0 eth0: Reset adapter                           nic 3
    pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, ...          pcie-aer 1
    nvme 0000:5e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, ... 3; "Non-Fatal": 2
    pci 0000:00:01.0: DPC: containment event, status:0x000d, ERR_FATAL received from 0000:02:00.0   3; also "EDR event"
    pcieport 0000:00:01.4: AER: device recovery failed               pcie-aer 4
    nvme nvme0: I/O 22 QID 4 timeout, aborting                       nvme 1; "reset controller": 2
    nvme nvme0: Disabling device after reset failure: -19            nvme 3
    critical medium error, dev nvme0n1, sector 4711 op 0x0:(READ)    nvme 4, also "I/O error" and "Buffer I/O error"
    INFO: task python:4711 blocked for more than 120 seconds.        hung-task 0; "blocked in I/O wait"
    INFO: task python:4711 is blocked on a mutex likely owned by task trainer:4712.              hung-task 1
    watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:7]    lockup 1; "Watchdog detected hard LOCKUP": 2

As in `xid`, a user must not be able to make the kernel print one of them, except where the policy never acts on the
node: the names in `oom-kill` and `hung-task` are users'. Each pattern holds from the first character, and needs more
words of the kernel than a process's name at the start has room for. Disks are those of the hardware: a user may have
the kernel mount an image of the user's own (a container's), but as a loop device.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from muster.daemon.node.kernel.kernel_record import KernelError, one_line

OOM_KILL, MACHINE_CHECK, EDAC, FILESYSTEM, NIC, AER, NVME, HUNG_TASK, LOCKUP = (
    *("oom-kill", "machine-check", "edac", "filesystem", "nic", "pcie-aer", "nvme", "hung-task", "lockup"),
)
"""The kinds of signals."""
_BDF = r"(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"
_DISK = r"(?P<device>(?:nvme\d{1,3}n\d{1,3}|(?:sd|vd|xvd)[a-z]{1,3}|md\d{1,4}|dm-\d{1,4})(?:p?\d{1,3})?)"
_MACHINE_CHECK_START = r"(?:mce: )?\[Hardware Error\]: "
_UNCORRECTED = 1 << 61
"""The bit UC of a bank's status (MCi_STATUS)."""


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL | re.ASCII)


_CARD = rf"[\w-]{{1,64}} {_BDF}"
_INTERFACE = r"[!-~]{1,15}"
_AER_ERROR = rf"{_CARD}: (?:AER: )?PCIe Bus Error: severity="
_PLACE = r"(?:\w{1,64}:\d+:(?:\(pid \d+\):)? )?"
"""Where in its source the driver is: only some kernels say it."""
_PORT = r"[\w-]{1,64} [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"
_NVME = r"nvme (?P<device>nvme\d{1,3}): "
_OPCODE = r"(?:\([\w /-]{1,40}\) |opcode 0x[0-9a-f]{1,4} ){0,3}"
"""Each kernel says it in another way: `(Read)`, `(c07b) opcode 0x2 (I/O Cmd)`, or nothing."""
_NVME_COMMAND = rf"{_NVME}I/O (?:tag )?\d{{1,10}} {_OPCODE}QID \d{{1,6}}"
_BLOCK_ERROR = r"(?:blk_update_request: |print_req_error: )?(?:I/O|critical (?:medium|target|nexus)) error, "
_NAMESPACE = r"(?P<device>nvme\d{1,3}n\d{1,3})"
_CODED: tuple[tuple[str, int, re.Pattern[str]], ...] = (
    (OOM_KILL, 1, _pattern(r"Memory cgroup out of memory: Kill(?:ed)? process \d+ \(")),
    (OOM_KILL, 2, _pattern(r"Out of memory: Kill(?:ed)? process \d+ \(")),
    (MACHINE_CHECK, 1, _pattern(rf"{_MACHINE_CHECK_START}Machine check events logged")),
    (MACHINE_CHECK, 2, _pattern(r"mce: Uncorrected hardware memory error in user-access at ")),
    (MACHINE_CHECK, 1, _pattern(rf"{_MACHINE_CHECK_START}(?:Corrected|Deferred) error, no action required")),
    (MACHINE_CHECK, 2, _pattern(rf"{_MACHINE_CHECK_START}Uncorrected, software ")),
    (FILESYSTEM, 1, _pattern(rf"EXT[234]-fs \({_DISK}\): Remounting filesystem read-only")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): Filesystem has been shut down")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): (?:Log |Metadata )?I/O Error (?:\(0x[0-9a-f]{{1,4}}\) )?[Dd]etected")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): Corruption of (?:in-memory data|on-disk metadata) ")),
    (FILESYSTEM, 1, _pattern(rf"BTRFS \w{{4,7}} \(device {_DISK}(?: state \w{{1,9}})?\): forced readonly")),
    (FILESYSTEM, 2, _pattern(rf"EXT[234]-fs error \(device {_DISK}\): ")),
    (FILESYSTEM, 2, _pattern(rf"XFS \({_DISK}\): (?:Metadata )?[Cc]orruption (?:detected|warning)")),
    (NIC, 1, _pattern(rf"NETDEV WATCHDOG: (?P<device>{_INTERFACE}) \([\w-]{{1,64}}\): transmit queue \d+ timed out")),
    (NIC, 1, _pattern(rf"{_CARD} {_INTERFACE}: NETDEV WATCHDOG: (?:CPU: \d+: )?transmit queue \d+ timed out")),
    (NIC, 1, _pattern(rf"{_CARD}(?: {_INTERFACE})?: TX timeout detected")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: {_PLACE}device's health compromised - reached")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: {_PLACE}Health issue observed, [^,\n]{{1,80}}, severity\([0-3]\)")),
    (NIC, 4, _pattern(rf"mlx5_core {_BDF}: {_PLACE}Health issue observed, [^,\n]{{1,80}}, severity\([4-7]\)")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: [^\n]{{0,200}}timeout\. Will cause a leak of a command resource")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: [^\n]{{0,200}}unrecoverable hardware error")),
    (NIC, 3, _pattern(rf"{_CARD} {_INTERFACE}: Reset adapter")),
    (AER, 1, _pattern(rf"{_AER_ERROR}Correct(?:ed|able), ")),
    (AER, 2, _pattern(rf"{_AER_ERROR}Uncorrect(?:ed|able) \(Non-Fatal\), ")),
    (AER, 3, _pattern(rf"{_AER_ERROR}Uncorrect(?:ed|able) \(Fatal\), ")),
    (AER, 3, _pattern(rf"{_PORT}: DPC: containment event, [^\n]{{1,100}} received from {_BDF}")),
    (AER, 3, _pattern(rf"{_CARD}: DPC: containment event, ")),
    (AER, 3, _pattern(rf"{_CARD}: EDR: EDR event received")),
    (AER, 4, _pattern(rf"{_CARD}: AER: [Dd]evice recovery failed")),
    (NVME, 1, _pattern(rf"{_NVME_COMMAND} timeout, (?:aborting|completion polled)")),
    (NVME, 2, _pattern(rf"{_NVME_COMMAND} timeout, (?:reset|disable) controller")),
    (NVME, 2, _pattern(rf"{_NVME}controller is down; will reset: ")),
    (NVME, 3, _pattern(rf"{_NVME}(?:Disabling device|Removing) after (?:reset|probe) failure")),
    (NVME, 4, _pattern(rf"Buffer I/O error on dev {_NAMESPACE}(?:p\d{{1,3}})?, logical block \d")),
    (NVME, 4, _pattern(rf"{_BLOCK_ERROR}dev {_NAMESPACE}, sector \d")),
    (HUNG_TASK, 0, _pattern(r"INFO: task .{0,64}:\d+ blocked (?:in I/O wait )?for more than \d+ seconds")),
    (HUNG_TASK, 1, _pattern(r"INFO: task .{0,64}:\d+ .{0,20}blocked on an? [\w-]{1,20} likely ")),
    (LOCKUP, 1, _pattern(r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#(?P<device>\d{1,5}) stuck for \d+s!")),
    (LOCKUP, 2, _pattern(r"(?:NMI )?watchdog: (?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu (?P<device>\d{1,5})")),
)
"""Kind, code, and how the message begins. The first one that matches counts."""
_BANK = _pattern(
    rf"{_MACHINE_CHECK_START}CPU (?P<cpu>\d{{1,5}}): Machine Check(?: Exception)?: "
    r"[0-9a-f]{1,16} Bank \d{1,3}: (?P<status>[0-9a-f]{16})"
)
_AMD_BANK = _pattern(
    r"\[Hardware Error\]: CPU:(?P<cpu>\d{1,5}) \([0-9a-f:]{1,20}\) MC\d{1,3}_STATUS\[[^\]\n]{1,120}\]: "
    r"0x(?P<status>[0-9a-f]{16})"
)
_EDAC = _pattern(
    r"EDAC MC(?P<controller>\d{1,3}): (?:\d{1,9} )?(?P<class>[CU]E) "
    r"(?:[\w/ ,-]{1,200} )?on [^()=\n]{1,200} \((?:\w{1,20}:|\w{1,20} )"
)
"""No `=` before the parenthesis: a process may be named "EDAC MC0: UE on", and the kernel goes on with " cpuset=" and a
name that is the user's, too."""


def host_error(message: str) -> KernelError | None:
    """The error of which a whole message of the kernel tells; None: no error of the host."""
    for start, read in _READERS:
        if message.startswith(start) and (error := read(message)):
            return error
    if ": PCIe Bus Error: " in message[:_PREFIX_CHARS] or _of_card(message):
        return _coded(message)
    return None


_PREFIX_CHARS = 160
"""The name of a driver and a PCI address end well before."""
_CARD_WORDS = (
    *("TX timeout detected", "Reset adapter", "NETDEV WATCHDOG: ", ": DPC: containment", ": EDR: EDR event"),
    ": AER: device recovery failed",
    ": AER: Device recovery failed",
)


def _of_card(message: str) -> bool:
    return any(words in message[:_PREFIX_CHARS] for words in _CARD_WORDS)


def _coded(message: str) -> KernelError | None:
    for kind, code, pattern in _CODED:
        if found := pattern.match(message):
            device = (found.groupdict().get("device") or "").lower()
            return KernelError(kind, code, f"cpu{device}" if kind == LOCKUP else device, one_line(message))
    return None


def _machine_check(message: str) -> KernelError | None:
    if found := _BANK.match(message) or _AMD_BANK.match(message):
        code = 2 if int(found["status"], 16) & _UNCORRECTED else 1
        return KernelError(MACHINE_CHECK, code, f"cpu{found['cpu']}", one_line(message))
    return _coded(message)


def _edac(message: str) -> KernelError | None:
    if found := _EDAC.match(message):
        code = 1 if found["class"] == "CE" else 2
        return KernelError(EDAC, code, f"mc{found['controller']}", one_line(message))
    return None


_READERS: tuple[tuple[str | tuple[str, ...], Callable[[str], KernelError | None]], ...] = (
    (("mce: ", "[Hardware Error]: "), _machine_check),
    ("EDAC MC", _edac),
    (
        (
            *("Out of memory: ", "Memory cgroup out of memory: ", "EXT", "XFS (", "BTRFS ", "NETDEV WATCHDOG: "),
            *(
                "mlx5_core ",
                "nvme nvme",
                "Buffer I/O error",
                "blk_update_request: ",
                "print_req_error: ",
                "I/O error, ",
            ),
            *("critical ", "INFO: task ", "watchdog: ", "NMI watchdog: ", "BUG: soft lockup"),
        ),
        _coded,
    ),
)
"""How a message of each family begins, and what reads it. Nearly all messages have none of these starts."""

_REPORT_START = r"(?P<report>\{\d{1,9}\})\[Hardware Error\]: "
_SEVERITY = re.compile(_REPORT_START + r" {0,8}Error \d{1,5}, type: (?P<severity>corrected|recoverable|fatal)")
_SECTION = re.compile(_REPORT_START + r" {0,8}section[_ ]type: (?P<section>\w.{0,80})")
_FIRMWARE_CODES = {
    MACHINE_CHECK: {"corrected": 1, "recoverable": 2, "fatal": 2},
    AER: {"corrected": 1, "recoverable": 2, "fatal": 3},
}
"""The codes of what the firmware reports, by severity."""


class FirmwareErrors:
    r"""Reads what a server's firmware reports (APEI), in several lines of the kernel log, message after message.

        {1}[Hardware Error]: event severity: recoverable                 of all sections together
        {1}[Hardware Error]:  Error 0, type: recoverable                 of the section that follows
        {1}[Hardware Error]:   section_type: PCIe error                  pcie-aer; every other section: machine-check

    A section alone says what has failed: an error of a network card is no error of the memory. A report without a
    number in front (`[Hardware Error]: event severity: fatal`) is that of an earlier boot (BERT): the node has been
    started again since, so it counts for nothing.
    """

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
        return KernelError(kind, _FIRMWARE_CODES[kind][self._severity], "", text)
