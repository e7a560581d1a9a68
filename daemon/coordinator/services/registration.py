"""Which gangs may be registered: ids that are the user's own, one live gang for each Slurm job, and a budget for each
user. Pure.

Every gang costs memory, and every registration grows the journal for good. A job that Slurm holds costs its owner
nothing. So the owner could register gangs for it until the disk of the coordinator is full.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.services.rpc_errors import already_exists, permission_denied, resource_exhausted
from muster.daemon.transport import gang_ids

BUDGET_WINDOW_S = 86400.0
"""Seconds for which a gang counts in its owner's budget after its registration, even if the gang has ended."""
CHARS_PER_MIB = 1024 * 1024


def check_id_is_for(gang_id: str, uid: int) -> None:
    """Check that user `uid` may register the id `gang_id`, whether or not its owner has.

    Raises:
        CallRefused: the id is another user's.
    """
    if refused := gang_ids.why_not_registered(gang_id, uid):
        raise permission_denied(refused)


def check_job_is_free(gangs: Iterable[Gang], gang_id: str, job: int, uid: int) -> None:
    """Check that no other gang than `gang_id` is live in `job`. A pool job belongs to the gang that asked for it.

    The ids of pool jobs are the word of an agent. So they count for the gangs of the agent's user only: a user must not
    keep the jobs of others from Muster.

    Args:
        uid: the user who wants to use the job.

    Raises:
        CallRefused: another gang is.
    """
    for gang in gangs:
        pool_jobs = (request.job for request in gang.growth.pool.values()) if gang.account.owner_uid == uid else ()
        if gang.id != gang_id and not gang.final and job in {gang.slurm.job, *pool_jobs}:
            runs = (
                f"gang {gang.id}, which is {gang.phase}" if gang.account.owner_uid == uid else "a gang of another user"
            )
            raise already_exists(
                f"job {job} runs {runs}: a job has one gang at a time. Submit another job for gang {gang_id}"
            )


def check_budget(gangs: Iterable[Gang], uid: int, spec_chars: int, limits: Limits, now: float) -> None:
    """Check that the site's limits leave room for one more gang of `uid`, with a spec of so many characters.

    Raises:
        CallRefused: they don't.
    """
    own = [
        g
        for g in gangs
        if g.account.owner_uid == uid and (not g.final or now - g.account.registered_at < BUDGET_WINDOW_S)
    ]
    counted = f"uid {uid} has {len(own)} gangs that are live or were registered in the last 24 hours"
    if len(own) >= limits.gangs_per_user:
        raise resource_exhausted(
            f"{counted}: the site allows {limits.gangs_per_user} (gangs_per_user). "
            "Wait until some have ended, or ask the site for more"
        )
    chars = sum(gang.account.spec_chars for gang in own)
    if chars + spec_chars > limits.spec_mib_per_user * CHARS_PER_MIB:
        raise resource_exhausted(
            f"{counted}: their specs have {_mib(chars)} MiB, this one has {_mib(spec_chars)} MiB, and the site allows "
            f"{limits.spec_mib_per_user} MiB (spec_mib_per_user). Make [env] of job.toml smaller, wait until some have "
            "ended, or ask the site for more"
        )


def newest_run(gangs: Iterable[Gang], identity: str, uid: int) -> Gang | None:
    """The gang of user `uid` that is a run of a job: the one that is queued or runs, else the newest one."""
    runs = [gang for gang in gangs if identity and gang.spec.identity == identity and gang.account.owner_uid == uid]
    return max(runs, key=lambda gang: (not gang.final, gang.account.registered_at), default=None)


def newest_beside(gangs: Iterable[Gang], name: str, durable_dir: str, uid: int) -> Gang | None:
    """The newest gang of user `uid` whose job has this name and durable folder: one with a durable checkpoint, else one
    that goes on.
    """
    place = (name, durable_dir, uid)
    beside = [
        gang
        for gang in gangs
        if durable_dir
        and (gang.checkpoint.durable_path or not gang.final)
        and (gang.account.name, gang.spec.durable_dir, gang.account.owner_uid) == place
    ]
    return max(beside, key=lambda gang: (bool(gang.checkpoint.durable_path), gang.account.registered_at), default=None)


def _mib(chars: int) -> str:
    return f"{chars / CHARS_PER_MIB:.2f}"
