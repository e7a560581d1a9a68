"""The policy: the action for each hardware signal, and what a site may change."""

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from muster.daemon.coordinator.core.detection.hardware_signals import PEER_LOSS_AFTER_S
from muster.daemon.coordinator.core.state.limits import Limits, StragglerRule
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.policy.policy import Policy, PolicyError, SignalDecision, SignalRule

SHIPPED = Policy.load()


def _with(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return Policy.load(path)


@pytest.mark.parametrize("code", [48, 62, 79, 119, 120, 140])
def test_a_fatal_xid_makes_a_node_unfit(code: int) -> None:
    assert SHIPPED.decide("xid", code).action == "unfit"


@pytest.mark.parametrize("code", [74, 94, 95, *range(144, 151)])
def test_an_nvlink_or_contained_memory_error_may_be_a_correlated_fault(code: int) -> None:
    assert SHIPPED.decide("xid", code).action == "unfit_unless_explained"


@pytest.mark.parametrize("code", [63, 64, 92, 160])
def test_a_precursor_makes_a_node_degraded(code: int) -> None:
    assert SHIPPED.decide("xid", code).action == "degraded"


@pytest.mark.parametrize(
    ("code", "response"), [(63, Response.FLUSH), (64, Response.SWAP), (92, Response.RECORD), (4711, Response.RECORD)]
)
def test_a_precursor_has_a_response(code: int, response: Response) -> None:
    assert SHIPPED.decide("xid", code).response is response


def test_a_site_changes_a_response_alone(tmp_path: Path) -> None:
    policy = _with(tmp_path, '[xid.codes]\n92 = { response = "swap" }\n')
    assert policy.decide("xid", 92) == replace(SHIPPED.decide("xid", 92), response=Response.SWAP)


def test_the_file_gives_the_time_within_which_a_peers_loss_explains_a_signal() -> None:
    text = files("muster.daemon.coordinator.policy").joinpath("policy.toml").read_text()
    assert re.findall(r"lost within ([\d.]+) s", text) == [f"{PEER_LOSS_AFTER_S:g}"] * 2


@pytest.mark.parametrize("code", [13, 31, 43, 45, 69])
def test_an_error_of_a_program_leaves_the_node_fit(code: int) -> None:
    assert SHIPPED.decide("xid", code).action == "rank"


@pytest.mark.parametrize(
    ("kind", "code", "decision"),
    [
        ("xid", 79, SignalDecision("unfit", "Xid 79: GPU has fallen off the bus")),
        ("xid", 4711, SignalDecision("degraded", "Xid 4711: unknown to the policy table")),
        ("xid-nonfatal", 149, SignalDecision("degraded", "Xid 149: non-fatal NVLink error")),
        ("gpu-lost", 0, SignalDecision("unfit", "GPU lost: GPU has fallen off the bus")),
        ("gpu-recovery", 0, SignalDecision("ignore", "GPU recovery action 0: none")),
        ("gpu-recovery", 2, SignalDecision("unfit", "GPU recovery action 2: node reboot required")),
        ("sxid", 23001, SignalDecision("unfit", "SXid 23001: fatal NVSwitch fabric error")),
        ("sxid-nonfatal", 20001, SignalDecision("ignore", "SXid 20001: non-fatal NVSwitch error")),
        ("xid", 64, SignalDecision("degraded", "Xid 64: memory row remap failed", Response.SWAP)),
        ("toaster", 3, SignalDecision("ignore", "toaster 3: a kind of signal that this policy does not know")),
    ],
)
def test_a_signal_gets_an_action_and_a_reason(kind: str, code: int, decision: SignalDecision) -> None:
    assert SHIPPED.decide(kind, code) == decision


def test_every_xid_of_the_catalogue_has_a_row() -> None:
    assert SHIPPED.codes("xid") >= set(range(1, 178))


def test_every_reason_fits_a_drain_reason() -> None:
    reasons = [SHIPPED.decide("xid", code).reason for code in SHIPPED.codes("xid")]
    assert all(len(reason) < 90 and '"' not in reason and "\n" not in reason for reason in reasons)


def test_a_site_file_with_the_former_names_means_the_same(tmp_path: Path) -> None:
    former = _with(tmp_path, '[xid.codes]\n63 = { verdict = "echo", reason = "echo" }\n')
    assert former.decide("xid", 63).action == "unfit_unless_explained"
    assert former.decide("xid", 63).reason.endswith("echo")
    with pytest.raises(PolicyError, match=r"unknown key xid\.codes\.63\.verdict"):
        _with(tmp_path, '[xid.codes]\n63 = { verdict = "rank", action = "rank" }\n')


def test_a_site_file_changes_the_rows_that_it_names(tmp_path: Path) -> None:
    policy = _with(
        tmp_path,
        """
        [xid.codes]
        63 = { action = "ignore" }
        999 = { action = "unfit", reason = "board alarm" }
        [xid]
        default = { action = "rank" }
        """,
    )
    assert policy.decide("xid", 63).action == "ignore"
    assert policy.decide("xid", 63).reason == "Xid 63: memory row remap pending"
    assert policy.decide("xid", 999) == SignalDecision("unfit", "Xid 999: board alarm")
    assert policy.decide("xid", 4711) == SignalDecision("rank", "Xid 4711: unknown to the policy table")
    assert policy.decide("xid", 79) == SHIPPED.decide("xid", 79)


def test_a_site_changes_its_limits(tmp_path: Path) -> None:
    policy = _with(tmp_path, "[limits]\nnodes_per_hour = 3\nobserve = true\n")
    assert policy.limits == replace(SHIPPED.limits, nodes_per_hour=3, observe=True)
    assert policy.decide("xid", 79) == SHIPPED.decide("xid", 79)
    assert SHIPPED.limits == Limits()


def test_a_row_says_how_long_its_condition_must_last(tmp_path: Path) -> None:
    policy = _with(
        tmp_path,
        """
        [xid.codes]
        63 = { when = { count = 3, window_s = 120, clear_s = 600 } }
        [gpu-throttle.codes]
        4 = { action = "degraded", reason = "r", source = "us", when = { share = 0, window_s = 0, clear_s = 60 } }
        64 = { when = { share = 0.9 } }
        """,
    )
    ours = set(policy.rules()) - set(SHIPPED.rules())
    assert ours == {
        SignalRule("xid", 63, 0, 120, 0, 600, count=3),
        SignalRule("gpu-throttle", 4, 0, 0, 0, 60),
        SignalRule("gpu-throttle", 64, 0.9, 120, 0.05, 600),
    }
    assert policy.decide("xid", 63) == SHIPPED.decide("xid", 63)


def test_the_end_of_a_signal_is_told_from_the_signal() -> None:
    assert SHIPPED.decide("xid-over", 63) == SignalDecision("over", "Xid 63: memory row remap pending: over")
    assert SHIPPED.decide("toaster-over", 3).action == "ignore"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[xd.codes]\n", "unknown kind of signal 'xd': did you mean 'xid'?"),
        ("[limits]\nswaps_per_hour = true\n", "limits.swaps_per_hour = True: Input should be a valid integer"),
        ('[limits]\nobserve = "no"\n', "limits.observe = 'no': Input should be a valid boolean"),
        ('[pool]\nwait_s = "60"\n', "pool.wait_s = '60': Input should be a valid number"),
        ("[toaster]\n", "unknown kind of signal 'toaster'; known: xid, xid-nonfatal, gpu-recovery"),
        (
            '[xid.codes]\n79 = { response = "move" }\n',
            "xid.codes.79.response = 'move': a response is one of record, flush, swap",
        ),
        ("[xid]\ncods = {}\n", "unknown key xid.cods: did you mean 'codes'?"),
        ('[xid.codes]\n79 = { actoin = "unfit" }\n', "unknown key xid.codes.79.actoin: did you mean 'action'?"),
        (
            '[xid.codes]\n79 = { action = "fatal" }\n',
            "'fatal': an action is one of unfit, unfit_unless_explained, ",
        ),
        ('[xid.codes]\n999 = { action = "unfit" }\n', "xid.codes.999.reason is missing: a new row needs action and"),
        ('[xid.codes]\nbus = { action = "unfit", reason = "x" }\n', "xid.codes.bus: a code is a whole number"),
        ('[xid.codes]\n79 = { reason = "a \\"b\\"" }\n', "no quotation mark"),
        ("[xid.codes]\n63 = { when = { shar = 1 } }\n", "unknown key xid.codes.63.when.shar: did you mean 'share'?"),
        ("[xid.codes]\n63 = { when = { share = 0.1 } }\n", "a condition needs share, window_s and clear_s"),
        ("[xid.codes]\n63 = { when = { share = 1.5, window_s = 1, clear_s = 1 } }\n", "xid.codes.63.when.share = 1.5"),
        (
            "[xid.codes]\n63 = { when = { share = 0.1, window_s = 9, clear_share = 0.2, clear_s = 9 } }\n",
            "xid.codes.63.when: clear_share must not exceed share",
        ),
        (
            "[xid.codes]\n63 = { when = { share = 0.1, window_s = 9, clear_s = 9 } }\n",
            "xid.codes.63.when: xid comes as single messages, so the condition needs count",
        ),
        (
            "[xid.codes]\n63 = { when = { share = 0.1, count = 3, window_s = 9, clear_s = 9 } }\n",
            "xid.codes.63.when: a condition needs either share or count",
        ),
        ("[xid.codes]\n63 = { when = { count = 0, window_s = 9, clear_s = 9 } }\n", "xid.codes.63.when.count = 0"),
        (
            "[xid.default]\nwhen = { count = 3, window_s = 9, clear_s = 9 }\n",
            "xid.default.when: a condition needs a code",
        ),
        (
            '[gpu-throttle.codes]\n4 = { action = "degraded", reason = "r" }\n',
            "gpu-throttle.codes.4.when is missing: a sensor samples gpu-throttle",
        ),
        (
            '[nvml-error.codes.1]\naction = "rank"\nreason = "r"\nwhen = { count = 3, window_s = 9, clear_s = 9 }\n',
            "nvml-error.codes.1.when: a sensor samples nvml-error, so the condition needs share",
        ),
        (
            "[gpu-throttle.codes]\n64 = { when = { window_s = 86400 } }\n",
            "gpu-throttle.codes.64.when: window_s must not exceed 3600 for a share",
        ),
        ("[xid]\ncodes = 3\n", "xid: codes = 3: this key needs a table"),
        ("[xid\n", "is not TOML"),
        pytest.param(f"[limits]\nswaps_per_hour = {'1' * 5000}\n", "more than 64 bits", id="digits"),
        pytest.param(f"[limits]\nswaps_per_hour = 0x{'f' * 5000}\n", "more than 64 bits", id="hexadecimal"),
        pytest.param("xid = " + "[" * 5000, "tables and lists inside each other", id="lists"),
        ("[limits]\nnodes_an_hour = 3\n", "unknown key limits.nodes_an_hour: did you mean 'nodes_per_hour'?"),
        ("[limits]\nfraction = 7\n", "limits.fraction = 7"),
        ("[limits]\nobserve = 3\n", "limits.observe = 3"),
    ],
)
def test_a_wrong_key_or_value_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PolicyError) as failed:
        _with(tmp_path, text)
    assert words in str(failed.value)
    assert str(tmp_path / "policy.toml") in str(failed.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="can't be read: No such file"):
        Policy.load(tmp_path / "absent.toml")


