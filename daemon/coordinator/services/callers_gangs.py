"""Which gangs a caller may name: every call of the public API that names a job, or lists jobs, finds them here.

Nobody learns whether another user has a job: the answer is the same as where there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from typing import TypeVar

from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.limits import GANG_KEPT_S
from muster.daemon.coordinator.journal.history import Registered
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.services import registration
from muster.daemon.coordinator.services.login_names import ReaderNames
from muster.daemon.coordinator.services.rpc_errors import internal, invalid_argument, not_found, permission_denied
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.host import clock
from muster.daemon.transport import gang_ids
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.identity import current_caller, current_method
from muster.v1 import api_pb2 as pb
from muster.wording import listed

_Next = TypeVar("_Next")


class LastingRight:
    """The right to a call that lasts for hours: its caller may leave a group meanwhile. It is asked again as often as
    groups are, so such a call ends within twice that time."""

    def __init__(self, learn: Callable[[], Awaitable[None]], check: Callable[[], object], every_s: float) -> None:
        """`learn`: finds out who the caller is now. `check`: raises CallRefused if the right is gone."""
        self._learn, self._check, self._every_s = learn, check, every_s
        self._due = clock.monotonic() + every_s

    async def ask(self) -> None:
        """Ask again, if it is time. Raises CallRefused: the right is gone."""
        if clock.monotonic() >= self._due:
            await self._learn()
            self._check()
            self._due = clock.monotonic() + self._every_s

    async def wait_for(self, next_one: Callable[[], Awaitable[_Next]]) -> _Next:
        """Wait for what the call sends next, and ask meanwhile. Raises CallRefused: the right is gone."""
        while True:
            await self.ask()
            try:
                async with asyncio.timeout(self._due - clock.monotonic()) as limit:
                    return await next_one()
            except TimeoutError:
                if not limit.expired():
                    raise


class CallersGangs:
    """The gangs of the engine, as far as the present caller may call the present method for them."""

    def __init__(self, engine: Engine, rights: Rights, readers: ReaderNames | None = None) -> None:
        """`readers`: who is in which group; None: as this host knows."""
        self._engine, self._rights = engine, rights
        self._readers = readers or ReaderNames()

    async def learn_reader(self) -> None:
        """Find out by which names jobs may have named the caller, if any job names readers. Comes before each call."""
        uid = current_caller().uid
        if not self._rights.is_operators(uid) and self._names_readers():
            await self._readers.learn(uid)

    async def names_of_reader(self) -> frozenset[str]:
        """By which names jobs may have named the caller, if this method shows readers more than their own jobs."""
        caller = current_caller()
        if not self._rights.allows(current_method(), caller, is_reader=True):
            return frozenset()
        await self._readers.learn(caller.uid)
        return self._readers.known(caller.uid)

    def lasting_right(self, check: Callable[[], object]) -> LastingRight:
        """The right of a call that has begun just now. `check`: raises CallRefused if the caller has it no more."""
        return LastingRight(self.learn_reader, check, self._readers.kept_s)

    def _names_readers(self) -> bool:
        return any(gang.spec.readers for gang in self._engine.core.state.gangs.values())

    def find(self, ref: pb.GangRef) -> Gang:
        """The gang that `ref` names (the newest one of a job), if the caller may call the present method for it.

        Raises:
            CallRefused: there is no such gang, or the caller has no right to it, or an array has several.
        """
        self._check_names_one(ref)
        gang = self.known(ref)
        if gang is not None and self._allows_gang(gang):
            return gang
        if gang is not None and self._is_reader(gang.spec.readers):
            raise permission_denied(f"{_describe(ref)}: you may read this job, and change nothing")
        self._check_id(ref)
        raise self.no_such_job(ref)

    def listed(self, array: int = 0) -> list[Gang]:
        """The gangs that this method, which names none, shows to the caller. `array`: only the tasks of this array job;
        0: all."""
        if refused := self._rights.refusal(current_method(), current_caller().uid, names_job=False):
            raise permission_denied(refused)
        return self._tasks(array) if array else list(filter(self._allows_gang, self._engine.core.state.gangs.values()))

    def whose_events(self, ref: pb.GangRef) -> str:
        """The id of the gang that `ref` names, which may have ended long ago; empty for all gangs.

        Raises:
            CallRefused: there is no such gang, or the caller has no right to read its events.
        """
        if not ref.WhichOneof("ref"):
            if not self.allows(None):
                only = "only operators may read the events of all gangs: name a job"
                raise permission_denied(f"{only}{self.place_hint()}")
            return ""
        self._check_names_one(ref)
        gang = self.known(ref)
        if gang is not None and self._allows_gang(gang):
            return gang.id
        found = None if gang else self._registered(ref)
        if found is not None and self._allows_registered(found):
            return found.gang
        self._check_id(ref)
        raise self.no_such_job(ref)

    def may_read_cached(self) -> Callable[[str], bool]:
        """Whether the caller may call the present method for the gang of an id, which may have ended long ago; of an
        empty id: for everything. Each gang is looked up once."""

        @cache
        def may_read(gang: str) -> bool:
            if not gang:
                return self.allows(None)
            if known := self._engine.core.state.gangs.get(gang):
                return self._allows_gang(known)
            found = self._registered(pb.GangRef(gang_id=gang))
            return found is not None and self._allows_registered(found)

        return may_read

    def known(self, ref: pb.GangRef) -> Gang | None:
        """The gang that `ref` names, whosever it is."""
        gangs = self._engine.core.state.gangs
        if ref.WhichOneof("ref") == "gang_id":
            return gangs.get(ref.gang_id) or self._array_task(ref.gang_id)
        if ref.WhichOneof("ref") == "job_identity":
            return registration.newest_run(gangs.values(), ref.job_identity, current_caller().uid)
        of_job = [gang for gang in gangs.values() if gang.slurm.job == ref.slurm_job_id] or self._tasks(
            ref.slurm_job_id
        )
        return max(of_job, key=lambda gang: gang.account.registered_at, default=None)

    def _array_task(self, name: str) -> Gang | None:
        """The newest gang of the task that Slurm shows as `name`, of those that the caller may read. A job says its own
        name, so another user's counts for nobody else."""
        named = [gang for gang in self._engine.core.state.gangs.values() if name and gang.spec.array_task == name]
        return max(filter(self._allows_gang, named), key=lambda gang: gang.account.registered_at, default=None)

    def _tasks(self, array: int) -> list[Gang]:
        """The gangs of an array job's tasks that the caller may read, of all those that have launched."""
        gangs, prefix = self._engine.core.state.gangs.values(), f"{array}_"
        return [gang for gang in gangs if gang.spec.array_task.startswith(prefix) and self._allows_gang(gang)]

    def _check_names_one(self, ref: pb.GangRef) -> None:
        """The id of an array names each of its tasks, although Slurm gives it to the last one, too."""
        if ref.WhichOneof("ref") == "slurm_job_id":
            tasks = {int(gang.spec.array_task.partition("_")[2]) for gang in self._tasks(ref.slurm_job_id)}
            if len(tasks) > 1:
                names = listed((f"{ref.slurm_job_id}_{task}" for task in sorted(tasks)), ", ")
                raise invalid_argument(f"job {ref.slurm_job_id} is an array: name one of its tasks: {names}")

    def no_such_job(self, ref: pb.GangRef) -> CallRefused:
        """The answer where there is no such job, and where it is another user's: nobody learns which."""
        listed = f"muster status --all lists your jobs, those of the last {GANG_KEPT_S / 86400:.0f} days, too"
        return not_found(f"{_describe(ref)}: no such job, or not yours. {listed}{self.place_hint()}")

    def allows(self, owner_uid: int | None) -> bool:
        """The caller may call this method for a job of `owner_uid`; None: for everything."""
        return self._rights.allows(current_method(), current_caller(), owner_uid=owner_uid)

    def _allows_gang(self, gang: Gang) -> bool:
        """The same for a gang, whose owner may have named the caller as a reader."""
        return self._allows_reader(gang.account.owner_uid, gang.spec.readers)

    def _allows_registered(self, found: Registered) -> bool:
        return self._allows_reader(found.owner_uid, found.readers)

    def _allows_reader(self, owner_uid: int, readers: Collection[str]) -> bool:
        method, caller = current_method(), current_caller()
        return self._rights.allows(method, caller, owner_uid=owner_uid, is_reader=self._is_reader(readers))

    def _is_reader(self, readers: Collection[str]) -> bool:
        return bool(readers) and not self._readers.known(current_caller().uid).isdisjoint(readers)

    def place_hint(self) -> str:
        """Words for an operator whose call has no operator's rights because of the host it comes from."""
        if not self._rights.calls_from_elsewhere(current_caller()):
            return ""
        return (
            " (an operator's rights count on the site's management hosts only; this call is from "
            f"{current_caller().address})"
        )

    def _check_id(self, ref: pb.GangRef) -> None:
        """Check that the id does not name another user as its owner, whether or not there is such a gang. `muster
        submit` asks before it calls sbatch."""
        owner_uid = gang_ids.owner_of(ref.gang_id)
        if owner_uid is not None and not self.allows(owner_uid):
            uid = current_caller().uid
            raise permission_denied(
                f"{_describe(ref)} names another user than you, who are uid {uid} here{self.place_hint()}"
            )

    def _registered(self, ref: pb.GangRef) -> Registered | None:
        """A gang that has left the durable state."""
        try:
            return self._engine.journal.find_owner(ref.gang_id, ref.slurm_job_id)
        except JournalError as error:
            raise internal(str(error)) from None


def _describe(ref: pb.GangRef) -> str:
    if ref.WhichOneof("ref") == "job_identity":
        return "an earlier run of this job"
    return f"gang {ref.gang_id}" if ref.WhichOneof("ref") == "gang_id" else f"Slurm job {ref.slurm_job_id}"
