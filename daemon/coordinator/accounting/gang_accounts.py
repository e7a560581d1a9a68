"""Keeps the ledger of each gang up to date, and writes what is settled into the store.

A ledger follows the facts as they are decided. After a start it is made again from the journal, page by page, so that
no heartbeat waits. The store is on a disk that may be slow, so a thread writes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from muster.daemon.coordinator.accounting.account_store import KEPT_S, AccountStore, Job, Reader, Row
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.diagnosis.measured_shares import measured_shares
from muster.daemon.coordinator.diagnosis.side_database import SideThread
from muster.daemon.coordinator.goodput.intervals import TRAINED, Category, Fault, Interval, Measured
from muster.daemon.coordinator.goodput.ledger import SETTLING, Ledger
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.shell.engine import Engine
from muster.v1 import api_pb2

PAGE_RECORDS, PAGE_CHARS = 100, 256 * 1024
"""Records of the journal that are read at once: some milliseconds."""
MEASURE_S = 30.0
"""Seconds between two looks at what agents have measured of the generations that run."""
PAUSE_S = 0.02
"""Seconds between two pages. The event loop has more to do."""
_ACCOUNT = re.compile(r'"--account=([^"]*)"')
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sums:
    """Seconds of nodes by category, and from when to when nodes were held."""

    node_s: dict[Category, float] = field(default_factory=dict)
    since: float = 0.0
    until: float = 0.0

    def add(self, intervals: Sequence[Interval]) -> None:
        """More intervals."""
        for one in intervals:
            self.node_s[one.category] = self.node_s.get(one.category, 0.0) + one.node_s
            if one.category is not Category.QUEUE:
                self.since = min(self.since or one.since, one.since)
                self.until = max(self.until, one.until)


@dataclass(slots=True)
class GangAccount:
    """The account of one gang: its ledger, and the sums of what is settled."""

    job: Job
    ledger: Ledger = field(default_factory=Ledger)
    settled: Sums = field(default_factory=Sums)
    leaves: dict[str, str] = field(default_factory=dict)

    def note(self, fact: facts.Fact, at: float) -> list[Interval]:
        """A fact of the gang. Returns what it settles."""
        self.ledger.note(fact, at)
        if isinstance(fact, facts.MemberJoined):
            self.leaves[fact.node] = fact.leaf
        settled = self.ledger.take()
        self.settled.add(settled)
        return settled

    def view(self, now: float, step: int) -> api_pb2.GoodputView | None:
        """The account until now; None: no node was ever held."""
        sums = replace(self.settled, node_s=dict(self.settled.node_s))
        sums.add(self.ledger.unsettled(now, step))
        queue_node_s = sums.node_s.pop(Category.QUEUE, 0.0)
        trained = {category: sums.node_s.pop(category, 0.0) for category in TRAINED}
        useful_node_s = sum(trained.values())
        lost = {category: sums.node_s[category] for category in Category if sums.node_s.get(category)}
        if not useful_node_s and not lost:
            return None
        return api_pb2.GoodputView(
            since_s=sums.since,
            until_s=sums.until,
            allocated_node_s=useful_node_s + sum(lost.values()),
            useful_node_s=useful_node_s,
            steps_unknown_node_s=trained[Category.STEPS_UNKNOWN],
            queue_node_s=queue_node_s,
            logged_step=self.ledger.logged_step,
            lost=[api_pb2.LostTime(category=category, node_s=node_s) for category, node_s in lost.items()],
        )


class GangAccounts:
    """The accounts of `engine`'s gangs, and the store of all gangs in `folder`. `kept_s`: seconds for which it keeps
    what was used."""

    def __init__(self, engine: Engine, folder: Path, kept_s: float = KEPT_S) -> None:
        self._engine = engine
        self._store = AccountStore(folder, kept_s)
        self._thread = SideThread("the account of goodput", _log)
        self._accounts: dict[str, GangAccount] = {}
        self._charged: dict[str, str] = {}
        """By gang that lives: the account that Slurm charges. What a job says of itself counts until that is known."""
        self._summaries: dict[int, defaultdict[str, list[Interval]]] = {}
        """What is settled, by gang, while each summary is made: the store was read before."""
        self.is_complete = False
        """No account is still made again after the start."""
        engine.on_facts.append(self.note_facts)

    async def run(self) -> None:
        """Makes the accounts again that a restart has ended, and those that the store lacks."""
        try:
            complete = await self._thread.read(self._store.complete) or set()
            known = [gang for gang in self._engine.core.state.gangs if gang not in self._accounts]
            others = [gang for gang in self._engine.journal.registered_gangs() if gang not in complete]
            for gang in dict.fromkeys([*known, *others]):
                await self._make_again(gang)
            self.is_complete = True
        except JournalError:
            return  # the engine stops for that reason
        while True:
            for id, account in list(self._accounts.items()):
                if (living := self._engine.core.state.gangs.get(id)) and living.phase is Phase.RUNNING:
                    account.ledger.measure(measured_shares(living, self._engine.core.observed.gang(id)))
                    await asyncio.sleep(0)
            await asyncio.sleep(MEASURE_S)

    def note_facts(self, decided: Sequence[facts.Fact]) -> None:
        """Notes facts in the ledgers of their gangs. One that is still made again will read them from the journal."""
        at = self._engine.journal.last_at
        for fact in decided:
            id = getattr(fact, "gang", "")
            if isinstance(fact, facts.GangRegistered):
                self._accounts.setdefault(id, GangAccount(_job_of(fact)))
            if (account := self._accounts.get(id)) is None:
                continue
            if isinstance(fact, SETTLING):
                self._measure(id, account)
            settled = account.note(fact, at)
            if settled or account.ledger.over:
                self._keep(account, settled)
            if isinstance(fact, facts.GangForgotten):
                del self._accounts[id]
                self._charged.pop(id, None)

    def note_account(self, id: str, charged: str) -> None:
        """Slurm charges this account for the job of a gang."""
        self._charged[id] = charged
        if (account := self._accounts.get(id)) is not None and account.job.account != charged:
            account.job = replace(account.job, account=charged)
            self._keep(account, ())

    def view(self, gang: Gang, now: float) -> api_pb2.GoodputView | None:
        """The account of a gang until now; None: it has not started, or its account is still made again."""
        if (account := self._accounts.get(gang.id)) is None:
            return None
        return account.view(now, self._newest_step(gang, account))

    def _newest_step(self, gang: Gang | None, account: GangAccount) -> int:
        """The newest step that ranks of the running generation have finished; 0: none. Numbers of their script go to
        the ledger, as they may come any moment."""
        seen = self._engine.core.observed.gangs.get(gang.id) if gang is not None else None
        if gang is None or seen is None:
            return 0
        if gang.phase is Phase.RUNNING and gang.newest.stepped_generation < gang.newest.generation:
            account.ledger.measure(measured_shares(gang, seen))
        return seen.last_step[1] if seen.last_step[0] == gang.newest.generation else 0

    async def summary(self, since: float, until: float, by: str, reader: Reader | None) -> list[Row] | None:
        """What was used between two moments, by one of account_store.KEYS; what has lost most first. None: the store
        can't be read."""
        now = self._engine.clock.now()  # later, a gang would have time after `until`, and its last steps would be cut
        accounts, settled_since = dict(self._accounts), defaultdict[str, list[Interval]](list)
        self._summaries[id(settled_since)] = settled_since
        try:
            rows = await self._thread.read(lambda: self._store.summary(since, until, by, reader))
            if rows is None:
                return None
            for gang, account in accounts.items():
                if account.job.is_shown_to(reader):
                    step = self._newest_step(self._engine.core.state.gangs.get(gang), account)
                    for one in (*settled_since[gang], *account.ledger.unsettled(now, step)):
                        _add(rows, account, one, since, until, by)
                    await asyncio.sleep(0)
        finally:
            del self._summaries[id(settled_since)]
        return sorted(rows.values(), key=lambda row: (not row.key, -row.lost_gpu_s, row.key))

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.close()

    async def _make_again(self, id: str) -> None:
        measured = await self._thread.read(lambda: self._store.measured(id)) or {}
        charged_before = await self._thread.read(lambda: self._store.account_of(id))
        account: GangAccount | None = None
        settled: list[Interval] = []
        after = 0
        while page := self._engine.journal.history(id, after, PAGE_RECORDS, PAGE_CHARS):
            for record in page:
                if record.gang != id:
                    continue  # the health of one of its nodes
                try:
                    fact = facts.decode(record.name, record.json)
                except (KeyError, ValidationError) as error:
                    _log.warning("no account of %s can be made: record %d: %s", id, record.position, error)
                    return
                if account is None and isinstance(fact, facts.GangRegistered):
                    account = GangAccount(_job_of(fact))
                if account is not None:
                    settled += account.note(fact, record.at)
                    if isinstance(fact, facts.GenerationStarted) and fact.generation in measured:
                        account.ledger.measure(measured[fact.generation])
            after = page[-1].position
            await asyncio.sleep(PAUSE_S)
        if account is not None:
            if charged := self._charged.get(id) or charged_before:
                account.job = replace(account.job, account=charged)
            if id in self._engine.core.state.gangs:
                self._accounts[id] = account
            self._keep(account, settled, anew=True, complete=id not in self._engine.core.state.gangs)

    def _measure(self, id: str, account: GangAccount) -> None:
        """What was measured of the generation that may end now."""
        gang = self._engine.core.state.gangs.get(id)
        if gang is None:
            return
        shares = measured_shares(gang, self._engine.core.observed.gang(id))
        if shares != Measured():
            account.ledger.measure(shares)
            generation = gang.newest.generation  # by the time the thread writes, the next one may have started
            self._thread.write(lambda: self._store.note_measured(id, generation, shares))

    def _keep(
        self, account: GangAccount, settled: Sequence[Interval], *, anew: bool = False, complete: bool = False
    ) -> None:
        for settled_since in self._summaries.values():
            settled_since[account.job.gang] += settled
        job = replace(account.job, complete=complete or account.ledger.over)
        waits, leaves = account.ledger.take_waits(), dict(account.leaves)
        self._thread.write(lambda: self._store.note(job, leaves, settled, waits, anew=anew))


def _job_of(fact: facts.GangRegistered) -> Job:
    account = _ACCOUNT.search(fact.spec_json)
    return Job(
        fact.gang,
        fact.job,
        fact.name,
        fact.owner_uid,
        account[1] if account else "",
        fact.spec.ranks_per_node,
        readers=json.dumps(fact.spec.readers),
    )


def _add(rows: dict[str, Row], account: GangAccount, one: Interval, since: float, until: float, by: str) -> None:
    """Adds the part of an interval that is not settled yet."""
    clipped = min(one.until, until) - max(one.since, since)
    if clipped <= 0 or one.until <= one.since:
        return
    key = _key(account, one.fault, by)
    row = rows.setdefault(key, Row(key))
    row.add(one.category, one.node_s * clipped / (one.until - one.since), account.job.gpus)


def _key(account: GangAccount, fault: Fault | None, by: str) -> str:
    node = fault.node if fault is not None else ""
    return {
        "job": f"{account.job.job} {account.job.name}",
        "account": account.job.account,
        "cause": fault.kind.value if fault is not None else "",
        "node": node,
        "leaf": account.leaves.get(node, ""),
    }[by]
