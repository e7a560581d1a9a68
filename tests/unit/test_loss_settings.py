"""[loss] of job.toml and of the policy: from the files to the rule that the core goes by."""

import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from muster.daemon.coordinator.core.losses.loss_rule import LossChoice, LossResponse, LossRule
from muster.daemon.coordinator.core.losses.loss_watch import LossKind
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.metrics.event_counters import EventCounters
from muster.daemon.coordinator.policy.policy import Policy, PolicyError
from muster.daemon.coordinator.services.conversion import InvalidMessage
from muster.daemon.coordinator.services.job_specs import gang_spec
from muster.launcher.errors import WrongInput
from muster.launcher.output.checkpoint_lines import why_not_by_itself
from muster.launcher.spec.spec import parse
from muster.v1 import api_pb2, common_pb2

JOB = 'name = "t"\nnodes = 1\ncommand = ["true"]\nrun_dir = "/s"\n'


def test_the_shipped_policy_only_records() -> None:
    assert Policy.load().limits.loss == LossRule()


def test_a_site_and_a_job_choose_and_the_job_counts(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[loss]\nspike = "stop"\ndeviations = 6.5\n')
    site = Policy.load(tmp_path / "policy.toml").limits.loss
    assert site == LossRule(spike=LossResponse.STOP, deviations=6.5)
    job = parse(f'{JOB}[loss]\nspike = "record"\nplateau = "stop"\nplateau_values = 0\n', "job.toml")
    chosen = gang_spec(job.to_proto("/work")).loss
    assert chosen == LossChoice(spike=LossResponse.RECORD, plateau=LossResponse.STOP, plateau_values=0)
    rule = LossRule(deviations=6.5, plateau=LossResponse.STOP, plateau_values=0)
    assert chosen.over(site) == rule
    assert gang_spec(parse(JOB, "job.toml").to_proto("/work")).loss == LossChoice()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('spike = "halt"', "loss.spike = 'halt': a response to a loss is one of record, stop, roll_back"),
        ('plateau = "roll_back"', 'plateau = "roll_back": record or stop'),
        ("deviations = 1", "loss.deviations = 1: Input should be greater than or equal to 3"),
        ("windows = 64", "unknown key loss.windows: did you mean 'window'?"),
    ],
)
def test_a_mistake_in_the_policy_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "policy.toml").write_text(f"[loss]\n{line}\n")
    with pytest.raises(PolicyError) as error:
        Policy.load(tmp_path / "policy.toml")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('spike = "halt"', "loss.spike = 'halt': must be 'record', 'stop' or 'roll_back'"),
        ('plateau = "roll_back"', "loss.plateau = 'roll_back': must be 'record' or 'stop'"),
        ("in_a_row = 0", "loss.in_a_row = 0: must be 1 or more"),
        ("window = 1.5", "loss.window = 1.5: must be a whole number"),
    ],
)
def test_a_mistake_in_job_toml_is_named(line: str, words: str) -> None:
    with pytest.raises(WrongInput) as error:
        parse(f"{JOB}[loss]\n{line}\n", "job.toml")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (common_pb2.LossChoice(deviations=math.nan), r"loss.deviations = nan must be 3 to 1000"),
        (common_pb2.LossChoice(window=1 << 30), r"loss.window = 1073741824 must be 16 to 1024"),
        (common_pb2.LossChoice(spike="halt"), r"loss.spike = 'halt' must be record, stop or roll_back"),
        (common_pb2.LossChoice(plateau="roll_back"), r"loss.plateau = 'roll_back' must be record or stop"),
    ],
)
def test_a_launcher_that_checks_nothing_is_refused(choice: common_pb2.LossChoice, words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        gang_spec(common_pb2.JobSpec(name="t", nodes=1, ranks_per_node=1, loss=choice))


def test_findings_are_counted_by_kind_and_response() -> None:
    registry = CollectorRegistry()
    counters = EventCounters(registry, DurableState(), lambda: 0.0, Policy.load())
    counters.note_facts(
        [
            facts.NotFiniteReported("g", 1, 0, "n1", 9, "loss = nan"),
            facts.LossNoted("g", 1, LossKind.SPIKE, "n1", 9, 8.0, 2.0, LossResponse.STOP),
        ]
    )
    found = {
        labels: registry.get_sample_value("muster_loss_findings_total", {"kind": labels[0], "response": labels[1]})
        for labels in (("not finite", "record"), ("spike", "stop"), ("spike", "record"))
    }
    assert found == {("not finite", "record"): 1, ("spike", "stop"): 1, ("spike", "record"): 0}


def test_a_job_that_was_stopped_for_its_loss_does_not_go_on_by_itself() -> None:
    words = "the loss on n1 has a spike at step 30: 8, usually 2"
    assert words in why_not_by_itself(api_pb2.GangView(phase="FAILED", exit_code=98, last_loss=words, reason=words))
    assert not why_not_by_itself(api_pb2.GangView(phase="FAILED", exit_code=98, last_loss=words, reason="time limit"))
