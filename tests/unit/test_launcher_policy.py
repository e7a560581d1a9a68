"""`muster policy`: what a site's file changes, which row decides, and what a saved kernel log leads to."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.coordinator.policy.policy import Policy, SignalAction
from muster.launcher.main import main
from muster.launcher.policy.explanation import explain
from muster.launcher.policy.log_lines import MAX_LINE_BYTES, read_line
from muster.launcher.policy.replay import Replay, bounded_lines

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000008, MMU Fault"
PENDING = "NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: New row marked for remapping"
SHIPPED = Policy.load()


def _in_journal(**fields: object) -> str:
    return json.dumps({"_TRANSPORT": "kernel", "__REALTIME_TIMESTAMP": "1795608000000000", **fields})


def _replayed(*lines: str) -> tuple[list[str], Replay]:
    replay = Replay(SHIPPED)
    return list(replay.lines(line.encode() for line in lines)), replay


def _explained(text: str, policy: Policy = SHIPPED) -> str:
    return "\n".join(explain(text, policy, "site.toml"))


def test_check_names_each_mistake_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        '[xd]\n[xid.codes]\n79 = { action = "fatal" }\n080 = { action = "rank" }\n'
        "[sxid]\ncodes = 3\n[limits]\nfraction = 7\n[pool]\nwait = 3\n"
    )
    assert main(["policy", "check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for words in (
        "unknown kind of signal 'xd': did you mean 'xid'?",
        "sxid: codes = 3: this key needs a table",
        "xid.codes.79.action = 'fatal': an action is one of unfit, unfit_unless_explained, ",
        "xid.codes.080: a code is a whole number, written in digits only, without a zero in front",
        "limits.fraction = 7",
        "unknown key pool.wait: did you mean 'wait_s'?",
    ):
        assert len([line for line in lines if words in line and str(file) in line]) == 1, words


@pytest.mark.parametrize("action", get_args(SignalAction))
def test_explain_has_words_for_each_action(action: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f'[xid.codes]\n79 = {{ action = "{action}" }}\n')
    assert f"action    {action}\n  follows   " in _explained("xid 79", Policy.load(file))


def test_check_says_what_differs_from_the_shipped_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[xid.codes]\n63 = { action = "ignore", reason = "ours" }\n[limits]\nfraction = 0.1\n')
    assert main(["policy", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: no mistakes, 2 differences from the shipped table, 1 value as shipped",
        "  xid.codes.63.action = 'ignore' (shipped: 'degraded')",
        "  xid.codes.63.reason = 'ours' (shipped: 'memory row remap pending')",
    ]


def test_check_of_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", str(tmp_path / "absent")]) == 2
    assert "can't be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [LOST, f"[ 12.5] {LOST}", f"3,1,2,-;{LOST}", f"Nov 25 12:00:00 n1 kernel: {LOST}", "xid 79", "xid/79", "Xid 79"],
)
def test_explain_names_the_row(line: str) -> None:
    assert "\n  row       xid.codes.79\n  action    unfit\n" in _explained(line)
    assert _explained(line).endswith("from      the shipped table")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("gpu-throtle 64", "unknown kind of signal 'gpu-throtle': did you mean 'gpu-throttle'?"),
        ("gpu-throttle heat", "'heat' is no code of gpu-throttle: a code is a whole number"),
        ("gpu-throttle-over", "gpu-throttle-over ends a signal of the kind gpu-throttle, and has no row"),
    ],
)
def test_explain_names_the_mistake_in_the_name_of_a_signal(
    text: str, mistake: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site = tmp_path / "empty.toml"
    site.touch()
    assert main(["policy", "explain", "--policy", str(site), text]) == 64
    assert capsys.readouterr() == ("", f"muster: {mistake}\n")


def test_explain_tells_the_window_the_response_and_the_source_of_a_sensors_signal() -> None:
    words = _explained("gpu-throttle 0x40")
    assert "response  swap" in words
    assert "when      for 20% of 120 s; over when it held for at most 5% of 600 s" in words
    assert "source    NVML 0x40" in words
    assert "signal gpu-throttle of any other code\n  row       gpu-throttle.default" in _explained("gpu-throttle")


def test_explain_tells_what_the_sites_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[xid.codes]\n79 = { action = "ignore" }\n')
    words = _explained(LOST, Policy.load(file))
    assert "action    ignore\n" in words
    assert "from      site.toml: action; the rest: the shipped table" in words


def test_explain_says_that_an_error_is_one_of_a_program_unless_the_site_says_otherwise(tmp_path: Path) -> None:
    """A row of the site's file keeps what it does not name."""
    file = tmp_path / "policy.toml"
    file.write_text('[xid.codes]\n31 = { action = "unfit", reason = "ours" }\n13 = { by_program = false }\n')
    policy = Policy.load(file)
    assert "program   by_program: " in _explained("xid 31", policy)
    assert "action    unfit\n" in _explained("xid 31", policy)
    assert "by_program: " not in _explained("xid 13", policy)
    assert "by_program: " not in _explained("xid 79", policy)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("usb 1-1: Product: " + LOST, "only if it begins with the kernel's own words"),
        ("12,1,2,-;" + LOST, "a program wrote this record"),
        ("3,1,2,c;EXT4-fs (sda1): Remounting filesystem read-only", "a fragment of a line"),
        ("", "only if it begins"),
        ("toaster 3", "the kinds of signals are xid, "),
    ],
)
def test_what_means_nothing_is_said_and_is_no_failure(
    text: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site = tmp_path / "empty.toml"
    site.touch()
    assert main(["policy", "explain", "--policy", str(site), text]) == 0
    assert capsys.readouterr().out.startswith("this means nothing to Muster")
    assert reason in _explained(text)


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (f"3,4711,12500000,-;{LOST}", 12.5),
        (f"3,4711,12500000,-,caller=T1;{LOST}", 12.5),
        (f"<3>[   12.500000] {LOST}", 12.5),
        (f"kern  :err   : [   12.500000] {LOST}", 12.5),
        (f"[   12.500000] {LOST}", 12.5),
        (f"[   12.500000][  T123] {LOST}", 12.5),
        (f"[   12.500000] node1 kernel: {LOST}", 12.5),
        (f"[Wed Nov 25 12:00:00 2026] {LOST}", 1795608000.0),
        (f"2026-11-25T12:00:00+00:00 node1 kernel: {LOST}", 1795608000.0),
        (f"2026-11-25T13:00:00+0100 node1 kernel: {LOST}", 1795608000.0),
        (f"2026-11-25T12:00:00,000000+00:00 {LOST}", 1795608000.0),
        (f"kern  :err   : 2026-11-25T12:00:00,000000+00:00 {LOST}", 1795608000.0),
        (f"kern  :err   : [Wed Nov 25 12:00:00 2026] {LOST}", 1795608000.0),
        (f"kern  :err   : {LOST}", None),
        (f"kern  :err   : [   12.500000] [   T1234] {LOST}", 12.5),
        (f"[   12.500000 <    0.000005>] {LOST}", 12.5),
        (f"[<    0.000005>] {LOST}", None),
        (f"[Wed Nov 25 12:00:00 2026] [ T1234] {LOST}", 1795608000.0),
        (f"[Wed Nov 25 12:00:00 2026 <    0.000005>] {LOST}", 1795608000.0),
        (f"Wed 2026-11-25 12:00:00 UTC node1 kernel: {LOST}", 1795608000.0),
        (f"1795608000.000000 node1 kernel: {LOST}", 1795608000.0),
        (f"Nov 25 12:00:00.123456 node1 kernel: {LOST}", 975153600.0),
        (f"[Nov25 12:00] {LOST}", None),
        (f"[  +0.000005] {LOST}", None),
        (f"2026-11-25T12:00:00.000000+00:00 node1 kernel: [   12.500000] {LOST}", 1795608000.0),
        (_in_journal(SYSLOG_FACILITY="0", MESSAGE=LOST), 1795608000.0),
        (_in_journal(MESSAGE=list(LOST.encode())), 1795608000.0),
        (f"Nov 25 12:00:00 node1 kernel: {LOST}", 975153600.0),
        (f"Nov  5 12:00:00 node1 kernel: [   12.500000] {LOST}", 973425600.0),
        (LOST, None),
    ],
)
def test_every_format_of_a_log_is_read(line: str, at: float | None) -> None:
    read = read_line(line.encode())
    assert (read.record.message, read.record.facility, read.at) == (LOST, 0, at)


