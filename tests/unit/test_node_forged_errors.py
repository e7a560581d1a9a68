"""No user makes the kernel say that a GPU or the host has failed, whatever the kernel quotes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.kernel.kernel_record import KernelError, KernelRecord, parse_line, parse_record
from muster.daemon.node.kernel.xid import NAME_AHEAD_S, KernelErrorParser

HOSTILE = Path(__file__).parent / "kernel_log" / "hostile.txt"
DRIVER_WORDS = re.compile(r"NVRM|SXid|XID|nvidia-nvswitch|fallen off the bus")
GENUINE = (
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "NVRM: Xid (0000:03:00): 79, Channel 00000001",
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
    "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.",
    "NVRM: GPU at 0000:18:00.0 has fallen off the bus.",
    "NVRM: fallen off the bus and is not responding to commands.",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 10006, TSENSE OVERT Threshold reached. Shutting Down",
    "NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x22:0x65:1457)",
    "NVRM: RmInitAdapter failed! (0x22:0x65:1457)",
    "Memory failure: 0x12ab34: Killing a:7 due to hardware memory corruption",
    "nvme0n1: Read(0x2) @ LBA 1234, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR",
    "nvme nvme0: frozen state error detected, reset controller",
    "rcu: INFO: rcu_preempt self-detected stall on CPU",
    "INFO: rcu_sched self-detected stall on CPU { 3}  (t=21000 jiffies g=1 c=1 q=1)",
    "md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.",
    "bnxt_en 0000:3b:00.0 eth0: Firmware fatal reset event received",
    "mlx5_core 0000:3b:00.0: Fatal error 3 detected",
    "pcieport 0000:00:01.4: DPC: containment event, status:0x1f01 source:0x0000",
    "pcieport 0000:00:01.4: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    "XID 64 Dynamic Page Retirement: Fatal error, unable to retire page (0x1)",
    "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has\n"
    "NVRM: fallen off the bus and is not responding to commands.",
    "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400",
    "mce: Uncorrected hardware memory error in user-access at 1a2b3c000",
    "[Hardware Error]: Corrected error, no action required.",
    "[Hardware Error]: CPU:3 (17:31:0) MC17_STATUS[Over|UE|MiscV]: 0xbe20410000000001",
    "NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.",
    "mlx5_core 0000:3b:00.0: Health issue observed, firmware internal error, severity(3) ERROR:",
    "a 0000:3b:00.0: DPC: containment event, status:0x1f01 source:0x0000",
    "a 0000:3b:00.0: EDR: EDR event received",
    "a 0000:3b:00.0: AER: device recovery failed",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1)",
    "EDAC MC0: UE on mc#0csrow#0channel#0 (csrow:0 channel:0)",
    "EXT4-fs (sda1): Remounting filesystem read-only",
    "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0",
    "XFS (sda1): Corruption of in-memory data detected.  Shutting down filesystem",
    "XFS (dm-0): Log I/O Error (0x2) detected at xlog_ioend_work+0x58 (fs/xfs/xfs_log.c:1378).",
    "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out",
    "mlx5_core 0000:3b:00.0 eth0: TX timeout detected",
    "mlx5_core 0000:3b:00.0: device's health compromised - reached miss count",
    "ixgbe 0000:3b:00.0 eth0: Reset adapter",
    "a 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
    "nvme nvme0: I/O 22 QID 4 timeout, reset controller",
    "nvme nvme0: Disabling device after reset failure: -19",
    "I/O error, dev nvme0n1, sector 4711 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "Buffer I/O error on dev nvme0n1p1, logical block 3, async page read",
    "BUG: soft lockup - CPU#12 stuck for 22s! [python:4711]",
    "watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3",
)
OF_PROCESSES = {"oom-kill", "hung-task"}
"""The kinds that name a process, and so a user's text. The policy never acts on a node for them."""
CARD = re.compile(r"[\w-]{1,64} [0-9A-Fa-f]{4,8}:", re.ASCII)
"""Messages about a card start with the name of its driver."""
DRIVER_STARTS = (
    *("NVRM: ", "nvidia-nvswitch", "XID ", "mce: ", "[Hardware Error]: ", "{", "EDAC MC", "EXT", "XFS (", "NETDEV"),
    *(
        "mlx5_core ",
        "nvme",
        "Memory failure",
        "rcu: ",
        "INFO: rcu_",
        "md/raid",
        "Buffer I/O",
        "I/O error, ",
        "BUG: soft",
        "watchdog: ",
    ),
)
NAME_FIRST = (
    "{}[4711]: segfault at 0 ip 0000000000401136 sp 00007ffd4f3c error 6",
    "{}[4711] vsyscall attempted with vsyscall=none ip:ffffffffff600000 cs:33",
    "{}[4711]: unhandled exception: DABT (lower EL), ESR 0x0000000092000046",
    "{} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "{}: page allocation failure: order:0, mode:0x0, nodemask=(null)",
    "{}: potentially unexpected fatal signal 11.",
    "{}: sending ioctl 5331 to a partition!",
    "{}(4711): Attempt to set a LOCK_MAND lock via flock(2).",
    "{} (4711): drop_caches: 3",
    "{} (4711) used greatest stack depth: 11000 bytes left",
    "{} (4711): /proc/4711/oom_adj is deprecated, please use /proc/4711/oom_score_adj instead.",
    "{}/4711 is trying to acquire lock:",
    "{} D    0  4711      1 0x00000000",
    "{} cpuset=a mems_allowed=0",
    "{} cpuset=QID 4 timeout, aborting mems_allowed=0",
    "{} cpuset=.  Shutting down filesystem mems_allowed=0",
    "{} cpuset=x on y (channel:1 mems_allowed=0",
    "{}[4711]: segfault at 0 ip 401136 sp 7ffd error 6 in dev nvme0n1, sector 1[401000+1000]",
    "{}: renamed from veth0",
    "{}: port 1(veth0) entered blocking state",
)
"""Messages of the kernel that start with the name of a process or a network device."""
PACKETS = (
    "IN=lo OUT= MAC=00:00:00:00:00:00:00:00:00:00:00:00:08:00 SRC=127.0.0.1 DST=127.0.0.1 LEN=84 TOS=0x00",
    "IN= OUT=lo SRC=0000:0000:0000:0000:0000:0000:0000:0001 DST=0000:0000:0000:0000:0000:0000:0000:0001 LEN=104",
    "IN=a OUT= TRUNCATED",
    "IN=a OUT= PHYSIN=b MACSRC=02:00:00:00:00:01 MACDST=02:00:00:00:00:02 VPROTO=8100 VID=2 MACPROTO=88cc ",
    "IN=a OUT= ARP HTYPE=1 PTYPE=0x0800 OPCODE=1",
    # Another protocol than IP and ARP, in the families netdev and bridge, from Linux 5.19 on: only the link's header.
    "IN=veth0 OUT= MAC=02:00:00:00:00:02:02:00:00:00:00:01:88:cc ",
    "IN=br0 OUT=veth1 PHYSIN=veth0 PHYSOUT=veth1 MAC=02:00:00:00:00:02:02:00:00:00:00:01:88:cc ",
    "IN=tun0 OUT= MAC= ",
    "IN=sit0 OUT= MAC=45:00 TUNNEL=10.0.0.1->10.0.0.2 ",
    "IN=a OUT=b ",
)
"""What the kernel writes after the text of a netfilter rule: nf_log_syslog.c of Linux."""
NAME_CHARS = 15
"""The longest name of a process (TASK_COMM_LEN - 1) or a network device (IFNAMSIZ - 1)."""


