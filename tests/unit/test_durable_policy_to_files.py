"""From job.toml to the files: when durable checkpoints are written, and which of them stay.

The launcher reads job.toml, the core orders the flushes of a simulated job, and the checkpoint services of two nodes
carry the orders out.
"""

import asyncio
import os
import time
from pathlib import Path

from tests.unit.test_checkpoint_service import running_gang, small

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.versions import Version
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.checkpoint import Flush
from muster.daemon.coordinator.services import job_specs
from muster.daemon.coordinator.shell.orders import _flush_message
from muster.launcher.spec.spec import parse
from muster.simulator.scenario import Scenario
from muster.v1.common_pb2 import JobSpec

HOUR_S = 3600.0


def job(folder: Path, table: str) -> JobSpec:
    top = f'name = "a"\nnodes = 2\nspares = 0\ncommand = "x"\nrun_dir = "/r"\ndurable_dir = "{folder}"\n'
    return parse(f"{top}[checkpoint]\n{table}", "job.toml").to_proto("/w")


def ordered(spec: JobSpec, seconds: float, *, asked_for: bool = False) -> list[facts.FlushOrdered]:
    """What the core orders in so many seconds of training, 0.2 s a step."""
    gang = job_specs.gang_spec(spec)
    world = Scenario(
        2,
        0,
        flush_s=0.5,
        durable_dir=gang.durable_dir,
        durable_every_steps=gang.durable_every_steps,
        durable_every_s=gang.durable_every_s,
    )
    world.run_until(lambda: world.core.observed.gang("g").step_number >= 3)
    if asked_for:
        world.post_event(events.FlushRequested("g", "uid 1000"))
    world.run_for(seconds)
    return world.facts(facts.FlushOrdered)


async def carry_out(spec: JobSpec, orders: list[facts.FlushOrdered], hours_between: float = 0.0) -> list[int]:
    """Two agents commit what was ordered, and write it. Returns the steps of the checkpoints that are there at the end.

    `hours_between`: so long, by the clock of storage, before the next one each checkpoint was completed.
    """
    folder = Path(spec.durable_dir)
    async with running_gang("g") as gang:
        await gang.add("n0", "n1")
        await gang.run({0: "n0", 1: "n1"}, size=1 << 20)
        for count, fact in enumerate(orders, 1):
            await gang.step(fact.version.step, small)
            await gang.committed(Version(1, fact.version.step))
            order = _flush_message(Flush(fact.serial, fact.version, fact.sources, fact.reason, asked_at=0.0), "")
            await asyncio.gather(
                *(
                    node.checkpoint_service.flush(order, spec.durable_dir, spec.durable_keep, spec.durable_keep_s)
                    for node in gang.nodes.values()
                )
            )
            written = folder / f"step_{fact.version.step:08}_g1_g" / durable_folders.METADATA
            at = time.time() - (len(orders) - count) * hours_between * HOUR_S
            os.utime(written, (at, at))
    names = [durable_folders.parse_folder_name(path.name) for path in folder.iterdir()]
    return sorted(name.version.step for name in names if name is not None)


async def test_every_so_many_steps_and_the_newest_two_stay(tmp_path: Path) -> None:
    spec = job(tmp_path, 'durable_every = "50 steps"\ndurable_keep = 2\n')
    orders = ordered(spec, 45.0)
    steps = [fact.version.step for fact in orders]
    assert len(steps) == 4
    assert await carry_out(spec, orders) == steps[-2:]


async def test_every_so_many_minutes_and_those_of_the_last_hours_stay(tmp_path: Path) -> None:
    spec = job(tmp_path, 'durable_every = "1 minute"\ndurable_keep_hours = 1.5\n')
    orders = ordered(spec, 190.0)
    steps = [fact.version.step for fact in orders]
    assert len(steps) == 3
    assert await carry_out(spec, orders, hours_between=1.0) == steps[-2:]


async def test_by_number_and_age_what_one_of_them_keeps_stays(tmp_path: Path) -> None:
    for keep, hours, left in ((3, 0.5, 3), (1, 2.5, 3), (1, 0.5, 1)):
        folder = tmp_path / f"{keep}-{hours}"
        spec = job(folder, f'durable_every = "50 steps"\ndurable_keep = {keep}\ndurable_keep_hours = {hours}\n')
        orders = ordered(spec, 45.0)
        steps = [fact.version.step for fact in orders]
        assert await carry_out(spec, orders, hours_between=1.0) == steps[-left:], (keep, hours)


async def test_what_a_user_asks_for_is_written_once_and_all_stays(tmp_path: Path) -> None:
    spec = job(tmp_path, "")
    orders = ordered(spec, 60.0, asked_for=True)
    assert [fact.reason for fact in orders] == ["asked for by uid 1000"]
    assert await carry_out(spec, orders) == [orders[0].version.step]
