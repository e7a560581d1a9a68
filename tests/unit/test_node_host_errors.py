"""What the kernel says of the host, as printed by kernels since about 2012."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.kernel.kernel_record import KernelError, KernelRecord
from muster.daemon.node.kernel.xid import KernelErrorParser
from muster.launcher.policy.replay import Replay

POLICY = Policy.load()
BDF = "0000:3b:00.0"
AER = f"pcieport {BDF}: PCIe Bus Error: severity="


def _parsed(message: str) -> KernelError | None:
    return KernelErrorParser().parse(KernelRecord(0, 3, 1, False, message))


MESSAGES = [
    ("Memory cgroup out of memory: Killed process 7 (python) total-vm:8kB, anon-rss:0kB, UID:1000", "oom-kill", 1, ""),
    ("Memory cgroup out of memory: Kill process 7 (python) score 1970 or sacrifice child", "oom-kill", 1, ""),
    ("Out of memory: Killed process 7 (a)b\n) total-vm:8kB, anon-rss:0kB", "oom-kill", 2, ""),
    ("Out of memory: Kill process 7 (python) score 900 or sacrifice child", "oom-kill", 2, ""),
    ("mce: [Hardware Error]: Machine check events logged", "machine-check", 1, ""),
    ("[Hardware Error]: Machine check events logged", "machine-check", 1, ""),
    ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: 8c00004000010090", "machine-check", 1, "cpu3"),
    ("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: b200000000070f0f", "machine-check", 2, "cpu3"),
    ("mce: Uncorrected hardware memory error in user-access at 1a2b3c000", "machine-check", 2, ""),
    ("Memory failure: 0x12ab34: Sending SIGBUS to a:7 due to hardware memory corruption", "machine-check", 2, ""),
    ("Memory failure: 0x12ab34: Killing a:7 due to hardware memory corruption", "machine-check", 2, ""),
    (
        "Memory failure: 0x12ab34: forcibly killing a:7 because of failure to unmap corrupted page",
        *("machine-check", 2, ""),
    ),
    ("mce: [Hardware Error]: Machine check: Processor context corrupt", "machine-check", 2, ""),
    ("[Hardware Error]: System Fatal error.", "machine-check", 2, ""),
    ("[Hardware Error]: Deferred error, no action required.", "machine-check", 1, ""),
    ("[Hardware Error]: Corrected error, no action required.", "machine-check", 1, ""),
    ("[Hardware Error]: Uncorrected, software restartable error.", "machine-check", 2, ""),
    (
        "[Hardware Error]: CPU:3 (17:31:0) MC17_STATUS[Over|CE|MiscV|-|SyndV|CECC|Scrub]: 0xdc2041000000011b",
        *("machine-check", 1, "cpu3"),
    ),
    ("[Hardware Error]: CPU:0 (15:2:0) MC4_STATUS[-|UE|MiscV|PCC]: 0xbe00000000080a13", "machine-check", 2, "cpu0"),
    (
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1)",
        "edac",
        1,
        "mc0",
    ),
    ("EDAC MC12: 3 UE on mc#12csrow#0channel#0 (csrow:0 channel:0 page:0x0)", "edac", 2, "mc12"),
    ("EDAC MC0: 1 CE Cannot decode normalized address on unknown memory (csrow:0 channel:1)", "edac", 1, "mc0"),
    ("EXT4-fs (sda1): Remounting filesystem read-only", "filesystem", 1, "sda1"),
    ("EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "filesystem", 1, "nvme0n1p2"),
    ("XFS (dm-0): Log I/O Error (0x2) detected at xlog_ioend_work+0x58.", "filesystem", 1, "dm-0"),
    ("XFS (md127): Corruption of in-memory data detected.  Shutting down filesystem", "filesystem", 1, "md127"),
    ("XFS (sdb): Filesystem has been shut down due to log error (0x2).", "filesystem", 1, "sdb"),
    ("XFS (dm-0): log I/O error -5", "filesystem", 1, "dm-0"),
    ("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.", "filesystem", 1, "md0"),
    ("md/raid1:md127: Disk failure on nvme0n1p1, disabling device.", "filesystem", 2, "md127"),
    ("EXT4-fs error (device sda1) in ext4_do_update_inode:5123: Journal has aborted", "filesystem", 2, "sda1"),
    ("EXT4-fs (dm-0): I/O error while writing superblock", "filesystem", 2, "dm-0"),
    ('XFS (dm-0): metadata I/O error in "xfs_imap_to_bp+0x4c/0x70" at daddr 0x1', "filesystem", 2, "dm-0"),
    ("BTRFS info (device sda1 state EA): forced readonly", "filesystem", 1, "sda1"),
    ("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls: reading", "filesystem", 2, "sda1"),
    ("XFS (sda1): Metadata corruption detected at xfs_agi_verify+0x5d", "filesystem", 2, "sda1"),
    ("NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out", "nic", 1, "eth0"),
    (f"ixgbe {BDF} eth0: NETDEV WATCHDOG: CPU: 1: transmit queue 3 timed out 5000 ms", "nic", 1, BDF),
    (f"mlx5_core {BDF} eth0: TX timeout detected", "nic", 1, BDF),
    (f"mlx5_core {BDF}: poll_health:801:(pid 0): device's health compromised - reached miss count", "nic", 2, BDF),
    (f"mlx5_core {BDF} eth0: TX timeout on queue: 0, SQ: 0x4e, CQ: 0x4, SQ Cons: 0x0", "nic", 1, BDF),
    (f"bnxt_en {BDF} eth0: TX timeout detected, starting reset task!", "nic", 1, BDF),
    (f"ena {BDF} ens5: Keep alive watchdog timeout.", "nic", 1, BDF),
    (f"ena {BDF}: Keep alive watchdog timeout.", "nic", 1, BDF),
    (f"ena {BDF} ens5: The number of lost tx completions is above the threshold (129 > 128). Reset", "nic", 1, BDF),
    (f"ixgbe {BDF} eth0: Detected Tx Unit Hang", "nic", 1, BDF),
    (f"e1000e {BDF} eth0: Detected Hardware Unit Hang:", "nic", 1, BDF),
    (f"i40e {BDF}: TX driver issue detected, PF reset issued", "nic", 3, BDF),
    (f"bnxt_en {BDF} eth0: Firmware fatal reset event received", "nic", 2, BDF),
    (f"bnxt_en {BDF} eth0: Firmware fatal reset event, data1: 0x1, data2: 0x0, min wait 0 ms", "nic", 2, BDF),
    (f"bnxt_en {BDF} eth0: Fatal firmware reset event, data1: 0x2, data2: 0x0, min wait 0 ms", "nic", 2, BDF),
    (f"bnxt_en {BDF} eth0: Non-fatal firmware reset event, data1: 0x1, data2: 0x4, min wait 0 ms", "nic", 3, BDF),
    (f"bnxt_en {BDF} eth0: Firmware non-fatal reset event received, max wait time 100 msec", "nic", 3, BDF),
    (f"mlx5_core {BDF}: device's health compromised", "nic", 2, BDF),
    (f"mlx5_core {BDF}: poll_health:816:(pid 0): Fatal error 3 detected", "nic", 2, BDF),
    (f"mlx5_core {BDF}: print_health_info:411:(pid 0): PCI slot is unavailable", "nic", 2, BDF),
    (f"mlx5_core {BDF}: health_care:154:(pid 9): handling bad device here", "nic", 2, BDF),
    (
        f"mlx5_core {BDF}: print_health_info:425:(pid 0): Health issue observed, HW fatal error\n, severity(3) ERROR:",
        *("nic", 2, BDF),
    ),
    (f"mlx5_core {BDF}: temp_warn:156:(pid 0): High temperature on sensors with bit set 0 1", "nic", 4, BDF),
    (f"mlx5_core {BDF}: Port module event[error]: module 0, Cable error, High Temperature", "nic", 4, BDF),
    (
        f"mlx5_core {BDF}: mlx5_pcie_event:299:(pid 2): Detected insufficient power on the PCIe slot (27W).",
        *("nic", 4, BDF),
    ),
    (f"mlx5_core {BDF}: poll_health:174: device's health compromised - reached miss count.", "nic", 2, BDF),
    *(
        (f"mlx5_core {BDF}: {place}Health issue observed, {what}, severity({severity}) WORD:", "nic", code, BDF)
        for place in ("", "print_health_info:425:(pid 912): ", "print_health_info:425: ")
        for what, severity, code in (
            *(("firmware internal error", 3, 2), ("unrecoverable hardware error", 0, 2)),
            *(("High temperature", 4, 4), ("unrecoverable hardware error", 5, 4)),
        )
    ),
    (
        f"mlx5_core {BDF}: wait_func:1157:(pid 7): ACCESS_REG(0x805) timeout. Will cause a leak of a command resource",
        *("nic", 2, BDF),
    ),
    (f"e1000e {BDF} eth0: Reset adapter unexpectedly", "nic", 3, BDF),
    (AER + "Corrected, type=Physical Layer, (Receiver ID)", "pcie-aer", 1, BDF),
    (AER + "Correctable, type=Data Link Layer, (Transmitter ID)", "pcie-aer", 1, BDF),
    (AER.replace("PCIe", "AER: PCIe") + "Corrected, type=Physical Layer, id=0018(Receiver ID)", "pcie-aer", 1, BDF),
    (AER + "Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)", "pcie-aer", 2, BDF),
    (AER + "Uncorrectable (Fatal), type=Transaction Layer, (Receiver ID)", "pcie-aer", 3, BDF),
    ("pcieport 0000:00:01.4: DPC: containment event, status:0x1f01 source:0x0000", "pcie-aer", 3, "0000:00:01.4"),
    (
        f"pci 0000:00:01.0: DPC: containment event, status:0x000d, ERR_FATAL received from {BDF}",
        *("pcie-aer", 3, BDF),
    ),
    ("pcieport 0000:00:01.4: DPC containment event, status:0x1f01 source:0x0000", "pcie-aer", 3, "0000:00:01.4"),
    ("pcieport 0001:00:01.4: DPC: containment event, status:0x1f03 source:0x3b09", "pcie-aer", 3, "0001:3b:01.1"),
    (
        "pci 0000:00:01.0: DPC: containment event, status:0x0009: unmasked uncorrectable error detected",
        *("pcie-aer", 3, "0000:00:01.0"),
    ),
    (f"pcieport 0000:00:01.4: AER: Uncorrected (Fatal) error received: {BDF}", "pcie-aer", 3, BDF),
    (f"pcieport 0000:00:01.4: AER: Uncorrectable (Fatal) error message received from {BDF}", "pcie-aer", 3, BDF),
    ("pcieport 0000:00:01.4: AER: Multiple Uncorrected (Non-Fatal) error received: id=0018", "pcie-aer", 2, ""),
    (f"mlx5_core {BDF}: device recovery failed", "pcie-aer", 4, BDF),
    ("pcieport 0000:30:03.0: EDR: EDR event received", "pcie-aer", 3, "0000:30:03.0"),
    ("pcieport 0000:00:01.4: AER: device recovery failed", "pcie-aer", 4, "0000:00:01.4"),
    ("pcieport 0000:00:01.4: AER: Device recovery failed", "pcie-aer", 4, "0000:00:01.4"),
    *(
        (f"nvme nvme0: I/O {command} QID 4 timeout, {end}", "nvme", code, "nvme0")
        for command in ("22", "258 (I/O Cmd)", "0 (Admin Cmd)", "tag 123 (c07b) opcode 0x2 (Read)", "tag 123 (c07b)")
        for end, code in (("aborting", 1), ("completion polled", 1), ("reset controller", 2), ("disable controller", 2))
    ),
    ("nvme nvme0: I/O tag 123 (c07b) opcode 0x2 (I/O Cmd) QID 4 timeout, aborting req_op:READ(0)", "nvme", 1, "nvme0"),
    ("nvme nvme1: I/O 22 QID 0 timeout, reset controller", "nvme", 2, "nvme1"),
    ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10", "nvme", 2, "nvme0"),
    ("nvme nvme0: Disabling device after reset failure: -19", "nvme", 3, "nvme0"),
    ("nvme nvme0: frozen state error detected, reset controller", "nvme", 2, "nvme0"),
    ("nvme nvme0: Device not ready; aborting reset, CSTS=0x1", "nvme", 2, "nvme0"),
    ("nvme nvme0: Device not ready; aborting initialisation, CSTS=0x0", "nvme", 2, "nvme0"),
    ("nvme nvme0: resetting controller due to persistent internal error", "nvme", 2, "nvme0"),
    ("nvme nvme0: failed state error detected, request disconnect", "nvme", 3, "nvme0"),
    ("nvme nvme0: Removing after probe failure status: -19", "nvme", 3, "nvme0"),
    ("nvme0n1: Read(0x2) @ LBA 1234, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR", "nvme", 4, "nvme0n1"),
    ("Buffer I/O error on device nvme0n1p1, logical block 0", "nvme", 4, "nvme0n1"),
    ("I/O error, dev nvme0c0n1, sector 4711 op 0x0:(READ) flags 0x0", "nvme", 4, "nvme0c0n1"),
    ("protection error, dev nvme0n1, sector 4711 op 0x0:(READ) flags 0x0", "nvme", 4, "nvme0n1"),
    ("Buffer I/O error on dev nvme0n1p1, logical block 3, async page read", "nvme", 4, "nvme0n1"),
    ("blk_update_request: I/O error, dev nvme0n1, sector 4711", "nvme", 4, "nvme0n1"),
    ("critical medium error, dev nvme0n1, sector 4711 op 0x0:(READ)", "nvme", 4, "nvme0n1"),
    ("INFO: task python:4711 blocked for more than 120 seconds.", "hung-task", 0, ""),
    ("INFO: task python:4711 blocked in I/O wait for more than 122 seconds.", "hung-task", 0, ""),
    ("INFO: task a:4711 is blocked on a mutex likely owned by task trainer:4875.", "hung-task", 1, ""),
    ("INFO: task a:4711 blocked on a semaphore likely last held by task trainer:4875", "hung-task", 1, ""),
    ("INFO: task a:4711 is blocked on a mutex, but the owner is not found.", "hung-task", 1, ""),
    ("INFO: task a:4711 is blocked on a semaphore, but the last holder is not found.", "hung-task", 1, ""),
    ("INFO: task a:1 <reader> blocked on an rw-semaphore likely owned by task b:2 <writer>", "hung-task", 1, ""),
    ("watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:7]", "lockup", 1, "cpu12"),
    ("NMI watchdog: BUG: soft lockup - CPU#2 stuck for 23s! [python:7]", "lockup", 1, "cpu2"),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", "lockup", 2, "cpu3"),
    ("rcu: INFO: rcu_preempt self-detected stall on CPU", "lockup", 3, ""),
    ("rcu: INFO: rcu_sched detected stalls on CPUs/tasks:", "lockup", 3, ""),
    ("INFO: rcu_sched self-detected stall on CPU { 3}  (t=21000 jiffies g=1 c=1 q=1)", "lockup", 3, ""),
    ("watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3", "lockup", 2, "cpu3"),
]


@pytest.mark.parametrize(("message", "kind", "code", "device"), MESSAGES)
def test_a_message_about_the_host_is_read(message: str, kind: str, code: int, device: str) -> None:
    error = _parsed(message)
    assert error is not None
    assert (error.kind, error.code, error.device) == (kind, code, device)
    assert error.text.isprintable()


def test_every_message_has_a_row_with_its_source() -> None:
    for kind, code in {(kind, code) for _, kind, code, _ in MESSAGES}:
        row = POLICY.row(kind, code)
        assert row is not None, (kind, code)
        assert row.source, row.key
        assert row.decision.action in ("degraded", "rank"), row.key
        assert row.key.endswith(f".codes.{code}") or kind == "hung-task"


@pytest.mark.parametrize(
    "message",
    [
        "EXT4-fs (loop0): Remounting filesystem read-only",  # a user's image
        "EXT4-fs (sda1): re-mounted. Opts: ro",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "XFS (sda1): User initiated shutdown received.",
        "[Hardware Error]: event severity: fatal",  # BERT: of an earlier boot
        "pcieport 0000:00:01.4: AER: device recovery successful",
        "pcieport 0000:00:01.4: AER: Corrected error received: 0000:3b:00.0",
        "pcieport 0000:00:01.4: AER: broadcast error_detected message",
        "pci 0000:00:01.0: DPC: containment event, status:0x0027: software trigger detected",
        "pcieport 0000:00:01.4: DPC: containment event, status:0x1f27 source:0x0000",  # a program's trigger
        "pcieport 0000:00:01.4: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+",
        "pcieport 0000:00:01.1: pciehp: Slot(1): Card not present",  # an administrator takes a disk
        f"mlx5_core {BDF}: mlx5_cmd_out_err:838:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad",
        f"mlx5_core {BDF}: cmd[0]: CREATE_MKEY(0x200) No done completion",
        f"mlx5_core {BDF}: Port module event[error]: module 0, Cable error, Unsupported or unknown cable",
        f"mlx5_core {BDF}: mlx5_pcie_event:303:(pid 5): PCIe slot advertised sufficient power (75W).",
        "infiniband mlx5_0: dump_cqe:272:(pid 0): dump error cqe",  # a peer is gone
        f"bnxt_en {BDF} eth0: Firmware activation event received",
        f"bnxt_en {BDF} eth0: Solicited firmware reset event, data1: 0x0, data2: 0x0, min wait 2000 ms",
        "nvme nvme0: Abort status: 0x0",
        "nvme nvme0: resetting controller",
        "nvme nvme1: I/O tag 4 (1004) type 4 opcode 0x1 (I/O Cmd) QID 1 timeout",  # over a network
        "nvme0n1: Dataset Management(0x9) @ LBA 0, 8 blocks, Invalid Field in Command (sct 0x0 / sc 0x2) DNR",
        "nvme0n1: Read(0x2) @ LBA 1234, 8 blocks, Access Denied (sct 0x2 / sc 0x86) DNR",  # a locked disk
        "nvme0n1: Read(0x2) @ LBA 1234, 8 blocks, Deallocated or Unwritten Logical Block (sct 0x2 / sc 0x87) DNR",
        "critical target error, dev nvme0n1, sector 812 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 0",
        "critical target error, dev nvme0n1, sector 812 op 0x9:(WRITE_ZEROES) flags 0x8000800 phys_seg 0",
        "operation not supported error, dev nvme0n1, sector 812 op 0x9:(WRITE_ZEROES) flags 0x800",
        "Memory failure: 0x12ab34: recovery action for free buddy page: Recovered",
        "Soft offlining pfn 0x12ab34 at process virtual address 0x7f0000000000",
        "CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)",
        "mce: CPU3: Package temperature above threshold, cpu clock throttled (total events = 1)",
        "EDAC skx MC5: HANDLING MCE MEMORY ERROR",
        "[Hardware Error]: cache level: L3/GEN, tx: GEN, mem-tx: RD",
        "nfs: server 10.0.0.1 not responding, still trying",
        "LustreError: 11-0: fs-OST0001-osc: operation ost_read to node failed: rc = -107",
        "EXT4-fs (nvme0n1p1): recovery complete",
        "md/raid1:md0: active with 2 out of 2 mirrors",
        "rcu: Hierarchical RCU implementation.",
        "pcieport 0000:00:01.4: DPC: enabled with IRQ 26",
        "EDAC MC: Ver: 3.0.0",
        "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0",
        "mce: CPU0: Thermal monitoring enabled (TM1)",
        "mce: [Hardware Error]: TSC 0 ADDR 1a2b3c000",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "nvme nvme0: pci function 0000:5e:00.0",
        "I/O error, dev loop0, sector 0",
        "pcieport 0000:00:03.0: AER: enabled with IRQ 26",
        f"mlx5_core {BDF} eth0: Link up",
        "INFO: task hung",
        "watchdog: BUG",
        "invoked oom-killer",
    ],
)
def test_what_is_no_error_of_the_host_is_none(message: str) -> None:
    assert _parsed(message) is None


def _of_firmware(*messages: str) -> list[tuple[str, int]]:
    """The errors of a report of the firmware."""
    parser = KernelErrorParser()
    parsed = (parser.parse(KernelRecord(0, 3, 1, False, message)) for message in messages)
    return [(error.kind, error.code) for error in parsed if error]


@pytest.mark.parametrize(
    ("severity", "section", "error"),
    [
        ("corrected", "memory error", ("machine-check", 1)),
        ("recoverable", "memory error", ("machine-check", 2)),
        ("fatal", "general processor error", ("machine-check", 2)),
        ("corrected", "PCIe error", ("pcie-aer", 1)),
        ("recoverable", "PCIe error", ("pcie-aer", 2)),
        ("fatal", "PCIe error", ("pcie-aer", 3)),
        ("recoverable", "CXL Protocol Error", ("pcie-aer", 2)),
        ("recoverable", "ARM processor error", ("machine-check", 2)),
        ("recoverable", "unknown, 6d5244f2-2712-11ec-bea7-cb3fdb95c786", ("machine-check", 3)),
        ("fatal", "Firmware Error Record Reference", ("machine-check", 3)),
    ],
)
def test_the_firmware_says_in_which_part_the_error_is(severity: str, section: str, error: tuple[str, int]) -> None:
    head = "{4}[Hardware Error]: "
    lines = [f"event severity: {severity}", f" Error 0, type: {severity}", f"  section_type: {section}"]
    assert _of_firmware(*(head + line for line in lines)) == [error]
    two = [" Error 0, type: corrected", "  section_type: memory error", *lines[1:]]
    assert _of_firmware(*(head + line for line in two)) == [("machine-check", 1), error]


def test_an_error_of_a_network_card_that_the_firmware_reports_moves_no_ranks() -> None:
    head = "[1.0] {1}[Hardware Error]: "
    report = ("event severity: recoverable", " Error 0, type: recoverable", "  section_type: PCIe error")
    assert _actions(*(head + line for line in report)) == ["degraded, flush"]


@pytest.mark.parametrize(
    ("severity", "section"), [("corrected", "unknown, 6d5244f2-2712-11ec-bea7-cb3fdb95c786"), ("info", "memory error")]
)
def test_what_the_firmware_has_mended_in_an_unnamed_part_is_nothing(severity: str, section: str) -> None:
    head = "{4}[Hardware Error]: "
    assert _of_firmware(f"{head} Error 0, type: {severity}", f"{head}  section type: {section}") == []


def test_what_the_firmware_says_in_another_report_is_not_mixed_up() -> None:
    assert _of_firmware("{1}[Hardware Error]:  Error 0, type: fatal", "{2}[Hardware Error]:   section_type: x") == []
    assert _of_firmware("[Hardware Error]:  Error 0, type: fatal", "[Hardware Error]:   section_type: x") == []
    assert _of_firmware("{1}[Hardware Error]:   section_type: memory error") == []


def _actions(*lines: str) -> list[str]:
    replay = Replay(POLICY)
    return [words.split("  ")[1].partition(":")[0] for words in replay.lines(line.encode() for line in lines)]


def test_an_oom_kill_is_the_jobs_doing() -> None:
    lines = [f"[{at}.0] Memory cgroup out of memory: Killed process {at} (python) total-vm:8kB" for at in range(99)]
    assert set(_actions(*lines)) == {"rank"}
    assert _actions("[1.0] Out of memory: Killed process 7 (python) total-vm:8kB") == ["rank"]


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_an_application_xid_never_takes_a_node(code: int) -> None:
    lines = [f"[{at}.0] NVRM: Xid (PCI:0000:3b:00): {code}, pid=7, name=python, Ch 00000008" for at in range(999)]
    assert set(_actions(*lines)) == {"rank"}


def test_corrected_pcie_errors_count_by_their_rate() -> None:
    message = AER + "Corrected, type=Physical Layer, (Receiver ID)"
    assert _actions(*(f"[{at}.0] {message}" for at in range(0, 100_000, 11))) == []
    assert _actions(*(f"[{at}.0] {message}" for at in range(0, 2000, 10))) == ["degraded, record"]
    storm = [f"[{at}.{part}] {message}" for at in range(59) for part in range(10)]
    assert _actions(*storm) == []  # equal lines within a second are one


@pytest.mark.parametrize(
    ("message", "response"),
    [
        (AER + "Uncorrected (Fatal), type=Transaction Layer, (Requester ID)", Response.SWAP),
        ("EXT4-fs (sda1): Remounting filesystem read-only", Response.SWAP),
        ("nvme nvme0: Disabling device after reset failure: -19", Response.SWAP),
        ("mce: Uncorrected hardware memory error in user-access at 1a2b3c000", Response.SWAP),
        ("nvme nvme0: I/O 22 QID 0 timeout, reset controller", Response.FLUSH),
    ],
)
def test_an_uncorrected_error_counts_at_once(message: str, response: Response) -> None:
    assert _actions(f"[1.0] {message}") == [f"degraded, {response}"]


def test_three_timeouts_of_a_card_within_an_hour_are_a_precursor() -> None:
    line = "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out"
    assert _actions(*(f"[{at}.0] {line}" for at in (0, 10, 3700, 5600))) == []
    assert _actions(*(f"[{at}.0] {line}" for at in (0, 10, 3500, 3600))) == ["degraded, swap"]


def test_a_site_makes_a_counted_row_count_at_once(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[pcie-aer.codes]\n1 = { action = "unfit", when = { count = 1 } }\n')
    replay = Replay(Policy.load(tmp_path / "site.toml"))
    line = f"[1.0] {AER}Corrected, type=Physical Layer, (Receiver ID)"
    assert "unfit: PCIe error 1: corrected errors" in next(iter(replay.lines([line.encode()])))