ROWS = [(kind, code) for kind in SHIPPED.kinds for code in (*sorted(SHIPPED.codes(kind)), None)]


def test_a_site_overrides_every_row_by_its_key(tmp_path: Path) -> None:
    wrong = {row: what for row in ROWS if (what := _wrong_when_overridden(tmp_path, *row))}
    assert wrong == {}


def _wrong_when_overridden(tmp_path: Path, kind: str, code: int | None) -> list[object]:
    """What a site's row in place of this one does not do; what it changes beside."""
    table, number = (f"[{kind}.default]", SHIPPED.free_code(kind)) if code is None else (f"[{kind}.codes.{code}]", code)
    policy = _with(tmp_path, f'{table}\naction = "degraded"\nresponse = "swap"\nreason = "ours"\nsource = "we"\n')
    others = [(other, n) for other, n in ROWS if (other, n) != (kind, code) and n is not None]
    wrong: list[object] = [other for other in others if policy.decide(*other) != SHIPPED.decide(*other)]
    row = policy.row(kind, number)
    overridden = (
        row is not None
        and (row.decision.action, row.decision.response, row.source) == ("degraded", Response.SWAP, "we")
        and row.decision.reason.endswith(": ours")
        and row.site_keys == ("action", "response", "reason", "source")
    )
    return wrong if overridden else [row, *wrong]


