"""Messages of the NVIDIA drivers, as printed since about 2010 (samples from public logs)."""

import pytest

from muster.daemon.node.kernel.kernel_record import KernelError, KernelRecord
from muster.daemon.node.kernel.xid import KernelErrorParser


def kernel(message: str) -> KernelRecord:
    """A record of the kernel."""
    return KernelRecord(facility=0, level=3, sequence=1, fragment=False, message=message)


PCI = "NVRM: Xid (PCI:0000:b5:00): "

XIDS = [
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14, "0000:03:00"),
    ("NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d 00000104 00000000 00000100", 13, "0000:01:00"),
    (
        PCI + "31, Ch 0000003b, intr 10000000. MMU Fault: ENGINE GRAPHICS HUBCLIENT_SCC faulted @ 0x0_04687000.",
        31,
        None,
    ),
    (PCI + "32, pid=2280636, name=train.3, Channel ID 0000000d intr0 00040000", 32, None),
    (PCI + "45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149", 45, None),
    (PCI + "48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected", 48, None),
    (PCI + "62, 0096(1c54) 00000000 00000000", 62, None),
    (PCI + "63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.", 63, None),
    (PCI + "74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000)", 74, None),
    (PCI + "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79, None),
    (PCI + "79, pid=1101234, name=nvc:[driver], GPU has fallen off the bus.", 79, None),
    (PCI + "79, GPU has fallen off the bus.", 79, None),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).", 94, "0000:01:00"),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 95, pid=7, Uncontained: LTC TAG", 95, "0000:01:00"),
    (PCI + "119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU4 GSP!", 119, None),
    ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x0)", 149, "0018:01:00"),
    (PCI + "149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000)", 149, None),
    (PCI + "154, something that a later driver says", 154, None),
    ("NVRM: Xid (PCI:0000:B5:00): 79, GPU has fallen off the bus.", 79, None),
    ("NVRM: Xid (PCI:00000000:b5:00.0): 79, x", 79, "00000000:b5:00.0"),
    (PCI + "79", 79, None),
    ("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000", 31, "0000:01:00"),
    (PCI + "8, Channel 0000001a", 8, None),
    (PCI + "13, Graphics Exception: ESR 0x405840=0x84041a2c", 13, None),
    (PCI + "13, pid='', name=, Graphics Exception: ESR 0x404490=0x80000002", 13, None),
    (
        PCI + "31, pid=3634001, name=vectorAdd, channel 0x01000020, intr 00000000. MMU Fault: ENGINE CE2 faulted",
        31,
        None,
    ),
    (PCI + "43, pid=2924364, name=pt_main_thread, Ch 00000008", 43, None),
    (PCI + "61, 0a0e(2d74) 00000000 00000000", 61, None),
    (PCI + "62, 32260b5e 000154b0 00000000 2026da96 202b5626", 62, None),
    (PCI + "63, Dynamic Page Retirement: New page retired, reboot to activate (0x00000000000a0a6c).", 63, None),
    (PCI + "64, pid='<unknown>', name=<unknown>, Row Remapper Error: (0x00000002eebc4100) - All reserved", 64, None),
    (PCI + "69, Class Error: ChId 0005, Class 0000a097, Offset 00000d9c, Data ffffffff, ErrorCode 0000000c", 69, None),
    (PCI + "92, pid='<unknown>', name=<unknown>, SM SBE interrupt storm detected", 92, None),
    (PCI + "94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No", 94, None),
    (
        PCI + "109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005",
        109,
        None,
    ),
    (PCI + "119, pid=1582259, name=nvc:[driver]", 119, None),
    (PCI + "120, pid=9111, name=python, GSP task exception: load access fault", 120, None),
    (PCI + "137, pid=1, name=a.out, RLW_RXPIPE interrupt hit on link 11 on GPU0: PRIV Error", 137, None),
    (PCI + "140, pid='<unknown>', name=<unknown>, An uncorrectable ECC error detected DRAM:0, LTC:0", 140, None),
    (PCI + "145, RLW_SRC_TRACK Fatal XC1 i0 Link 12 (0x040988e2 0x0)", 145, None),
    (PCI + "156, pid=1, name=x, Retiring TPC 4 from GPC 2 with a spare from the same GPC.", 156, None),
    (PCI + "79, ", 79, None),  # the driver's text is empty
]