@pytest.mark.parametrize(
    "line",
    [
        f"12,1,2,-;{LOST}",
        f"<12>[ 1.0] {LOST}",
        f"user  :notice: [ 1.0] {LOST}",
        f"user  :notice: 2026-11-25T12:00:00,000000+00:00 {LOST}",
        _in_journal(SYSLOG_FACILITY="3", MESSAGE=LOST),
        _in_journal(_TRANSPORT="stdout", SYSLOG_FACILITY="0", MESSAGE=LOST),
    ],
)
def test_where_a_format_says_that_a_program_wrote_it_the_record_is_ignored(line: str) -> None:
    signals, replay = _replayed(line)
    assert signals == []
    assert replay.counts.of_programs == 1


@pytest.mark.parametrize("start", ["node1 python[7]: ", "x ", "kernel: "])
def test_a_line_of_another_program_in_syslog_is_no_error(start: str) -> None:
    assert _replayed(f"Nov 25 12:00:00 {start}{LOST}")[0] == []


def test_replay_tells_what_would_have_come_and_when() -> None:
    signals, replay = _replayed(
        f"[   10.000000] {LOST}",
        f"[   10.500000] {LOST}",  # the driver repeats itself
        f"[  100.000000] {FAULT}",
        f"[  200.000000] {PENDING}",
        "[  300.000000] usb 1-1: new device",
    )
    assert signals == [
        "10.000000  unfit: Xid 79: GPU has fallen off the bus (0000:3b:00)",
        "100.000000  rank: Xid 31: GPU memory page fault (0000:3b:00)",
        "200.000000  degraded, flush: Xid 63: memory row remap pending (0000:3b:00)",
    ]
    assert list(replay.summary()) == [
        "5 lines: 3 with an error, 0 of programs (ignored), 0 without a time, 0 too long (ignored); 1 boots",
        "       1 xid.codes.31",
        "       1 xid.codes.63",
        "       1 xid.codes.79",
    ]