@pytest.mark.parametrize("code", ["063", "0063", "0x3F"])
def test_a_code_has_one_spelling(tmp_path: Path, code: str) -> None:
    """Otherwise a site could have two rows for one code, of which one counts."""
    with pytest.raises(PolicyError, match="written in digits only"):
        _with(tmp_path, f'[xid.codes]\n{code} = {{ action = "rank", reason = "r" }}\n')


def test_the_unfit_signals_are_those_that_the_policy_calls_unfit(tmp_path: Path) -> None:
    """For a kind whose default is unfit as well."""
    policy = _with(
        tmp_path, '[sxid.default]\naction = "unfit"\n[sxid.codes]\n7 = { action = "ignore", reason = "x" }\n'
    )
    unfit = {signals.kind: signals for signals in policy.unfit_signals()}
    assert unfit["sxid"].all_but
    for kind in ("xid", "sxid"):
        for code in range(200):
            expected = policy.decide(kind, code).action == "unfit"
            assert ((code in unfit[kind].codes) != unfit[kind].all_but) is expected, (kind, code)


def test_a_policy_that_only_observes_gives_nodes_no_word_of_their_own(tmp_path: Path) -> None:
    assert _with(tmp_path, "[limits]\nobserve = true\n").unfit_signals() == []


def test_a_straggler_is_shown_and_moves_nobody_unless_the_site_asks_for_it(tmp_path: Path) -> None:
    assert SHIPPED.limits.straggler == StragglerRule(share=0.9, window_s=300, response=Response.RECORD)
    text = '[straggler.codes.0]\nresponse = "swap"\nwhen = { window_s = 60 }\n'
    assert _with(tmp_path, text).limits.straggler == StragglerRule(share=0.9, window_s=60, response=Response.SWAP)


