"""One record of the kernel log: its prefix, its flags and its message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.node.kernel.kernel_record import KernelRecord, parse_line, parse_record


@pytest.mark.parametrize(
    ("data", "record"),
    [
        (
            b"3,4711,98765,-;NVRM: words\n SUBSYSTEM=pci\n DEVICE=+pci:0000\n",
            KernelRecord(0, 3, 4711, False, "NVRM: words"),
        ),
        (b"6,1,2,-,caller=T1;a;b\n", KernelRecord(0, 6, 1, False, "a;b")),
        (b"6,1,2,-,caller=T1,new=3;a\n", KernelRecord(0, 6, 1, False, "a")),
        (b"4,1,2,c;tab\\x09here \\x5cx\n", KernelRecord(0, 4, 1, True, "tab\there \\x")),
        (b"4,1,2,c,caller=T1;part\n", KernelRecord(0, 4, 1, True, "part")),
        (b"4,1,2,+;part\n", KernelRecord(0, 4, 1, True, "part")),
        (b"4,1,2,-;gr\\xc3\\xbc\\xc3\\x9fe \\xff\n", KernelRecord(0, 4, 1, False, "grüße �")),
        (b"4,1,2,-;two\\x0alines\\x0a\n", KernelRecord(0, 4, 1, False, "two\nlines")),
        (b"12,1,2,-;from a program\n", KernelRecord(1, 4, 1, False, "from a program")),
        (b"30,340,5690716,-;udevd[80]: starting\n", KernelRecord(3, 6, 340, False, "udevd[80]: starting")),
        (b"2047,1,2,-;the last facility\n", KernelRecord(255, 7, 1, False, "the last facility")),
        (b"3,1,2,-;\n", KernelRecord(0, 3, 1, False, "")),
        (b"3,1,2,-;6,1,2,-;a message like a record\n", KernelRecord(0, 3, 1, False, "6,1,2,-;a message like a record")),
    ],
)
def test_a_record_has_a_writer_a_number_and_a_message(data: bytes, record: KernelRecord) -> None:
    assert parse_record(data) == record
    assert parse_line(data) == record


@pytest.mark.parametrize(
    "data",
    [b"", b"NVRM: words\n", b"3,1,2;words", b"3,1,2,-", b" 3,1,2,-;x", b"-3,1,2,-;x", b"3,1\n,2,-;x", b"9" * 9999],
)
def test_data_without_a_prefix_is_no_record(data: bytes) -> None:
    assert parse_record(data) is None


def test_a_line_without_a_prefix_is_a_whole_message_of_the_kernel() -> None:
    assert parse_line(b"a bare line") == KernelRecord(0, 6, None, False, "a bare line")
    assert parse_line(rb"nothing \x0a is unescaped") == KernelRecord(0, 6, None, False, r"nothing \x0a is unescaped")


@given(st.binary())
def test_any_line_of_a_file_is_a_record(line: bytes) -> None:
    assert parse_line(line).facility >= 0


def escaped(message: bytes) -> bytes:
    """`message` as /dev/kmsg prints it (msg_add_ext_text in the kernel's kernel/printk/printk.c)."""
    return b"".join(
        bytes([byte]) if 0x20 <= byte < 0x7F and byte != ord("\\") else b"\\x%02x" % byte for byte in message
    )


@given(st.text().filter(lambda text: not text.endswith("\n")), st.integers(0, 2047))
def test_whatever_a_message_holds_it_is_one_message(message: str, priority: int) -> None:
    data = b"%d,1,2,-;%s\n SUBSYSTEM=usb\n" % (priority, escaped(message.encode()))
    assert parse_record(data) == KernelRecord(priority // 8, priority % 8, 1, False, message)