@pytest.mark.parametrize(("line", "code", "device"), XIDS)
def test_an_xid_is_read(line: str, code: int, device: str | None) -> None:
    expected = KernelError("xid", code, device or "0000:b5:00", line.rstrip())
    assert KernelErrorParser().parse(kernel(line)) == expected


@pytest.mark.parametrize(
    ("line", "kind", "code", "device"),
    [
        (PCI + "145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x0)", "xid-nonfatal", 145, "0000:b5:00"),
        (
            PCI + "145, pid=876767, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x8)",
            "xid-nonfatal",
            145,
            "0000:b5:00",
        ),
        (
            PCI + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "gpu-recovery",
            2,
            "0000:b5:00",
        ),
        (
            PCI
            + "154, pid=1, name=x, GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)",
            "gpu-recovery",
            1,
            "0000:b5:00",
        ),
        (
            PCI + "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 01 (0x00082226 0x0)",
            "xid-nonfatal",
            149,
            "0000:b5:00",
        ),
        (
            "XID 63 Dynamic Page Retirement: New retired page, reload the driver to activate. (0x00000000000a0a6c)",
            "xid",
            63,
            "",
        ),
        ("XID 64 Dynamic Page Retirement: Fatal error, unable to retire page (0x1)", "xid", 64, ""),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "gpu-lost", 0, "0000:18:00.0"),
        ("NVRM: GPU at 0000:01:00.0 has fallen off the bus.", "gpu-lost", 0, "0000:01:00.0"),
        ("NVRM: fallen off the bus and is not responding to commands.", "gpu-lost", 0, ""),
        ("NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x22:0x65:1457)", "gpu-missing", 2, "0000:18:00.0"),
        (
            "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) from",
            *("nvml-error", 16, ""),
        ),
        ("NVRM: rm_init_adapter failed for device bearing minor number 0", "gpu-missing", 2, ""),
        *(
            (f"nvidia-nvswitch0: SXid (PCI:0000:84:00.0): {code}, {words}", kind, code, "0000:84:00.0")
            for code, words, kind in (
                (12028, "Fatal, Link 28 egress non-posted PRIV error (First)", "sxid"),
                (12023, "Correctable, Link 28 egress ECC", "sxid-nonfatal"),
                (10004, "Thermal Slowdown Engaged | Temp higher than WARN Threshold", "sxid-nonfatal"),
                (10006, "TSENSE OVERT Threshold reached. Shutting Down", "sxid"),
                (26006, "SOE HALTED", "sxid-nonfatal"),
            )
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate",
            "sxid-nonfatal",
            20009,
            "0000:c3:00.0",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "sxid",
            20034,
            "0000:05:00.0",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
            "sxid-nonfatal",
            12028,
            "0000:05:00.0",
        ),
    ],
)
def test_its_relatives_are_read(line: str, kind: str, code: int, device: str) -> None:
    assert KernelErrorParser().parse(kernel(line)) == KernelError(kind, code, device, line)


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (PCI + "79, GPU has fallen off the bus.\n", PCI + "79, GPU has fallen off the bus."),
        (PCI + "13, pid=1, name=a\nb, Ch 00000008", PCI + r"13, pid=1, name=a\x0ab, Ch 00000008"),
        (PCI + "13, pid=1, name=\x1b[2J, Ch 00000008", PCI + r"13, pid=1, name=\x1b[2J, Ch 00000008"),
    ],
)
def test_the_text_of_an_error_is_one_line(printed: str, text: str) -> None:
    """A line break in the name of the process hides no error, and no control character goes further."""
    error = KernelErrorParser().parse(kernel(printed))
    assert error is not None
    assert error.text == text


@pytest.mark.parametrize(
    "name", ["a, B Nonfatal", "a\nB Nonfatal XC", "A Nonfatal XC0 ", "IN= OUT= SRC=", "IN= OUT= DST=1"]
)
def test_the_name_of_a_process_hides_no_fatal_error(name: str) -> None:
    line = PCI + f"149, pid=1, name={name}, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x0)"
    error = KernelErrorParser().parse(kernel(line))
    assert error is not None
    assert (error.kind, error.code) == ("xid", 149)


