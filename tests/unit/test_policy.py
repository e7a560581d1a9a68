"""The table from hardware signals to verdicts: what ships, and what a site may change."""

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.detection.correlated_faults import ECHO_S
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.policy.policy import Judgement, Policy, PolicyError

SHIPPED = Policy.load()


def _with(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return Policy.load(path)


@pytest.mark.parametrize("code", [48, 62, 79, 119, 120, 140])
def test_a_fatal_xid_makes_a_node_unfit(code: int) -> None:
    assert SHIPPED.judge("xid", code).verdict == "unfit"


@pytest.mark.parametrize("code", [74, 94, 95, *range(144, 151)])
def test_nvlink_and_contained_xids_may_be_echoes(code: int) -> None:
    assert SHIPPED.judge("xid", code).verdict == "echo"


@pytest.mark.parametrize("code", [63, 64, 92, 160])
def test_precursors_degrade(code: int) -> None:
    assert SHIPPED.judge("xid", code).verdict == "degraded"


def test_the_file_says_for_how_long_a_peers_loss_is_waited_for() -> None:
    text = files("muster.daemon.coordinator.policy").joinpath("policy.toml").read_text()
    assert re.findall(r"lost within ([\d.]+) s", text) == [f"{ECHO_S:g}"] * 2


@pytest.mark.parametrize("code", [13, 31, 43, 45, 69])
def test_errors_of_a_program_say_nothing_of_the_node(code: int) -> None:
    assert SHIPPED.judge("xid", code).verdict == "rank"


@pytest.mark.parametrize(
    ("kind", "code", "judgement"),
    [
        ("xid", 79, Judgement("unfit", "Xid 79: GPU has fallen off the bus")),
        ("xid", 4711, Judgement("degraded", "Xid 4711: unknown to the policy table")),
        ("xid-nonfatal", 149, Judgement("degraded", "Xid 149: non-fatal NVLink error")),
        ("gpu-lost", 0, Judgement("unfit", "GPU lost: GPU has fallen off the bus")),
        ("gpu-recovery", 0, Judgement("ignore", "GPU recovery action 0: none")),
        ("gpu-recovery", 2, Judgement("unfit", "GPU recovery action 2: node reboot required")),
        ("sxid", 23001, Judgement("unfit", "SXid 23001: fatal NVSwitch fabric error")),
        ("sxid-nonfatal", 20001, Judgement("ignore", "SXid 20001: non-fatal NVSwitch error")),
        ("toaster", 3, Judgement("ignore", "toaster 3: a kind of signal that this policy does not know")),
    ],
)
def test_a_signal_gets_a_verdict_and_a_reason(kind: str, code: int, judgement: Judgement) -> None:
    assert SHIPPED.judge(kind, code) == judgement


def test_every_xid_of_the_catalogue_has_a_row() -> None:
    assert SHIPPED.codes("xid") >= set(range(1, 178))


def test_every_reason_fits_a_drain_reason() -> None:
    reasons = [SHIPPED.judge("xid", code).reason for code in SHIPPED.codes("xid")]
    assert all(len(reason) < 90 and '"' not in reason and "\n" not in reason for reason in reasons)


def test_a_site_changes_what_it_names(tmp_path: Path) -> None:
    policy = _with(
        tmp_path,
        """
        [xid.codes]
        63 = { verdict = "ignore" }
        999 = { verdict = "unfit", reason = "board alarm" }
        [xid]
        default = { verdict = "rank" }
        """,
    )
    assert policy.judge("xid", 63) == Judgement("ignore", "Xid 63: memory row remap pending")
    assert policy.judge("xid", 999) == Judgement("unfit", "Xid 999: board alarm")
    assert policy.judge("xid", 4711) == Judgement("rank", "Xid 4711: unknown to the policy table")
    assert policy.judge("xid", 79) == SHIPPED.judge("xid", 79)


def test_a_site_changes_its_limits(tmp_path: Path) -> None:
    policy = _with(tmp_path, "[limits]\nnodes_per_hour = 3\nobserve = true\n")
    assert policy.limits == replace(SHIPPED.limits, nodes_per_hour=3, observe=True)
    assert policy.judge("xid", 79) == SHIPPED.judge("xid", 79)
    assert SHIPPED.limits == Limits()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[xd.codes]\n", "unknown kind of signal 'xd': did you mean 'xid'?"),
        ("[toaster]\n", "unknown kind of signal 'toaster'; known: xid, xid-nonfatal, gpu-recovery"),
        ("[xid]\ncods = {}\n", "unknown key xid.cods: did you mean 'codes'?"),
        ('[xid.codes]\n79 = { verdic = "unfit" }\n', "unknown key xid.codes.79.verdic: did you mean 'verdict'?"),
        (
            '[xid.codes]\n79 = { verdict = "fatal" }\n',
            "'fatal': a verdict is one of unfit, echo, degraded, rank, ignore",
        ),
        ('[xid.codes]\n999 = { verdict = "unfit" }\n', "xid.codes.999.reason is missing: a new row needs verdict and"),
        ('[xid.codes]\nbus = { verdict = "unfit", reason = "x" }\n', "xid.codes.bus: a code is a whole number"),
        ('[xid.codes]\n79 = { reason = "a \\"b\\"" }\n', "no quotation mark"),
        ("[xid]\ncodes = 3\n", "xid: codes = 3: a table is needed here"),
        ("[xid\n", "is not TOML"),
        ("[limits]\nnodes_an_hour = 3\n", "unknown key limits.nodes_an_hour: did you mean 'nodes_per_hour'?"),
        ("[limits]\nfraction = 7\n", "limits.fraction = 7"),
        ("[limits]\nobserve = 3\n", "limits.observe = 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PolicyError) as refused:
        _with(tmp_path, text)
    assert words in str(refused.value)
    assert str(tmp_path / "policy.toml") in str(refused.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="can't be read: No such file"):
        Policy.load(tmp_path / "absent.toml")
