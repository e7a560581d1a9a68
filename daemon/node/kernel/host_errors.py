r"""Reads what the kernel says of the host: memory, disks, file systems, network cards, the PCIe bus, stuck CPUs.

Pure: a message in, an error out. Kinds and codes are those of the coordinator's policy.toml.

    Out of memory: Killed process 7 (python) total-vm:...            oom-kill 2; before 5.0 "Kill process"
    Memory cgroup out of memory: Killed process 7 (python) ...       oom-kill 1
    mce: [Hardware Error]: Machine check events logged               machine-check 1
    mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400     2 if the bank says "uncorrected"
    mce: Uncorrected hardware memory error in user-access at 1a2b3c000          machine-check 2
    Memory failure: 0x12ab34: Sending SIGBUS to python:7 due to hardware memory corruption      machine-check 2
    [Hardware Error]: Corrected error, no action required.           machine-check, AMD; also "System Fatal error."
    [Hardware Error]: CPU:3 (17:31:0) MC17_STATUS[Over|CE|MiscV|-|Scrub]: 0xdc2041000000011b     machine-check, AMD
    {1}[Hardware Error]:  Error 0, type: recoverable                 by the firmware: see `FirmwareErrors`
    EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 ...)    edac 1; "UE": 2
    EXT4-fs (sda1): Remounting filesystem read-only                  filesystem 1; "EXT4-fs error (device sda1): ": 2
    XFS (nvme0n1p1): Filesystem has been shut down due to log error (0x2).
    NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out    nic 1
    mlx5_core 0000:3b:00.0 eth0: TX timeout detected                 nic 1
    mlx5_core 0000:3b:00.0: device's health compromised - reached miss count                     nic 2; "Fatal error 3"
    bnxt_en 0000:3b:00.0 eth0: Firmware fatal reset event received   nic 2; "non-fatal": nic 3
    mlx5_core 0000:3b:00.0: Health issue observed, firmware internal error, severity(3) ERROR:   nic 2; from 4 on nic 4
    ixgbe 0000:3b:00.0 eth0: Reset adapter                           nic 3
    pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, ...          pcie-aer 1
    nvme 0000:5e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, ... 3; "Non-Fatal": 2
    pci 0000:00:01.0: DPC: containment event, status:0x000d, ERR_FATAL received from 0000:02:00.0   3; also "EDR event"
    pcieport 0000:00:01.4: DPC: containment event, status:0x1f05 source:0x0200     3, of the device 02:00.0
    pcieport 0000:00:01.4: AER: Uncorrected (Fatal) error received: 0000:02:00.0   3: the device may not answer any more
    pcieport 0000:00:01.4: AER: device recovery failed               pcie-aer 4
    nvme nvme0: I/O 22 QID 4 timeout, aborting                       nvme 1; "reset controller": 2
    nvme nvme0: frozen state error detected, reset controller        nvme 2; also "Device not ready; aborting reset"
    nvme nvme0: Disabling device after reset failure: -19            nvme 3; also "failed state error detected"
    critical medium error, dev nvme0n1, sector 4711 op 0x0:(READ)    nvme 4, also "I/O error" and "Buffer I/O error"
    INFO: task python:4711 blocked for more than 120 seconds.        hung-task 0; "blocked in I/O wait"
    INFO: task python:4711 is blocked on a mutex likely owned by task trainer:4712.              hung-task 1
    watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:7]    lockup 1; "Watchdog detected hard LOCKUP": 2
    rcu: INFO: rcu_preempt self-detected stall on CPU                lockup 3; also "detected stalls on CPUs/tasks"

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
_ANY_BDF = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"
_BDF = rf"(?P<device>{_ANY_BDF})"
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
_PORT = rf"[\w-]{{1,64}} {_ANY_BDF}"
_RECEIVED = rf"error (?:message )?received(?: from|:) (?:{_BDF})?"
_NVME = r"nvme (?P<device>nvme\d{1,3}): "
_OPCODE = r"(?:\([\w /-]{1,40}\) |opcode 0x[0-9a-f]{1,4} ){0,3}"
"""Each kernel says it in another way: `(Read)`, `(c07b) opcode 0x2 (I/O Cmd)`, or nothing."""
_NVME_COMMAND = rf"{_NVME}I/O (?:tag )?\d{{1,10}} {_OPCODE}QID \d{{1,6}}"
_BLOCK_ERROR = r"(?:blk_update_request: |print_req_error: )?(?:I/O|critical (?:medium|target|nexus)|protection) error, "
"""Not of a discard (operation 3 or 5) or of zeroes to be written (9): a healthy disk refuses what it does not know."""
_NAMESPACE = r"(?P<device>nvme\d{1,3}(?:c\d{1,3})?n\d{1,3})"
_NVME_IO = rf"{_NAMESPACE}: (?:Read|Write)\(0x[0-9a-f]{{1,2}}\) @ LBA \d+"
_CODED: tuple[tuple[str, int, re.Pattern[str]], ...] = (
    (OOM_KILL, 1, _pattern(r"Memory cgroup out of memory: Kill(?:ed)? process \d+ \(")),
    (OOM_KILL, 2, _pattern(r"Out of memory: Kill(?:ed)? process \d+ \(")),
    (MACHINE_CHECK, 1, _pattern(rf"{_MACHINE_CHECK_START}Machine check events logged")),
    (MACHINE_CHECK, 2, _pattern(r"mce: Uncorrected hardware memory error in (?:user|kernel)-access at ")),
    (
        MACHINE_CHECK,
        2,
        _pattern(
            r"Memory failure: 0x[0-9a-f]{1,16}: "
            r"(?:Sending SIGBUS to|Killing|forcibly killing) .{0,64}:\d+ (?:due to |because of failure to unmap )"
        ),
    ),
    (MACHINE_CHECK, 2, _pattern(rf"{_MACHINE_CHECK_START}Machine check: ")),
    (MACHINE_CHECK, 1, _pattern(rf"{_MACHINE_CHECK_START}(?:Corrected|Deferred) error, no action required")),
    (MACHINE_CHECK, 2, _pattern(rf"{_MACHINE_CHECK_START}(?:Uncorrected, software |System Fatal error)")),
    (FILESYSTEM, 1, _pattern(rf"EXT[234]-fs \({_DISK}\): Remounting filesystem read-only")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): Filesystem has been shut down")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): (?:Log |Metadata )?I/O Error (?:\(0x[0-9a-f]{{1,4}}\) )?[Dd]etected")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): Corruption of (?:in-memory data|on-disk metadata) ")),
    (FILESYSTEM, 1, _pattern(rf"BTRFS \w{{4,7}} \(device {_DISK}(?: state \w{{1,9}})?\): forced readonly")),
    (FILESYSTEM, 1, _pattern(rf"XFS \({_DISK}\): log I/O error -\d")),
    (FILESYSTEM, 2, _pattern(rf"XFS \({_DISK}\): metadata I/O error in ")),
    (FILESYSTEM, 1, _pattern(r"md/raid0:?(?P<device>md\d{1,4}): Disk failure on ")),
    (FILESYSTEM, 2, _pattern(r"md/raid\d{1,2}:(?P<device>md\d{1,4}): Disk failure on ")),
    (FILESYSTEM, 2, _pattern(rf"EXT[234]-fs error \(device {_DISK}\)(?:: | in )")),
    (FILESYSTEM, 2, _pattern(rf"EXT[234]-fs \({_DISK}\): I/O error while writing superblock")),
    (FILESYSTEM, 2, _pattern(rf"XFS \({_DISK}\): (?:Metadata )?[Cc]orruption (?:detected|warning)")),
    (NIC, 1, _pattern(rf"NETDEV WATCHDOG: (?P<device>{_INTERFACE}) \([\w-]{{1,64}}\): transmit queue \d+ timed out")),
    (NIC, 1, _pattern(rf"{_CARD} {_INTERFACE}: NETDEV WATCHDOG: (?:CPU: \d+: )?transmit queue \d+ timed out")),
    (NIC, 1, _pattern(rf"{_CARD}(?: {_INTERFACE})?: TX timeout detected")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: {_PLACE}device's health compromised")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: {_PLACE}(?:Fatal error \d+ detected|PCI slot is unavailable)")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: {_PLACE}(?:handling bad device here|health recovery flow aborted)")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: {_PLACE}Health issue observed, [^,]{{1,80}}, severity\([0-3]\)")),
    (NIC, 4, _pattern(rf"mlx5_core {_BDF}: {_PLACE}Health issue observed, [^,]{{1,80}}, severity\([4-7]\)")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: [^\n]{{0,200}}timeout\. Will cause a leak of a command resource")),
    (NIC, 2, _pattern(rf"mlx5_core {_BDF}: [^\n]{{0,200}}unrecoverable hardware error")),
    (NIC, 4, _pattern(rf"mlx5_core {_BDF}: {_PLACE}High temperature on sensors ")),
    (NIC, 4, _pattern(rf"mlx5_core {_BDF}: {_PLACE}Port module event\[error\]: module \d+, Cable error, High Temp")),
    (NIC, 4, _pattern(rf"mlx5_core {_BDF}: {_PLACE}Detected insufficient power on the PCIe slot")),
    (NIC, 1, _pattern(rf"{_CARD} {_INTERFACE}: TX timeout on queue: \d")),
    (NIC, 1, _pattern(rf"{_CARD}(?: {_INTERFACE})?: Keep alive watchdog timeout")),
    (NIC, 1, _pattern(rf"{_CARD} {_INTERFACE}: The number of lost tx completions is above the threshold")),
    (NIC, 1, _pattern(rf"{_CARD}(?: {_INTERFACE})?: Detected (?:Tx|Hardware) Unit Hang")),
    (NIC, 3, _pattern(rf"{_CARD}(?: {_INTERFACE})?: TX driver issue detected, ")),
    (NIC, 2, _pattern(rf"{_CARD} {_INTERFACE}: (?:Firmware fatal|Fatal firmware) reset event")),
    (NIC, 3, _pattern(rf"{_CARD} {_INTERFACE}: (?:Firmware non-fatal|Non-fatal firmware) reset event")),
    (NIC, 3, _pattern(rf"{_CARD} {_INTERFACE}: Reset adapter")),
    (AER, 1, _pattern(rf"{_AER_ERROR}Correct(?:ed|able), ")),
    (AER, 2, _pattern(rf"{_AER_ERROR}Uncorrect(?:ed|able) \(Non-Fatal\), ")),
    (AER, 3, _pattern(rf"{_AER_ERROR}Uncorrect(?:ed|able) \(Fatal\), ")),
    (AER, 3, _pattern(rf"{_CARD}: EDR: EDR event received")),
    (AER, 2, _pattern(rf"{_PORT}: AER: (?:Multiple )?Uncorrect(?:ed|able) \(Non-Fatal\) {_RECEIVED}")),
    (AER, 3, _pattern(rf"{_PORT}: AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) {_RECEIVED}")),
    (AER, 4, _pattern(rf"{_CARD}: (?:AER: )?[Dd]evice recovery failed")),
    (NVME, 1, _pattern(rf"{_NVME_COMMAND} timeout, (?:aborting|completion polled)")),
    (NVME, 2, _pattern(rf"{_NVME_COMMAND} timeout, (?:reset|disable) controller")),
    (NVME, 2, _pattern(rf"{_NVME}controller is down; will reset: ")),
    (NVME, 2, _pattern(rf"{_NVME}frozen state error detected, reset controller")),
    (NVME, 2, _pattern(rf"{_NVME}Device not ready; aborting (?:reset|initiali[sz]ation)")),
    (NVME, 2, _pattern(rf"{_NVME}resetting controller due to (?:AER|persistent internal error)")),
    (NVME, 3, _pattern(rf"{_NVME}(?:Disabling device|Removing) after (?:reset|probe) failure")),
    (NVME, 3, _pattern(rf"{_NVME}failed state error detected, request disconnect")),
    (NVME, 4, _pattern(rf"{_NVME_IO}, [^\n]{{1,80}} \(sct 0x2 / sc 0x8[0-4]\)")),
    (NVME, 4, _pattern(rf"Buffer I/O error on dev(?:ice)? {_NAMESPACE}(?:p\d{{1,3}})?, logical block \d")),
    (NVME, 4, _pattern(rf"{_BLOCK_ERROR}dev {_NAMESPACE}, sector \d+\b(?! op 0x[359]:)")),
    (HUNG_TASK, 0, _pattern(r"INFO: task .{0,64}:\d+ blocked (?:in I/O wait )?for more than \d+ seconds")),
    (HUNG_TASK, 1, _pattern(r"INFO: task .{0,64}:\d+ .{0,20}blocked on an? [\w-]{1,20}(?: likely |, but the )")),
    (LOCKUP, 1, _pattern(r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#(?P<device>\d{1,5}) stuck for \d+s!")),
    (
        LOCKUP,
        3,
        _pattern(r"(?:rcu: )?INFO: rcu_\w{1,20} (?:self-detected stall on CPU|detected (?:expedited )?stalls on CPUs)"),
    ),
    (LOCKUP, 2, _pattern(r"(?:NMI )?watchdog: (?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu (?P<device>\d{1,5})")),
)
"""Kind, code, and how the message begins. The first one that matches counts."""
_BANK = _pattern(
    rf"{_MACHINE_CHECK_START}CPU (?P<cpu>\d{{1,5}}): Machine Check(?: Exception)?: "
    r"[0-9a-f]{1,16} Bank \d{1,3}: (?P<status>[0-9a-f]{16})"
)
_CARD_START = _pattern(rf"{_CARD}(?: {_INTERFACE})?: ")
_DPC = _pattern(
    rf"{_CARD}: DPC:? containment event, status:0x(?P<status>[0-9a-f]{{4}})"
    rf"(?: source:0x(?P<source>[0-9a-f]{{4}})|, [^\n]{{1,40}} received from (?P<below>{_ANY_BDF}))?"
)
_DPC_OF_DEVICE, _DPC_OTHER = (1, 2), 3
"""Reasons in the status of a port (DPC Trigger Reason): a device below has sent an error, whose address the port says;
and one that is told in two further bits."""
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
    return _of_card(message) if _CARD_START.match(message) else None


def _coded(message: str) -> KernelError | None:
    for kind, code, pattern in _CODED:
        if found := pattern.match(message):
            device = (found.groupdict().get("device") or "").lower()
            return KernelError(kind, code, f"cpu{device}" if device and kind == LOCKUP else device, one_line(message))
    return None


def _of_card(message: str) -> KernelError | None:
    if (found := _DPC.match(message)) is None:
        return _coded(message)
    status, source, port = int(found["status"], 16), int(found["source"] or "0", 16), found["device"].lower()
    reason = status >> 1 & 3
    if reason == _DPC_OTHER and status >> 5 & 3 == 1:
        return None  # a program asked for it
    if reason in _DPC_OF_DEVICE and source:
        port = f"{port.partition(':')[0]}:{source >> 8:02x}:{source >> 3 & 31:02x}.{source & 7}"
    return KernelError(AER, 3, found["below"] or port, one_line(message))


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
    (("mce: ", "[Hardware Error]: ", "Memory failure: "), _machine_check),
    ("EDAC MC", _edac),
    (
        (
            *("Out of memory: ", "Memory cgroup out of memory: ", "EXT", "XFS (", "BTRFS ", "NETDEV WATCHDOG: "),
            *(
                "mlx5_core ",
                "nvme",
                "Buffer I/O error",
                "blk_update_request: ",
                "print_req_error: ",
                "I/O error, ",
            ),
            *("critical ", "INFO: task ", "watchdog: ", "NMI watchdog: ", "BUG: soft lockup"),
            *("INFO: rcu_", "rcu: INFO: rcu_", "protection error, ", "md/raid"),
        ),
        _coded,
    ),
)
"""How a message of each family begins, and what reads it. Nearly all messages have none of these starts."""

_REPORT_START = r"(?P<report>\{\d{1,9}\})\[Hardware Error\]: "
_SEVERITY = re.compile(_REPORT_START + r" {0,8}Error \d{1,5}, type: (?P<severity>corrected|recoverable|fatal)")
_SECTION = re.compile(_REPORT_START + r" {0,8}section[_ ]type: (?P<section>\w.{0,80})")
_OTHER_PART = 3
"""The code of an error in a part that the firmware does not name, or only its vendor knows."""
_MEMORY_OR_CPU = ("memory", "platform memory", "general processor", "IA32/X64 processor", "ARM processor")
_FIRMWARE_CODES = {
    MACHINE_CHECK: {"corrected": 1, "recoverable": 2, "fatal": 2},
    AER: {"corrected": 1, "recoverable": 2, "fatal": 3},
}
"""The codes of what the firmware reports, by severity."""


class FirmwareErrors:
    r"""Reads what a server's firmware reports (APEI), in several lines of the kernel log, message after message.

        {1}[Hardware Error]: event severity: recoverable                 of all sections together
        {1}[Hardware Error]:  Error 0, type: recoverable                 of the section that follows
        {1}[Hardware Error]:   section_type: PCIe error                  pcie-aer; also "CXL Protocol Error"
        {1}[Hardware Error]:   section_type: memory error                machine-check; so are those of a processor
        {1}[Hardware Error]:   section type: unknown, 6d5244f2-...       machine-check 3; if it was corrected, nothing

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
        self._report, section = "", found["section"]
        kind = AER if section.startswith(("PCIe", "CXL")) else MACHINE_CHECK
        code = _FIRMWARE_CODES[kind][self._severity]
        if kind == MACHINE_CHECK and not section.startswith(_MEMORY_OR_CPU):
            code = _OTHER_PART
        text = one_line(f"[Hardware Error]: {self._severity}, section_type: {section}")
        return KernelError(kind, code, "", text) if (code, self._severity) != (_OTHER_PART, "corrected") else None
