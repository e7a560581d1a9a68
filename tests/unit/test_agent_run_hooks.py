"""The user's hooks: what the batch process tells them, and when it waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.agent.batch.run_hooks import FORMAT, MOST_WAITING, Hooked, HookQueue, execute, messages
from muster.daemon.agent.batch.srun import ALL_LAUNCHED
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.hooks import messages as of_site
from muster.launcher.errors import WrongInput
from muster.launcher.spec.spec import parse
from muster.v1.api_pb2 import BatchRef, GangView, RankView, RecoveryView
from muster.v1.common_pb2 import JobHook

RUNNING = GangView(
    gang_id="g", name="tiny", owner_uid=7, slurm_job_ids=[42], phase="RUNNING", generation=1,
    ranks=[RankView(rank=0, node="n1"), RankView(rank=1, node="n1"), RankView(rank=2, node="n3")],
)  # fmt: skip
LEAST = 'name = "tiny"\nnodes = 1\ncommand = "true"\nrun_dir = "/shared/tiny"\n'


def view(phase: str = "RUNNING", *recoveries: tuple[int, str], final: bool = False, **more: Any) -> GangView:
    """RUNNING, with other values."""
    shown = GangView(
        phase=phase, final=final,
        recoveries=[RecoveryView(generation=g, action=a, cause="why", started_s=5.0) for g, a in recoveries], **more,
    )  # fmt: skip
    whole = GangView()
    whole.CopyFrom(RUNNING)
    whole.MergeFrom(shown)
    return whole


def told(before: GangView | None, now: GangView) -> list[tuple[str, str]]:
    return [(message["occasion"], message["text"]) for message in messages(before, now, 1.0)]


def test_each_occasion_is_told_once() -> None:
    swapped = view("RUNNING", (2, "swap"))
    assert told(RUNNING, RUNNING) == []
    assert told(RUNNING, swapped) == [("swap", "generation 2 starts: swap: why")]
    assert told(swapped, swapped) == []
    again = view("RUNNING", (2, "swap"), (3, "restart in place"), (4, "planned swap"))
    assert [occasion for occasion, _ in told(swapped, again)] == ["restart", "swap"]
    requeued = view("REQUEUED", reason="no spare is left")
    assert told(RUNNING, requeued) == [("requeue", "the job is requeued: no spare is left")]
    assert told(requeued, requeued) == []
    failed = view("FAILED", final=True, exit_code=93, reason="no progress")
    assert told(RUNNING, failed) == [("failure", "the job is FAILED with exit code 93: no progress")]
    assert told(failed, failed) == []
    assert told(RUNNING, view("CANCELLED", final=True)) == [("end", "the job is CANCELLED with exit code 0: done")]


def test_a_run_does_not_tell_what_an_earlier_run_has_told() -> None:
    first = view("REQUEUED", (2, "swap"))
    assert told(None, first) == []
    assert told(first, view("RUNNING", (2, "swap"), (3, "requeue"))) == [
        ("restart", "generation 3 starts: requeue: why")
    ]
    assert told(None, view("DONE", (2, "swap"), final=True)) == [("end", "the job is DONE with exit code 0: done")]


def test_a_recovery_that_has_not_started_ranks_yet_is_told_later() -> None:
    recovering = view("RECOVERING")
    recovering.recoveries.append(RecoveryView(generation=2, cause="n1 is lost"))
    assert told(None, recovering) == []
    assert told(recovering, view("RUNNING", (2, "swap"))) == [("swap", "generation 2 starts: swap: why")]


def test_the_message_has_the_keys_of_the_sites_hooks() -> None:
    state = DurableState()
    apply(state, facts.GangRegistered("g", 42, 7, "tiny", GangSpec(1, 0), "{}"), 1.0)
    for phase in ("GATHERING", "PREFLIGHT", "STARTING", "RUNNING"):
        apply(state, facts.PhaseChanged("g", of_site.Phase(phase), ""), 1.0)
    apply(state, facts.GenerationFenced("g", 1, "why", True, "n1", 3, 1.0), 1.0)
    started = facts.GenerationStarted("g", 2, (), (), "n1", 1, None, (), "", 1.0, "swap")
    apply(state, started, 1.0)
    (site,) = of_site.messages([started], state, 1.0)
    (own,) = messages(RUNNING, view("RUNNING", (2, "swap")), 1.0)
    expected = site.as_json()
    assert own.keys() == expected.keys()
    assert own["details"].keys() == expected["details"].keys()
    assert own["details"]["recovery"].keys() == expected["details"]["recovery"].keys()
    assert (own["format"], own["job"], own["details"]["nodes"]) == (of_site.FORMAT, 42, ["n1", "n3"])
    assert FORMAT == of_site.FORMAT


class Answers:
    """A coordinator that gives one view after the other."""

    def __init__(self, *views: GangView) -> None:
        self._views = list(views)

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView:
        return self._views.pop(0)


def hook(lines: str, *on: str, timeout_s: float = 60.0) -> JobHook:
    return JobHook(name="mine", on=on, command=["/bin/sh", "-c", lines], timeout_s=timeout_s)


async def test_a_hook_gets_its_messages_in_run_dir_and_the_end_waits_for_it(tmp_path: Path) -> None:
    lines = 'cat >> got; echo " $MUSTER_HOOK $MUSTER_OCCASION" >> got'
    ended = view("DONE", (2, "swap"), final=True)
    answers = Answers(RUNNING, view("RUNNING", (2, "swap")), view("REQUEUED", (2, "swap")), ended)
    hooked = Hooked(answers, [hook(lines, "swap", "end")], str(tmp_path))
    for _ in range(4):
        await hooked.view()
    first, second = (tmp_path / "got").read_text().splitlines()
    assert (first.endswith(" mine swap"), second.endswith(" mine end")) == (True, True)
    message = json.loads(first.rpartition("}")[0] + "}")
    assert (message["hook"], message["details"]["recovery"]["action"]) == ("mine", "swap")


async def test_nothing_waits_for_a_hook_while_the_job_runs(tmp_path: Path) -> None:
    hooked = Hooked(Answers(RUNNING, view("RUNNING", (2, "swap")), RUNNING), [hook("sleep 600", "swap")], str(tmp_path))
    async with asyncio.timeout(60):
        for _ in range(3):
            await hooked.view()
        await hooked._queues[0].close(job_is_over=False)  # it is killed when the run is over


@pytest.mark.parametrize(
    ("lines", "timeout_s", "words"),
    [
        ("exit 3", 60.0, "hook mine ended with status 3"),
        ("sleep 600 & wait", 0.05, "hook mine had not ended after 0.05 s, and is killed"),
    ],
)
async def test_a_hook_that_fails_is_said_in_the_log(
    lines: str, timeout_s: float, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = messages(RUNNING, view("FAILED", final=True), 1.0)
    await execute(hook(lines, "failure", timeout_s=timeout_s), message, str(tmp_path))
    assert words in caplog.text


async def test_a_hook_survives_the_signal_that_ends_a_run(tmp_path: Path) -> None:
    (message,) = messages(RUNNING, view("REQUEUED"), 1.0)
    await execute(hook("kill -TERM $$; echo alive > said", "requeue"), message, str(tmp_path))
    assert (tmp_path / "said").read_text() == "alive\n"


async def test_a_slow_hook_is_not_told_of_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    one = HookQueue(hook("true", "swap"), str(tmp_path))
    (message,) = messages(RUNNING, view("RUNNING", (2, "swap")), 1.0)
    for _ in range(MOST_WAITING + 1):
        one.put(message)
    assert "hook mine is too slow: it is not told of a swap" in caplog.text
    await one.close(job_is_over=True)


def test_hooks_of_a_job_come_from_its_file() -> None:
    text = f'{LEAST}[hooks.mail]\non = ["failure", "end"]\ncommand = ["mail", "-s", "it ended", "me"]\n'
    assert list(parse(text, "job.toml").to_proto("/").hooks) == [
        JobHook(name="mail", on=["failure", "end"], command=["mail", "-s", "it ended", "me"], timeout_s=30.0)
    ]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('[hooks.mail]\non = ["fleet"]\ncommand = ["mail"]\n', "hooks.mail.on"),
        ('[hooks.mail]\non = ["end"]\n', "hooks.mail.command"),
        ('[hooks.mail]\non = ["end"]\ncommand = ["mail"]\nurl = "https://x"\n', "hooks.mail.url"),
        ('[hooks."a b"]\non = ["end"]\ncommand = ["mail"]\n', "hooks"),
        ('[hooks.mail]\non = ["end"]\ncommand = ["mail"]\ntimeout_s = 0\n', "hooks.mail.timeout_s"),
        ('[hooks.mail]\non = ["end"]\ncommand = ["a\\u0000b"]\n', "NUL"),
    ],
)
def test_a_wrong_hook_is_refused_by_name(table: str, words: str) -> None:
    with pytest.raises(WrongInput) as refused:
        parse(LEAST + table, "job.toml")
    assert words in refused.value.message
    assert "Tuple" not in refused.value.message
