"""Notes how fast each generation was, when it ends and now and then while it runs, in the store of past generations.

The store is on a disk that may be slow, so a thread writes. The event loop waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.diagnosis.past_generations import PastGeneration, PastGenerations
from muster.daemon.coordinator.diagnosis.side_database import SideThread
from muster.daemon.coordinator.journal.journal import JournalError
from muster.daemon.coordinator.services.job_specs import registered_spec, settings_digest
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.view_parts.measured_steps import FEWEST_STEPS, measured_steps

INTERVAL_S = 600.0
"""Seconds between two notes of a generation that runs. A coordinator that dies loses what came since."""
_log = logging.getLogger(__name__)


class RunRecorder:
    """Writes the history of `engine`'s gangs into `folder`."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._store = PastGenerations(folder)
        self._thread = SideThread("the history of past generations", _log)
        self._settings: dict[str, str] = {}
        """Gang → digest of its settings."""
        engine.on_facts.append(self.note_facts)

    async def run(self) -> None:
        """Notes all generations that run, again and again."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            for gang in list(self._engine.core.state.gangs.values()):
                if gang.phase is Phase.RUNNING:
                    self._note(gang)

    def note_facts(self, decided: Sequence[facts.Fact]) -> None:
        """Notes the generations that end with these facts."""
        for fact in decided:
            match fact:
                case facts.PhaseChanged(phase=Phase.STARTING | Phase.RUNNING):
                    pass
                case facts.GenerationFenced() | facts.PhaseChanged() | facts.GangEnded():
                    if gang := self._engine.core.state.gangs.get(fact.gang):
                        self._note(gang)
                case facts.GangForgotten():
                    self._settings.pop(fact.gang, None)

    async def of_job(self, owner_uid: int, name: str) -> list[PastGeneration]:
        """The generations of a user's jobs of that name, the newest first. Empty if the store can't be read."""
        return await self._thread.read(partial(self._store.of_job, owner_uid, name)) or []

    def settings(self, gang: str) -> str:
        """The digest of a gang's settings; empty if they are not known."""
        if gang not in self._settings:
            try:
                spec = registered_spec(self._engine.journal, gang)
            except JournalError:
                return ""  # the engine stops for that reason
            self._settings[gang] = settings_digest(spec) if spec else ""
        return self._settings[gang]

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.close()

    def _note(self, gang: Gang) -> None:
        found = measured_steps(gang, self._engine.core.observed.gang(gang.id))
        if found.steps < FEWEST_STEPS or found.step_s <= 0:
            return
        now = self._engine.clock.now()
        one = PastGeneration(
            gang=gang.id,
            generation=gang.newest.generation,
            job=gang.slurm.job,
            owner_uid=gang.account.owner_uid,
            name=gang.account.name,
            settings=self.settings(gang.id),
            started_at=gang.newest.started_at,
            ended_at=now,
            steps=found.steps,
            step_s=found.step_s,
            compute_s=found.compute_s,
            wait_s=found.wait_s,
            best_step_s=found.step_s,
            best_at=now,
            nodes=tuple(seat.node for seat in sorted(gang.roster.seats, key=lambda seat: seat.group_rank)),
        )
        self._thread.write(partial(self._store.note, one))
