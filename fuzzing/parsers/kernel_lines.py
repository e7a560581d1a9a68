"""Lines of the kernel log. Whatever they hold, they are read, and only a record of the kernel is an error.

The lines of a saved log, too, in whatever format: `muster policy replay` counts garbage and goes on.
"""

from io import BytesIO

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY, parse_line, parse_record
from muster.daemon.node.kernel.xid import KernelErrorParser
from muster.launcher.policy.replay import Replay, bounded_lines

_KINDS = {"xid", "xid-nonfatal", "sxid", "sxid-nonfatal", "gpu-lost", "gpu-recovery"} | {
    *("oom-kill", "machine-check", "edac", "filesystem", "nic", "pcie-aer", "nvme", "hung-task", "lockup"),
}
_POLICY = Policy.load()
_FLAGGED_STARTS = ("NVRM: ", "XID ")
"""NVIDIA's driver flags its messages as fragments. Nobody else's fragments are read."""
_SIGNAL_BYTES_PER_BYTE = 10
"""An escaped character of a message is "\\x" and up to six digits, and the byte of a fragment may be escaped again."""


def check(data: bytes) -> None:
    """Each line of `data`, as the device gives it and as a file holds it."""
    parser = KernelErrorParser()
    for line in data.split(b"\n"):
        as_device = parse_record(line)
        record = parse_line(line)
        assert as_device is None or as_device == record
        assert 0 <= record.level <= 7
        error = parser.parse(record)
        if not error:
            continue
        assert record.facility == KERNEL_FACILITY
        assert not record.fragment or record.message.startswith(_FLAGGED_STARTS)
        assert error.kind in _KINDS
        assert 0 <= error.code < 100_000
        assert error.text.isprintable()
        assert error.device.isascii()
        assert len(error.text) <= _SIGNAL_BYTES_PER_BYTE * len(data)
    _check_replay(data)


def _check_replay(data: bytes) -> None:
    replay = Replay(_POLICY)
    told = list(replay.lines(bounded_lines(BytesIO(data))))
    assert len(told) <= replay.counts.errors <= replay.counts.lines <= data.count(b"\n") + 1
    assert sum(replay.counts.rows.values()) == len(told)
    assert all("no row" not in line for line in replay.summary())
