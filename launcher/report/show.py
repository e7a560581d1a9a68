"""Reads what is known of a job, and writes its report."""

from __future__ import annotations

import argparse
import json
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from google.protobuf import json_format

from muster.daemon.coordinator.accounting.account_store import read_measured
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.goodput import intervals as account
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.reading import UnreadableJournal, read_gang
from muster.daemon.host import clock
from muster.daemon.transport.site_config import Site
from muster.launcher.command import connect, load_site, say, screen
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.errors import Unavailable, WrongInput
from muster.launcher.report import assemble, series
from muster.launcher.report.page import page_of
from muster.launcher.report.report_data import Goodput, ReportData
from muster.launcher.report.story import Story, told
from muster.slurm.client.parsing.gres import count_gpus
from muster.v1.api_pb2 import EventRecord, EventsRequest, GangView
from muster.v1.common_pb2 import JobSpec


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a job before it is told as a story. `view` and `until`: of a coordinator that answers. `shares`:
    by generation, what was measured of its steps' time, where no coordinator answers."""

    records: list[Record]
    spec: JobSpec
    view: GangView | None = None
    until: float = 0.0
    shares: Mapping[int, account.Measured] = field(default_factory=dict)


async def run(options: argparse.Namespace) -> int:
    """Writes the report. Returns the exit status.

    Raises:
        LauncherError: the job is not known, or is another user's; or nothing answers; or the file can't be written.
    """
    site = load_site(options, calls_coordinator=options.journal is None)
    source = _from_journal(options.journal, options.job) if options.journal else await _ask(site, options.job)
    data = report_data(source, site.gpu_hour_price)
    path = options.output or Path(f"report-{data.head.job}.html")
    text = page_of(data, screen(options).zone)
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise WrongInput(f"{path} can't be written: {error.strerror}") from None
    say(f"{path}: {len(text.encode(errors='replace')) / 1e6:.1f} MB")
    return 0


def report_data(source: Source, price: float) -> ReportData:
    """The values of the report. Reads the files in which the job's nodes have noted what their ranks did.

    Raises:
        WrongInput: the records can't be read.
    """
    view = source.view
    run_dir = (view.run_dir if view else "") or source.spec.run_dir
    measured, ranks = series.Measured(), source.spec.nodes * source.spec.ranks_per_node
    if run_dir and source.records:
        measured = series.read(run_dir, source.records[0].gang, ranks)
    logged = partial(series.logged, measured)
    story = told(source.records, source.until, view.step if view else 0, logged, source.shares)
    per_node = _gpus_per_node(source.spec)
    return assemble.report_of(
        story,
        _user(story.gang.account.owner_uid),
        made_s=clock.wall(),
        goodput=_goodput(story, view, per_node, price),
        curves=series.curves_of(measured, _work(source, story)),
        heat=series.heat_of(measured),
        notes=tuple(_notes(source, story, measured)),
        result=_result(view),
        step=view.step if view else 0,
    )


def _work(source: Source, story: Story) -> series.Work:
    """What a step is. The coordinator may know more of its arithmetic than job.toml says: somebody may have counted."""
    spec, told_spec = story.gang.spec, source.spec
    ranks = max(1, len(story.ranks)) * spec.ranks_per_node
    least_s = told_spec.flops_per_step / (told_spec.peak_flops * ranks) if told_spec.peak_flops else 0.0
    if source.view is not None and source.view.training.mfu:
        least_s = source.view.training.mfu / source.view.training.steps_per_s
    per_replica = spec.tensor * spec.context * spec.pipeline
    return series.Work(told_spec.tokens_per_step / ranks, per_replica, least_s)


def _goodput(story: Story, view: GangView | None, per_node: int, price: float) -> Goodput:
    """The coordinator's own account, or that of the facts: they know nothing of what stalls a generation that runs."""
    if view is None or not view.HasField("goodput"):
        return assemble.account_of(story, per_node, price)
    unknown = view.goodput.steps_unknown_node_s
    parts = {"useful": view.goodput.useful_node_s - unknown, "steps_unknown": unknown}
    parts |= {one.category: one.node_s for one in view.goodput.lost}
    return assemble.goodput_of(parts, story, per_node, price)


def _result(view: GangView | None) -> str:
    if view is None or view.final:
        return ""
    return f"{view.phase}: waits for {view.waiting_for}" if view.waiting_for else view.phase


def _notes(source: Source, story: Story, measured: series.Measured) -> list[str]:
    found = [f"{name} is left out: {why}" for name, why in list(measured.left_out.items())[:20]]
    if source.view is None and not story.is_over:
        found.append("The journal ends before the job does. What came later is not in this report.")
    if measured.ranks and not _work(source, story).least_s:
        found.append("MFU is not known: [model] of job.toml says what a step computes, and on which GPUs.")
    if not measured.ranks:
        found.append("No rank has noted its steps, so there is nothing about their speed: the script reports them by "
                     "checkpoint.step or muster.log.")  # fmt: skip
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _gpus_per_node(spec: JobSpec) -> int:
    """0: job.toml asks for none, or is not known."""
    try:
        tables = json.loads(spec.estimate_tables or "{}")
        gres = tables.get("slurm", {}).get("gres") or ""
        return int(tables.get("gpus_per_node") or count_gpus(gres) or 0)
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return 0


def _from_journal(folder: Path, job: str) -> Source:
    """What the journal knows.

    Raises:
        WrongInput: the folder has no such journal, or the journal no such job.
    """
    ref = gang_ref(job)
    try:
        records = read_gang(folder, ref.gang_id, ref.slurm_job_id)
    except UnreadableJournal as error:
        raise WrongInput(str(error)) from None
    text = json.loads(records[0].json).get("spec_json") or "{}"
    try:
        spec = json_format.Parse(text, JobSpec(), ignore_unknown_fields=True)
    except json_format.ParseError:
        spec = JobSpec()
    return Source(records, spec, shares=read_measured(folder, records[0].gang))


async def _ask(site: Site, job: str) -> Source:
    """What the coordinator knows.

    Raises:
        LauncherError: it does not answer, or refuses.
    """
    ref = gang_ref(job)
    async with connect(site) as coordinator:
        measured = await coordinator.measurements(ref)
        view = await coordinator.describe(ref)
        request = EventsRequest(gang=ref)
        records = [_record(one) async for one in coordinator.events(request) if not one.sentinel]
    if not records:
        raise Unavailable("the coordinator has sent no record of the job")
    return Source(records, measured.spec, view, clock.wall())


def _record(message: EventRecord) -> Record:
    """The record of the journal. The coordinator keeps the spec to itself, of which the fact has a part."""
    text = message.json
    if message.name == stored_class(facts.GangRegistered):
        text = json.dumps({"spec_json": "", **json.loads(text)})
    return Record(message.position, message.at_s, message.gang_id, "", message.name, text, message.text, "")