def test_a_signal_that_the_loss_of_a_peer_may_explain_says_so() -> None:
    signals, _ = _replayed("[ 10.000000] NVRM: Xid (PCI:0000:3b:00): 74, NVLink: fatal error detected on link 4")
    assert signals == ["10.000000  unfit, unless the loss of a peer explains it: Xid 74: NVLink error (0000:3b:00)"]


def test_a_time_that_goes_back_is_another_boot() -> None:
    signals, replay = _replayed(f"[ 5000.000000] {LOST}", f"[ 4999.999000] {FAULT}", f"[    0.500000] {LOST}")
    assert len(signals) == 3
    assert replay.counts.boots == 2


def test_a_line_that_is_too_long_is_counted_and_not_kept() -> None:
    log = io.BytesIO(b"x" * (3 * MAX_LINE_BYTES) + b"\n\n" + LOST.encode() + b"\r\n" + b"y" * (MAX_LINE_BYTES + 1))
    replay = Replay(SHIPPED)
    assert len(list(replay.lines(bounded_lines(log)))) == 1
    assert (replay.counts.lines, replay.counts.too_long) == (3, 2)


def test_trouble_of_a_driver_in_unknown_words_is_counted_and_shown() -> None:
    lines = [
        f"[   10.000000] {LOST}",
        "[   10.200000] NVRM: a detail of the error before, which failed",
        "[   20.000000] NVRM: GPU0 gpuDoWhatever: timeout of the new engine",
        "[   21.000000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64",
        "[   22.000000] mlx5_core 0000:3b:00.0: new:7: lane 3 is stuck",
        "[   23.000000] mlx5_core 0000:3b:00.0: new:7: lane 4 is stuck",
        "[   24.000000] mlx5_core 0000:3b:00.0 eth0: Link up",
        "[   25.000000] usb 1-1: device descriptor read/64, error -71",
    ]
    signals, replay = _replayed(*lines, f"[    1.000000] {FAULT}")  # after a boot, counts go on
    assert len(signals) == 2
    assert list(replay.summary())[-2:] == [
        "       2 not understood: trouble of mlx5_core; the newest: mlx5_core 0000:3b:00.0: new:7: lane 4 is stuck",
        "       1 not understood: trouble of NVRM; the newest: NVRM: GPU0 gpuDoWhatever: timeout of the new engine",
    ]
    assert "mlx5_core speaks of trouble in words that Muster does not know" in _explained(lines[4])
    assert "speaks of trouble" not in _explained(f"12,1,2,-;{lines[4][15:]}")  # a program's


def test_replay_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe\n" + f"[ 1.0] {LOST}\n".encode())
    (tmp_path / "site.toml").write_text('[xid.codes]\n79 = { action = "rank" }\n')
    assert main(["policy", "replay", str(tmp_path / "log"), "--policy", str(tmp_path / "site.toml")]) == 0
    assert "rank: Xid 79" in capsys.readouterr().out
    assert main(["policy", "replay", str(tmp_path / "absent"), "--policy", str(tmp_path / "site.toml")]) == 64


BROKEN = (
    *(b"[Xyz Nov 99 99:99:99 2026] a", b"9999-99-99T99:99:99 b", b'{"MESSAGE":', b'{"":' + b"[" * 8000),
    *(b'{"MESSAGE":[999],"__REALTIME_TIMESTAMP":"1"}', b'{"MESSAGE":1,"__REALTIME_TIMESTAMP":1e999}'),
)


@given(st.lists(st.one_of(st.binary(), st.sampled_from(BROKEN))))
def test_no_garbage_ends_a_replay(lines: list[bytes]) -> None:
    replay = Replay(SHIPPED)
    list(replay.lines(bounded_lines(io.BytesIO(b"\n".join(lines)))))
    assert list(replay.summary())
