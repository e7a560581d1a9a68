"""Converts nodes, jobs and topology from the output of Slurm's commands.

`--json` is the output of Slurm's data parser, v0.0.42 (24.11) to v0.0.45 (26.05). A field that a version lacks keeps
its default. Numbers have the form `{"set": bool, "infinite": bool, "number": n}`; some fields are plain numbers.

A record of another form raises UnknownForm, whatever it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.states import JobState, job_states, node_states
from muster.slurm.client.types import Job, Node, Partition

Record = Mapping[str, Any]
T = TypeVar("T")


class UnknownForm(ValueError):
    """A record or a text that Slurm does not print, or a newer Slurm prints."""


def _one_error(convert: Callable[[Record], T]) -> Callable[[Record], T]:
    """`convert`, with UnknownForm in place of each error that a value of a wrong type leads to."""

    @functools.wraps(convert)
    def converted(record: Record) -> T:
        try:
            return convert(record)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UnknownForm(repr(error)) from error

    return converted


@_one_error
def node(record: Record) -> Node:
    """Converts one element of the list "nodes" of `scontrol show node --json`. Raises UnknownForm."""
    states, strange = node_states(record["state"])
    return Node(
        name=_words(record["name"]),
        states=states,
        unrecognised=strange,
        address=_words(record.get("address")),
        hostname=_words(record.get("hostname")),
        reason=_words(record.get("reason")),
        reason_at=_time(record.get("reason_changed_at")),
        boot_time=_time(record.get("boot_time")),
        partitions=tuple(map(_words, record.get("partitions", ()))),
        gres=_words(record.get("gres")),
        memory_mib=_number(record.get("real_memory")) or 0,
    )


@_one_error
def job(record: Record) -> Job:
    """Converts one element of the list "jobs" of `squeue --json`. Raises UnknownForm."""
    state, flags, strange = job_states(record["job_state"])
    code, signal = _exit(state, record.get("exit_code", {}))
    limit = _number(record.get("time_limit"))
    return Job(
        id=_integer(record["job_id"]),
        state=state,
        flags=flags,
        unrecognised=strange,
        name=_words(record.get("name")),
        user_id=_integer(-1 if record.get("user_id") is None else record["user_id"]),
        user_name=_words(record.get("user_name")),
        partition=_words(record.get("partition")),
        account=_words(record.get("account")),
        # The description says more, where there is one: "launch failed requeued held".
        reason=_reason(_words(record.get("state_description")) or _words(record.get("state_reason"))),
        nodes=expand(_words(record.get("nodes"))),
        batch_host=_words(record.get("batch_host")),
        excluded=expand(_words(record.get("excluded_nodes"))),
        restart_count=_number(record.get("restart_cnt")) or 0,
        exit_code=code,
        exit_signal=signal,
        start_time=_time(record.get("start_time")),
        end_time=_time(record.get("end_time")),
        time_limit_s=None if limit is None else limit * 60,
        comment=_words(record.get("comment")),
        admin_comment=_words(record.get("admin_comment")),
        requeue=bool(record.get("requeue", False)),
        held=bool(record.get("hold", False)),
        dependency=_words(record.get("dependency")),
        work_dir=_words(record.get("current_working_directory")),
        switches=_switches(record),
        array_task=_array_task(record),
    )


@_one_error
def partition(record: Record) -> Partition:
    """Converts one element of the list "partitions" of `scontrol show partition --json`. Raises UnknownForm."""
    nodes = expand(_words(record.get("nodes", {}).get("configured")))
    return Partition(_words(record["name"]), _words(record.get("topology")), nodes)


def _array_task(record: Record) -> str:
    array, task = _number(record.get("array_job_id")), _number(record.get("array_task_id"))
    return f"{array}_{task}" if array and task is not None else ""


def _switches(record: Record) -> str:
    """scontrol takes whole minutes, and reads a part of one as one."""
    count, wait_s = _number(record.get("required_switches")), _number(record.get("maximum_switch_wait_time")) or 0
    if not count:
        return ""
    minutes = -(-wait_s // 60)
    return f"{count}@{minutes // 60}:{minutes % 60:02}:00" if minutes else str(count)


def _number(value: Any) -> int | None:
    """Converts Slurm's number. None if it is unset or infinite."""
    if isinstance(value, Mapping):
        value = value["number"] if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.80} is not a whole number")
    return value


def _words(value: Any) -> str:
    """Converts a text. Slurm may write null for an empty one."""
    if not isinstance(value, str | None):
        raise TypeError(f"{value!r:.80} is not a text")
    return value or ""


def _time(value: Any) -> float | None:
    """Converts Slurm's time. Slurm writes 0 for an unknown time."""
    seconds = _number(value)
    return float(seconds) if seconds else None


def _reason(text: str) -> str:
    return "" if text == "None" else text


def _exit(state: JobState, status: Record) -> tuple[int | None, int | None]:
    """Returns exit code and signal. None before the job's end, because Slurm then shows 0 or the values of the last
    run.
    """
    if not state.ended:
        return None, None
    return _number(status.get("return_code")) or 0, _number(status.get("signal", {}).get("id")) or None