def records() -> Iterator[bytes]:
    """The records of the corpus, each with the lines that describe its device."""
    lines = [line for line in HOSTILE.read_bytes().split(b"\n") if line and not line.startswith(b"#")]
    for line, following in zip(lines, [*lines[1:], b""], strict=True):
        if not line.startswith(b" "):
            yield line + b"\n" + (following if following.startswith(b" ") else b"")


CORPUS = list(records())


def _finds(record: KernelRecord) -> bool:
    return _concerns_the_node(KernelErrorParser().parse(record))


def _concerns_the_node(error: object) -> bool:
    return isinstance(error, KernelError) and error.kind not in OF_PROCESSES


def test_no_message_that_names_a_process_is_held_against_the_node() -> None:
    policy = Policy.load()
    for kind in OF_PROCESSES:
        for code in (*policy.codes(kind), policy.free_code(kind)):
            assert policy.decide(kind, code).action == "rank"


def test_the_corpus_is_hostile() -> None:
    assert len(CORPUS) >= 80
    for data in CORPUS:
        record = parse_record(data)
        assert record is not None, data
        assert DRIVER_WORDS.search(record.message) or "\nNVRM" in record.message, data


@pytest.mark.parametrize("data", CORPUS, ids=lambda data: data.partition(b",")[2].partition(b",")[0].decode())
def test_a_quoted_text_is_no_error(data: bytes) -> None:
    record = parse_record(data)
    assert record is not None
    assert not _finds(record)


