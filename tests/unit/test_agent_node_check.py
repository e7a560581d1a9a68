"""The agent's check of its own node: with the job's interpreter, and reported as it goes."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from muster.daemon.agent.own_node_check import OwnNodeCheck
from muster.daemon.agent.ranks.zygote_handle import ZygoteSpec
from muster.v1.common_pb2 import CheckOutcome, NodeCheck

BROKEN = "torch can't be imported: ImportError:\nlibcudart.so.13"


async def all_imported() -> str:
    return ""


async def broken() -> str:
    return BROKEN


async def never_imported() -> str:
    return await asyncio.Future()


@pytest.fixture
def measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no numpy, so that a check takes a tenth of the time."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('numpy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def reported(
    interpreter: str,
    wanted: bool = True,
    work_dir: str = "",
    imports: Callable[[], Awaitable[str]] = all_imported,
    imports_deadline_s: float = 60.0,
) -> list[NodeCheck | None]:
    """What the agent reports, from its start on."""
    spec = ZygoteSpec((interpreter, "train.py"), (), dict(os.environ), work_dir)

    async def run() -> list[NodeCheck | None]:
        check = OwnNodeCheck(wanted, spec, lambda: statuses.append(check.status), imports, imports_deadline_s)
        statuses = [check.status]
        await check.run()
        return statuses

    return asyncio.run(run())


def checked(interpreter: str, wanted: bool = True, work_dir: str = "") -> list[int]:
    """The outcomes that the agent reports, from its start on."""
    return [status.outcome if status is not None else 0 for status in reported(interpreter, wanted, work_dir)]


@pytest.mark.usefixtures("measures_nothing")
def test_the_agent_reports_that_the_check_runs_and_then_what_it_found() -> None:
    assert checked(sys.executable) == [CheckOutcome.CHECK_OUTCOME_RUNNING, CheckOutcome.CHECK_OUTCOME_PASSED]


def test_without_a_preflight_nothing_is_reported() -> None:
    assert checked("/no/python3", wanted=False) == [0]


def test_an_interpreter_that_the_node_lacks_fails_the_check() -> None:
    assert checked("/no/python3")[-1] == CheckOutcome.CHECK_OUTCOME_FAILED


def test_a_missing_working_folder_fails_the_check(tmp_path: Path) -> None:
    assert checked(sys.executable, work_dir=str(tmp_path / "none"))[-1] == CheckOutcome.CHECK_OUTCOME_FAILED


def test_a_library_of_the_job_that_can_not_be_imported_fails_the_check() -> None:
    status = reported(sys.executable, imports=broken)[-1]
    assert status is not None
    words = "torch can't be imported: ImportError: libcudart.so.13"
    assert (status.outcome, status.reason) == (CheckOutcome.CHECK_OUTCOME_FAILED, words)
    assert status.gflops > 0


def test_what_the_check_itself_has_found_comes_before_the_imports() -> None:
    status = reported("/no/python3", imports=broken)[-1]
    assert status is not None
    assert "torch" not in status.reason


@pytest.mark.usefixtures("measures_nothing")
def test_imports_that_last_longer_than_a_check_may_accuse_nobody() -> None:
    status = reported(sys.executable, imports=never_imported, imports_deadline_s=0.0)[-1]
    assert status is not None
    assert status.outcome == CheckOutcome.CHECK_OUTCOME_PASSED