LOST_IN_PARTS = [
    [
        "NVRM: The NVIDIA GPU 0000:18:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ],
    [
        "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ],
    [
        "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330)",
        "NVRM: installed in this system has fallen off the bus and is",
        "NVRM: not responding to commands.",
    ],
]


@pytest.mark.parametrize("lines", LOST_IN_PARTS)
def test_a_lost_gpu_is_one_message_with_line_breaks(lines: list[str]) -> None:
    """The driver prints the sentence at once: /dev/kmsg has it as one record."""
    error = KernelErrorParser().parse(kernel("\n".join(lines)))
    assert error is not None
    assert (error.kind, error.code, error.device) == ("gpu-lost", 0, "0000:18:00.0")
    assert error.text.startswith("NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has")
    assert error.text.endswith("fallen off the bus and is not responding to commands.")


@pytest.mark.parametrize("lines", LOST_IN_PARTS)
def test_a_lost_gpu_may_take_several_lines(lines: list[str]) -> None:
    """In a file, each line is a record."""
    parser = KernelErrorParser()
    *before, error = [parser.parse(kernel(line)) for line in lines]
    assert not any(before)
    assert error is not None
    assert (error.kind, error.code, error.device) == ("gpu-lost", 0, "0000:18:00.0")


def test_a_sentence_that_begins_anew_is_about_the_second_gpu() -> None:
    parser = KernelErrorParser()
    assert parser.parse(kernel("NVRM: The NVIDIA GPU 0000:18:00.0")) is None
    error = parser.parse(kernel("\n".join(LOST_IN_PARTS[0]).replace("18:00", "5d:00")))
    assert error is not None
    assert error.device == "0000:5d:00.0"


@pytest.mark.parametrize(
    "between",
    [
        kernel("usb 1-1: new high-speed USB device"),
        kernel("NVRM: loading NVIDIA UNIX Open Kernel Module"),
        kernel("tmpfs: Unknown parameter 'NVRM: (PCI ID: 10de:2330) installed in this system has'"),
        KernelRecord(0, 6, 2, True, "NVRM: (PCI ID: 10de:2330) installed in this system has"),
    ],
)
def test_a_device_is_remembered_for_the_next_record_only(between: KernelRecord) -> None:
    parser = KernelErrorParser()
    first, last = LOST_IN_PARTS[1]
    assert parser.parse(kernel(first)) is None
    assert parser.parse(between) is None
    error = parser.parse(kernel(last))
    assert error is not None
    assert (error.kind, error.device) == ("gpu-lost", "")


def test_the_words_of_a_program_do_not_interrupt_the_driver() -> None:
    parser = KernelErrorParser()
    first, second, third = LOST_IN_PARTS[0]
    assert parser.parse(kernel(first)) is None
    assert parser.parse(KernelRecord(3, 6, 2, False, "systemd[1]: Started x")) is None
    assert parser.parse(kernel(second)) is None
    error = parser.parse(kernel(third))
    assert error is not None
    assert error.device == "0000:18:00.0"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "usb 1-1: new high-speed USB device",
        "NVRM: GPU at PCI:0000:b5:00: GPU-1234",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Severity 0 Engine instance 44 Sub-engine instance 00",
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Data {0x50610002, 0x10100030}",
        "NVRM: Xid (PCI:zz): 79, x",
        "NVRM: Xid (PCI:0000:b5:00): 790000000000000000000000, x",
        "NVRM: GPU at 0000:01:00.0 has software scheduler DISABLED with policy BEST_EFFORT.",
        "nvidia 0000:18:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        "NVRM: The NVIDIA probe routine failed for 1 device(s).",
        "[ 1234.5] NVRM: Xid (PCI:0000:b5:00): 79, GPU has fallen off the bus.",
        "Nov 21 08:00:00 n17 kernel: NVRM: Xid (PCI:0000:b5:00): 79, x",
        " NVRM: Xid (PCI:0000:b5:00): 79, GPU has fallen off the bus.",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert KernelErrorParser().parse(kernel(line)) is None