def test_no_sequence_of_quoted_texts_is_an_error() -> None:
    parser = KernelErrorParser()
    for data in CORPUS:
        for line in data.rstrip(b"\n").split(b"\n"):  # as a file in place of the device has them
            assert not _concerns_the_node(parser.parse(parse_line(line))), line


@pytest.mark.parametrize("genuine", GENUINE)
def test_the_messages_of_the_driver_are_errors(genuine: str) -> None:
    """Without this, the tests below would show nothing."""
    assert _finds(KernelRecord(0, 3, 1, False, genuine))


texts = st.one_of(st.text(), st.sampled_from(GENUINE), st.tuples(st.text(), st.sampled_from(GENUINE)).map("\n".join))
prefixes = st.one_of(
    st.sampled_from(
        ["tmpfs: Unknown parameter '", "audit: type=1400 name=", "usb 1-1: Product: ", "\n", " ", "NVRM:", "\\"]
    ),
    st.text(min_size=1),
)


@given(prefixes, texts, st.text())
def test_no_text_inside_a_message_is_an_error(prefix: str, quoted: str, rest: str) -> None:
    message = prefix + quoted + rest
    assume(not message.startswith(DRIVER_STARTS) and not CARD.match(message))
    assert not _finds(KernelRecord(0, 3, 1, False, message))


@given(st.text(), texts, st.text())
def test_no_text_inside_a_message_of_the_driver_is_an_error(version: str, quoted: str, rest: str) -> None:
    """The driver quotes the version that its client claims."""
    message = f"NVRM: API mismatch: the client has the version {version}{quoted}{rest}, but"
    parser = KernelErrorParser()
    parser.parse(KernelRecord(0, 3, 1, False, "NVRM: The NVIDIA GPU 0000:18:00.0"))
    assert parser.parse(KernelRecord(0, 3, 2, False, message)) is None


@pytest.mark.parametrize("genuine", GENUINE)
def test_the_driver_quotes_a_message_of_its_own(genuine: str) -> None:
    for quoted in (genuine, f"\n{genuine}", f"x\n{genuine}\n"):
        assert not _finds(KernelRecord(0, 3, 1, False, f"NVRM: API mismatch: the client has the version {quoted}, but"))


