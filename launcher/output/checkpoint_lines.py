"""What `muster status` says of checkpoints: how often they are made, what that costs, what a fault loses, and what
a job that has ended leaves for its next run. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muster.exit_codes import EXIT_FAILED_AGAIN
from muster.v1.api_pb2 import CheckpointView, FlushView, GangView, RestoreShare, RestoreView
from muster.wording import counted, duration

_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
_QUIET_S = 10.0
"""Seconds without a written byte, or with a slot less, that are worth a word: agents report every two seconds."""
_GROUPS_NAMED = 4
"""Groups of nodes that one line names."""


def checkpoint_lines(view: CheckpointView) -> Iterator[tuple[str, str]]:
    """Title and text of each line."""
    if view.HasField("restore"):
        yield "restore", "; ".join(_restore_words(view.restore))
    if view.no_slots:
        yield "no snapshots", view.no_slots
    if view.copies_wait:
        yield "copies wait", view.copies_wait
    if view.every:
        yield "snapshots", "; ".join(_snapshot_words(view))
        if where := _where_kept(view):
            yield "copies", where
    if view.durable_every_s or view.durable_every_steps or view.durable_path or view.flush_serial:
        yield "durable", "; ".join(_durable_words(view))
    elif view.every and view.memory_only:
        yield "durable", "nothing: without durable_dir all steps are lost when the job ends"
    if view.mtbf_s and (view.auto_interval or view.durable_auto):
        source = "as job.toml says" if view.mtbf_of_job else "as the site's policy says, or as observed"
        yield "failures", f"one of the job's nodes fails every {duration(view.mtbf_s)}, {source}"


def _restore_words(view: RestoreView) -> Iterator[str]:
    done = view.own_bytes + view.copied_bytes + view.fetched_bytes + view.loaded_bytes
    words = f"step {view.version.step} from {view.folder or 'memory'}"
    if view.bytes:
        words += f": {size_of(done, view.bytes)}"
    if done and view.seconds:
        words += f", {_rate(done / view.seconds)}"
    yield words
    shares = ", ".join(_share(share) for share in view.shares)
    if shares:
        yield shares
    if view.damage:
        yield f"not the newest checkpoint, because {view.damage}"
    if view.ranks and view.ranks_done == view.ranks:
        yield f"complete after {duration(view.seconds)}"


def _share(share: RestoreShare) -> str:
    nodes = f" ({' '.join(share.nodes)})" if share.nodes else ""
    return f"{share.source} {counted(share.ranks, 'rank')}{nodes}"


def size(count: float) -> str:
    """Bytes in words: "61.2 GiB", "1,007 GiB"."""
    unit, divisor = next((unit, 1 << bits) for unit, bits in _UNITS if count >= 1 << bits or not bits)
    return f"{count / divisor:,.{0 if count / divisor >= 100 else 1}f} {unit}"


def size_of(done: int, whole: int) -> str:
    """How much of it is there: "3.1 of 8.0 GiB"."""
    unit, divisor = next((unit, 1 << bits) for unit, bits in _UNITS if whole >= 1 << bits or not bits)
    return f"{done / divisor:.1f} of {whole / divisor:.1f} {unit}"


def _snapshot_words(view: CheckpointView) -> Iterator[str]:
    every = _every(view.every)
    yield f"{every} (auto)" if view.auto_interval else every
    if view.stall_s:
        slower = f", and slows it by {duration(view.delay_s)} while it is copied" if view.delay_s else ""
        share = f", {view.cost:.2%} of the time" if view.cost else ""
        yield f"each stops the training for {duration(view.stall_s)}{slower}{share}"
    if view.slots_s:
        yield f"their memory was made in {duration(view.slots_s)}"
    if view.HasField("loses_steps"):
        yield f"a fault now loses {_loss(view.loses_steps, view.loses_s)}"


def _where_kept(view: CheckpointView) -> str:
    """Where the state of each rank is, and what may be lost at the same moment; empty: not known."""
    groups = [" ".join(group.nodes) for group in view.parity_groups]
    if groups:
        named = ", ".join(groups[:_GROUPS_NAMED]) + (", ..." if len(groups) > _GROUPS_NAMED else "")
        return f"a parity of each group of nodes ({named}); one node of a group may be lost"
    if view.copies == 1:
        return "none: what is in memory is lost with its node"
    if view.copies == 2:
        return "each rank's state is on 2 nodes; one of them may be lost"
    return f"each rank's state is on {view.copies} nodes; {view.copies - 1} of them may be lost" if view.copies else ""


def _durable_words(view: CheckpointView) -> Iterator[str]:
    if view.durable_every_steps:
        yield _every(view.durable_every_steps)
    elif view.durable_every_s:
        yield f"every {duration(view.durable_every_s)}" + (" (auto)" if view.durable_auto else "")
    if view.flush_s:
        share = f", {view.durable_cost:.2%} of the time" if view.durable_cost else ""
        yield f"each takes {duration(view.flush_s)}{_stop_words(view)}{share}"
    yield from newest_flush(view)
    if view.HasField("durable_loses_steps"):
        yield f"without any memory a fault now loses {_loss(view.durable_loses_steps, view.durable_loses_s)}"
    if view.durable_path:
        yield f"newest: {view.durable_path}"


def newest_flush(view: CheckpointView) -> Iterator[str]:
    """How far the flush is that runs, or why the newest one has failed; nothing: neither."""
    if view.HasField("flush"):
        yield from _flush_words(view.flush)
    elif view.flushing:
        yield f"flush {view.flush_serial} runs"
    elif view.flush_error:
        yield f"flush {view.flush_serial} failed: {view.flush_error}"


def _stop_words(view: CheckpointView) -> str:
    """For how long a flush stops the training."""
    whole, stopped = duration(view.flush_s), duration(view.flush_stall_s)
    if not view.flush_stall_s:
        return ""
    return (
        ", and the training stands still meanwhile" if stopped == whole else f", and stops the training for {stopped}"
    )


def _flush_words(view: FlushView) -> Iterator[str]:
    words = f"flush {view.serial} of step {view.version.step}"
    if view.bytes:
        words += f": {size_of(view.written, view.bytes)}"
    if view.written and view.seconds > 0:
        words += f", {_rate(view.written / view.seconds)}"
    yield f"{words}, for {duration(view.seconds)} so far"
    if view.quiet_node and view.quiet_s >= _QUIET_S:
        yield f"{view.quiet_node} has written nothing for {duration(view.quiet_s)}"
    if view.nodes_holding_slots and view.seconds >= _QUIET_S:
        yield f"it holds a slot of each rank on {counted(view.nodes_holding_slots, 'node')}"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _loss(steps: int, seconds: float) -> str:
    words = counted(steps, "step")
    return f"{words}, {duration(seconds)}" if seconds else words


def why_not_by_itself(last: GangView) -> str:
    """Why only a user can want to go on from what this run has left; empty: there is no such reason."""
    if last.phase == "CANCELLED":
        return "was cancelled"
    if last.not_finite:
        return f"ended after a value that is not finite ({last.not_finite})"
    if last.last_loss and last.reason.startswith(last.last_loss):
        return f"was stopped for its loss ({last.last_loss})"
    return "failed again and again" if last.exit_code == EXIT_FAILED_AGAIN else ""


def what_is_left(ended: GangView) -> str:
    """The newest durable checkpoint of a job that has ended, and how to go on from it; empty: there is none."""
    if not (path := ended.checkpoint.durable_path):
        return ""
    if ended.phase == "DONE":
        return f"newest: {path}"
    if why_not_by_itself(ended):
        job = next(iter(ended.slurm_job_ids), ended.gang_id)
        return f"newest: {path}; muster submit --resume {job} goes on from it"
    return f"newest: {path}; submitted again, the job goes on from it"
