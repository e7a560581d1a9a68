"""Lines of the NVIDIA drivers, as printed since about 2010 (samples from public logs)."""

import pytest

from muster.daemon.node.sensors.xid import KernelError, KernelLineParser

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
    ("[ 1234.5] NVRM: Xid (PCI:0000:B5:00): 79, GPU has fallen off the bus.", 79, None),
    ("Nov 21 08:00:00 n17 kernel: NVRM: Xid (PCI:00000000:b5:00.0): 79, x", 79, "00000000:b5:00.0"),
    ("NVRM: Xid (PCI:0000:b5:00): 79", 79, None),
]


@pytest.mark.parametrize(("line", "code", "device"), XIDS)
def test_an_xid_is_read(line: str, code: int, device: str | None) -> None:
    assert KernelLineParser().parse(line) == KernelError("xid", code, device or "0000:b5:00", line)


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
        ("XID 64 Dynamic Page Retirement: Fatal error, unable to retire page (0x1)", "xid", 64, ""),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "gpu-lost", 0, "0000:18:00.0"),
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
    assert KernelLineParser().parse(line) == KernelError(kind, code, device, line)


def test_a_lost_gpu_may_take_three_lines() -> None:
    reader = KernelLineParser()
    lines = [
        "NVRM: The NVIDIA GPU 0000:18:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    assert [reader.parse(line) for line in lines] == [None, None, KernelError("gpu-lost", 0, "0000:18:00.0", lines[2])]


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
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert KernelLineParser().parse(line) is None