@pytest.mark.parametrize("packet", PACKETS)
def test_no_text_of_a_netfilter_rule_is_an_error(packet: str) -> None:
    starts = [start for genuine in GENUINE for start in (genuine, f"{genuine} ", f"{genuine}\n")]
    for prefix in (*starts, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, "):
        assert not _finds(KernelRecord(0, 4, 1, False, prefix[:127] + packet)), prefix
        as_in_a_file = (prefix[:127] + packet).rstrip()
        assert not _finds(KernelRecord(0, 4, 1, False, as_in_a_file)), prefix


@pytest.mark.parametrize("name", ["IN=a OUT= MAC= ", "IN= OUT=a ", "IN=a OUT= TRUNC", "IN= OUT= SRC=a "])
def test_no_name_of_a_process_hides_an_error(name: str) -> None:
    """The driver names the process, and says more after the name."""
    assert _finds(KernelRecord(0, 3, 1, False, f"NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name={name}, Ch 00000008"))


@given(st.integers(1, 255), st.integers(0, 7), texts, st.booleans())
def test_no_program_is_believed(facility: int, level: int, message: str, fragment: bool) -> None:
    assert not _finds(KernelRecord(facility, level, 1, fragment, message))


HEADS = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=",
    "python3: page allocation failure: order:0, mode:0x0, nodemask=(null),cpuset=",
    ",cpuset=",
    "python3 cpuset=",
)
"""Lines of the kernel up to the name of a control group. Another record has come before the rest of them."""


@given(st.integers(0, 7), st.sampled_from(HEADS), texts, st.floats(0, 0.999 * NAME_AHEAD_S))
def test_no_name_of_a_control_group_is_an_error(level: int, head: str, name: str, later_s: float) -> None:
    parser = KernelErrorParser()
    parser.parse(KernelRecord(0, 6, 1, False, head, 100.0))
    for number in range(2):  # nor a second one: two processors may have lines open
        assert not _concerns_the_node(parser.parse(KernelRecord(0, level, number + 2, True, name, 100.0 + later_s)))


@given(st.integers(0, 7), texts, st.sampled_from([",mems_allowed=0", " mems_allowed=0-1"]))
def test_no_name_that_the_rest_of_its_line_follows_is_an_error(level: int, name: str, rest: str) -> None:
    assert not _finds(KernelRecord(0, level, 1, True, name + rest, 100.0))


@pytest.mark.parametrize("genuine", [text for text in GENUINE if not text.startswith(("NVRM: ", "XID "))])
def test_only_the_driver_of_gpus_is_believed_in_fragments(genuine: str) -> None:
    assert not _finds(KernelRecord(0, 3, 1, True, genuine, 100.0))


@pytest.mark.parametrize("genuine", [text for text in GENUINE if text.startswith(("NVRM: ", "XID "))])
def test_the_driver_of_gpus_flags_all_its_messages_as_fragments(genuine: str) -> None:
    """nv_printf of NVIDIA's open kernel modules begins each message with KERN_CONT."""
    assert _finds(KernelRecord(0, 4, 1, True, genuine, 100.0))


def test_the_driver_is_believed_again_when_the_rest_of_a_line_must_have_come() -> None:
    parser = KernelErrorParser()
    parser.parse(KernelRecord(0, 6, 1, False, HEADS[0], 100.0))
    assert not parser.parse(KernelRecord(0, 4, 2, True, GENUINE[0], 100.0 + NAME_AHEAD_S / 2))
    assert parser.parse(KernelRecord(0, 4, 3, True, GENUINE[0], 100.0 + NAME_AHEAD_S))


names = st.one_of(
    st.text(max_size=NAME_CHARS),
    st.tuples(st.sampled_from(GENUINE), st.integers(1, NAME_CHARS)).map(lambda pair: pair[0][: pair[1]]),
)


@given(names, st.sampled_from(NAME_FIRST))
@example("EDAC MC0: UE on", "{} cpuset=x on y (channel:1 mems_allowed=0")
def test_no_name_at_the_start_of_a_message_spells_an_error(name: str, message: str) -> None:
    assert not _finds(KernelRecord(0, 3, 1, False, message.format(name)))


def test_every_message_of_the_driver_is_longer_than_a_name() -> None:
    """A name at the start of a message would have to be continued by the kernel in the driver's words."""
    for genuine in GENUINE:
        for length in range(NAME_CHARS + 1):
            assert not _finds(KernelRecord(0, 3, 1, False, genuine[:length]))