@pytest.mark.parametrize("action", ["rank", "ignore"])
def test_a_site_may_have_nothing_follow_from_a_straggler(tmp_path: Path, action: str) -> None:
    assert _with(tmp_path, f'[straggler.codes]\n0 = {{ action = "{action}" }}\n').limits.straggler is None


def test_ranks_alone_never_make_a_node_unfit(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"straggler.codes.0.action = 'unfit': degraded, rank or ignore"):
        _with(tmp_path, '[straggler.codes]\n0 = { action = "unfit" }\n')


def test_no_node_daemon_is_told_a_rule_about_ranks() -> None:
    assert "straggler" not in {rule.kind for rule in SHIPPED.rules()}


def test_a_site_says_how_long_the_account_of_goodput_is_kept(tmp_path: Path) -> None:
    assert Policy.load().goodput_kept_s == 400 * 86_400
    site = tmp_path / "site.toml"
    site.write_text("[goodput]\nkept_days = 30\n")
    assert Policy.load(site).goodput_kept_s == 30 * 86_400
    for text, words in (("kept_days = 0", "goodput.kept_days = 0"), ("keptdays = 3", "unknown key goodput.keptdays")):
        site.write_text(f"[goodput]\n{text}\n")
        with pytest.raises(PolicyError, match=words):
            Policy.load(site)
