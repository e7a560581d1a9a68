"""`muster report`: what the values say, and that the page says it to everybody and does nothing else."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.daemon.coordinator.accounting.account_store import AccountStore, read_measured
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.goodput.intervals import Category, Measured, sums
from muster.daemon.coordinator.journal.history import Record
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.journal.reading import UnreadableJournal, read_gang
from muster.daemon.host import metric_series
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.launcher.errors import WrongInput
from muster.launcher.main import main, parser
from muster.launcher.report import assemble, series
from muster.launcher.report.html import table, tag
from muster.launcher.report.page import page_of
from muster.launcher.report.picture import COLOURS
from muster.launcher.report.report_data import Fault, Leaf, PlacedNode, PlainRequeue, ReportData
from muster.launcher.report.show import Source, report_data
from muster.launcher.report.story import Story, told
from muster.launcher.report.testing.made_up_job import ENDS, GANG, JOB, STEP_S, MadeUpJob
from muster.simulator.scenario import Scenario

GOLDEN = Path(__file__).parent / "golden" / "journals"


def records_of(world: Scenario) -> list[Record]:
    """The records of the scenario's gang, as a coordinator sends them."""
    return [
        Record(at, when, getattr(fact, "gang", ""), getattr(fact, "node", ""), *facts.encode(fact), describe(fact), "")
        for at, (when, fact) in enumerate(world.journal, 1)
        if getattr(fact, "gang", "") == "g" or isinstance(fact, facts.NodeJudged)
    ]


def reached(world: Scenario, step: int, generation: int = 1) -> Callable[[], bool]:
    return lambda: (
        world.gang.newest.stepped_generation == generation and world.core.observed.gang("g").step_number >= step
    )


@pytest.fixture(scope="module")
def world() -> Scenario:
    """A job that has lost a node, and goes on."""
    found = Scenario(4, 2)
    found.run_until(reached(found, 30))
    found.crash("n0")
    found.run_until(reached(found, 60, 2))
    return found


@pytest.fixture(scope="module")
def story(world: Scenario) -> Story:
    return told(records_of(world), until=world.now, step=world.core.observed.gang("g").step_number)


def data_of(story: Story, **more: object) -> ReportData:
    found = assemble.report_of(story, "alice", story.until, assemble.account_of(story, 8, 2.5))
    return replace(found, **more)  # type: ignore[arg-type]


# -- the values --


def test_a_lost_node_is_one_fault_with_what_was_done_and_what_it_cost(world: Scenario, story: Story) -> None:
    (fault,) = data_of(story).faults
    known = world.gang.recovery.recoveries[0]
    assert (fault.number, fault.generation, fault.action) == (1, 2, "swap")
    assert (fault.nodes_out, fault.nodes_in) == (("n0",), tuple(known.nodes_in))
    assert "n0 is lost" in fault.cause
    assert fault.lost_s == pytest.approx(known.first_step_at - known.suspected_at)


def test_the_phases_of_a_recovery_add_up_to_its_time(world: Scenario, story: Story) -> None:
    (recovery,) = data_of(story).recoveries
    known = world.gang.recovery.recoveries[0]
    assert recovery.total_s == pytest.approx(known.first_step_at - known.suspected_at)
    assert dict(recovery.parts)["detect"] == pytest.approx(known.detected_at - known.suspected_at)
    assert [name for name, _ in recovery.parts][-2:] == ["rendezvous", "load"]


def test_the_parts_of_the_account_add_up_and_the_bands_follow_each_other(story: Story) -> None:
    data = data_of(story)
    assert data.goodput.useful + sum(node_s for _, node_s in data.goodput.lost) == pytest.approx(data.goodput.allocated)
    assert [band.kind for band in data.bands] == ["queue", "start", "training", "recovery", "training"]
    for one, following in zip(data.bands, data.bands[1:], strict=False):
        assert one.end_s == pytest.approx(following.begin_s)
    assert (data.bands[0].begin_s, data.bands[-1].end_s) == (data.head.submitted_s, data.head.until_s)


def test_a_script_that_only_logs_has_trained_since_its_first_number(world: Scenario, tmp_path: Path) -> None:
    records = [one for one in records_of(world) if not isinstance(facts.decode(one.name, one.json), facts.FirstStep)]
    starts = [one.at for one in records if isinstance(facts.decode(one.name, one.json), facts.GenerationStarted)]
    first, second = (round(at) + 5 for at in starts)
    noted = metric_series.NodeSeries("n0", 1)
    for at, step in ((first, 2), (first + 1, 3), (second, 2), (second + 1, 3)):
        noted.add_rank(at, 0, metric_series.RankPoint(1, step))
    metric_series.write_node(str(tmp_path), GANG, noted)
    measured = series.read(str(tmp_path), GANG)

    def logged(since: float, until: float) -> Measured:
        return series.logged(measured, since, until)

    def training(story: Story) -> list[float]:
        return [band.begin_s for band in data_of(story).bands if band.kind == "training"]

    (since_all_ranks_ran,) = training(told([one for one in records if one.at < first], first + 10))
    assert starts[0] <= since_all_ranks_ran < first
    assert training(told(records, world.now)) == []  # a rank failed soon, and the second generation had a state to load
    assert training(told(records, world.now, logged=logged)) == [first, second]
    assert logged(first, second) == Measured(first_at=first, first_step=2, step=3)


def test_the_map_shows_where_the_ranks_are_now_and_where_the_fault_was(story: Story) -> None:
    nodes = {node.name: node for leaf in data_of(story).leaves for node in leaf.nodes}
    assert (nodes["n0"].role, nodes["n0"].faults, nodes["n0"].ranks) == ("out", (1,), None)
    carriers = sorted(node.ranks for node in nodes.values() if node.ranks)
    assert carriers == [(rank, rank) for rank in range(4)]
    assert sum(node.role == "spare" for node in nodes.values()) == 1


def test_a_plain_requeue_is_computed_from_the_jobs_own_figures() -> None:
    data = report_data(Source(MadeUpJob().records(), MadeUpJob().job_spec(), until=ENDS), price=2.5)
    assert data.requeue is not None
    one = data.requeue
    assert (one.restarts, one.queue_s, one.start_s, one.checkpoint_age_s) == (3, 700.0, 80.0, 900.0)
    assert one.each_s == 1680.0
    assert one.actual_s == pytest.approx(3.0 + 3.3 + 4.4 + 2 * 0.0, abs=1e-3)
    assert one.saved_s == pytest.approx(3 * 1680.0 - one.actual_s)


def test_what_stopped_nobody_is_noted_without_a_cost() -> None:
    data = report_data(Source(MadeUpJob().records(), MadeUpJob().job_spec(), until=ENDS), price=0.0)
    assert [(fault.action, fault.lost_s > 0) for fault in data.faults] == [
        ("swap", True), ("restart in place", True), ("noted", False), ("swap", True),
    ]  # fmt: skip
    assert [fault.number for fault in data.faults] == [1, 2, 3, 4]


def test_records_without_the_first_one_are_refused() -> None:
    with pytest.raises(WrongInput, match="does not follow from those before it"):
        told(MadeUpJob().records()[1:])


# -- the series --


def test_the_curves_are_those_of_the_jobs_series(tmp_path: Path) -> None:
    job = MadeUpJob(nodes=3, run_dir=str(tmp_path))
    job.write_series(bins=20)
    wider = metric_series.NodeSeries("n9", 2 * job.series(0, 20).width_s)
    for at_s, point in job.series(9, 20).numbers["loss"].items():
        wider.add_number(at_s, "loss", point)
    metric_series.write_node(str(tmp_path), GANG, wider)
    found = series.read(str(tmp_path), GANG)
    (loss,) = (one for one in series.curves_of(found, series.Work()) if one.name == "loss")
    points = metric_series.read_job(str(tmp_path), GANG).number("loss").values()
    assert loss.median == pytest.approx([point.median for point in points])
    assert loss.least == tuple(point.least for point in points)
    assert loss.greatest == tuple(point.greatest for point in points)
    assert loss.steps == tuple(point.step for point in points)


def test_throughput_and_mfu_follow_from_the_time_of_a_step(tmp_path: Path) -> None:
    MadeUpJob(nodes=2, run_dir=str(tmp_path)).write_series(bins=10)
    found = series.read(str(tmp_path), GANG)
    curves = {one.name: one for one in series.curves_of(found, series.Work(4e6 / 16, 1, 0.2))}
    assert curves["throughput"].median[0] == pytest.approx(4e6 / 16 / STEP_S)
    assert curves["MFU"].median[0] == pytest.approx(100 * 0.2 / STEP_S)
    assert list(curves) == ["throughput", "loss", "gradient norm", "MFU", "learning rate"]


def test_a_slow_rank_stands_out_and_many_ranks_share_rows(tmp_path: Path) -> None:
    slow = metric_series.NodeSeries("n0", 10)
    for rank in range(1100):
        of_rank = metric_series.RankPoint(10, 10, 1.0, 0.8 if rank == 700 else 0.5, 0.2)
        slow.ranks[rank] = {1000: of_rank, 1020: of_rank}
    metric_series.write_node(str(tmp_path), GANG, slow)
    heat = series.heat_of(series.read(str(tmp_path), GANG))
    assert heat is not None
    assert (heat.ranks, heat.ranks_per_row, len(heat.rows)) == (1100, 3, 367)
    assert heat.slowest == ((700, pytest.approx(0.8)),)
    assert [round(value, 3) for value in heat.rows[233] if value == value] == [0.8, 0.8]
    assert heat.rows[233][1] != heat.rows[233][1]  # nobody finished a step then


def test_ranks_that_the_job_does_not_have_and_many_bins_take_no_memory(tmp_path: Path) -> None:
    """A user writes what they like into the files that an operator's report reads."""
    far, long = metric_series.NodeSeries("n0", 4), metric_series.NodeSeries("n1", 1)
    of_rank = metric_series.RankPoint(10, 10, 1.0, 0.5, 0.2)
    far.ranks[249_999] = {1000: of_rank}
    long.ranks[1] = {7 * at: of_rank for at in range(60_000)}
    for one in (far, long):
        metric_series.write_node(str(tmp_path), GANG, one)
    found = series.read(str(tmp_path), GANG, 4)
    assert found.left_out == {"n0.json": "damaged: it is no series of a node: ValueError"}
    heat = series.heat_of(found)
    assert heat is not None
    assert len(heat.rows) == 2
    assert len(heat.rows[0]) <= 2 * metric_series.MOST_BINS + 1
    assert all(len(one.steps) <= found.most_bins for one in series.curves_of(found, series.Work()))
    unknown = series.read(str(tmp_path), GANG)
    tracemalloc.start()
    assert series.heat_of(unknown) is not None
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


GOOD = '"steps": [1], "step": [1], "step_s": [1], "compute_s": [1]'


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 1, "width_s": 4, "rank 3": {"at_s": ["x"]}}',
        f'{{"width_s": 4, "rank 0": {{"at_s": [1], {GOOD}}}, "rank 3": {{"at_s": [NaN], {GOOD}}}}}',
        f'{{"width_s": 4, "rank 3": {{"at_s": [1, 2], {GOOD}}}}}',
        f'{{"width_s": 4, "rank 3000000": {{"at_s": [1], {GOOD}}}}}',
        f'{{"width_s": 0, "rank 3": {{"at_s": [1], {GOOD}}}}}',
        f'{{"width_s": {10**400}, "rank 3": {{"at_s": [1], {GOOD}}}}}',
        f'{{"width_s": 4, "rank 3": {{"at_s": [1e300], {GOOD}}}}}',
        f'{{"width_s": 4, "rank 3": {{"at_s": [{10**400}], {GOOD}}}}}',
        '{"width_s": 4, "number loss": {"at_s": [1], "step": [1], "values": [1], "least": [1], "median": [1e300], '
        '"greatest": [1]}}',
        "[]",
        "",
    ],
)
def test_a_damaged_file_is_named_in_the_report(tmp_path: Path, text: str) -> None:
    job = MadeUpJob(nodes=2, run_dir=str(tmp_path))
    job.write_series(bins=5)
    (tmp_path / "logs" / GANG / "series" / "n1.json").write_text(text)
    data = report_data(Source(job.records(), job.job_spec(), until=ENDS), price=0.0)
    assert any(note.startswith("n1.json is left out: damaged") for note in data.notes)
    assert data.curves


# -- the page --


class Page(HTMLParser):
    """What a browser reads: tags, attributes, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A report with everything in it."""
    folder = tmp_path_factory.mktemp("run")
    job = MadeUpJob(nodes=3, run_dir=str(folder))
    job.write_series(bins=20)
    data = report_data(Source(job.records(), job.job_spec(), until=ENDS), price=2.5)
    return Page(page_of(data, UTC))


def test_the_page_has_all_sections_in_the_order_in_which_they_are_missed(whole: Page) -> None:
    sections = [value for tag, name, value in whole.attributes if (tag, name) == ("section", "id")]
    assert sections == ["summary", "timeline", "recoveries", "goodput", "training", "ranks", "network", "notes"]


def test_nothing_is_loaded_and_nothing_runs(whole: Page) -> None:
    assert not whole.tags.keys() & {"script", "iframe", "object", "embed", "form", "link", "base"}
    references = [value for _, name, value in whole.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in references)
    assert not [name for _, name, _ in whole.attributes if name.startswith("on")]
    assert not re.search(r"url\((?!#)|@import", "".join(value for _, _, value in whole.attributes))


def test_each_picture_has_words_and_ids_of_its_own(whole: Page) -> None:
    ids = [value for _, name, value in whole.attributes if name == "id"]
    assert [one for one, count in Counter(ids).items() if count > 1] == []
    named = [value for tag, name, value in whole.attributes if (tag, name) == ("svg", "aria-labelledby")]
    assert len(named) == whole.tags["svg"] == 10
    used = {one for value in named for one in value.split()}
    used |= {value[1:] for tag, name, value in whole.attributes if name == "href" and value.startswith("#")}
    used |= {one for _, _, value in whole.attributes for one in re.findall(r"url\(#([^)]+)\)", value)}
    assert used <= {*ids}


def test_every_colour_of_a_picture_is_one_of_the_pages_style(whole: Page) -> None:
    styles = " ".join(value for tag, name, value in whole.attributes if name in ("style", "fill", "stroke"))
    assert set(re.findall(r"var\(--([a-z_]+)\)", styles)) <= COLOURS.keys()
    assert not re.search(r"#fe[0-9a-f]{2}a1", styles)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("role", ["ink", "muted", "good", "bad", "line"])
def test_words_and_lines_stand_out_from_the_paper(role: str, scheme: int) -> None:
    dark, light = sorted(_luminance(COLOURS[name][scheme]) for name in (role, "paper"))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


ANYTHING = st.text(min_size=1, max_size=40) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "]]>",
        "--><b>",
        "&lt;",
        "$x^2$",
        "\ud800",
        "url(#x)",
    ]
)


@given(ANYTHING)
def test_no_text_of_others_becomes_html(text: str) -> None:
    page = Page(table(text, (text, "b"), [(text, text)]) + tag("p", text, aria_label=text))
    assert page.tags == {"div": 1, "table": 1, "caption": 1, "thead": 1, "tbody": 1, "tr": 2, "th": 3, "td": 1, "p": 1}
    assert {name for _, name, _ in page.attributes} == {"class", "tabindex", "role", "aria-label", "scope"}


def _named(data: ReportData, name: str, node: str, reason: str) -> ReportData:
    return replace(
        data,
        head=replace(data.head, name=name, user=name, result=reason),
        faults=(Fault(1, data.head.submitted_s + 1000, 2, reason, reason, (node,), (node,), (node,), 1.0, 1),),
        leaves=(Leaf(name, (PlacedNode(node, "ranks", (0, 1), (1,)),)),),
        notes=(reason,),
    )


def _consists_of(data: ReportData) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    page = Page(page_of(data, UTC))
    return page.tags, Counter((tag, key) for tag, key, _ in page.attributes)


@cache
def _harmless() -> tuple[ReportData, tuple[Counter[str], Counter[tuple[str, str]]]]:
    """The data of a job with harmless names, and what its page consists of."""
    data = data_of(told(MadeUpJob(nodes=2, ranks_per_node=1).records(), until=ENDS))
    return data, _consists_of(_named(data, "name", "n", "r"))


@settings(max_examples=8)
@given(ANYTHING, ANYTHING, ANYTHING)
def test_no_name_and_no_reason_changes_what_the_page_consists_of(name: str, node: str, reason: str) -> None:
    data, harmless = _harmless()
    assert _consists_of(_named(data, name, node, reason)) == harmless


def test_the_arithmetic_of_a_requeue_is_shown(story: Story) -> None:
    one = PlainRequeue(3, 700.0, 80.0, 900.0, "half of durable_every, 30 min", 10.0, 8, 8, 2.5)
    text = "".join(Page(page_of(data_of(story, requeue=one), UTC)).text)
    for words in ("11.7 min", "80 s", "15 min", "28 min", "3 restarts", "1.4 h", "half of durable_every, 30 min"):
        assert words in text


def test_a_job_that_has_not_started_has_a_report() -> None:
    story = told(MadeUpJob().records()[:1], until=ENDS)
    text = "".join(Page(page_of(data_of(story), UTC)).text)
    assert "No fault was seen." in text
    assert "Nothing was allocated yet." in text


# -- a coordinator that answers --


async def test_the_report_of_a_job_that_runs_is_told_by_its_coordinator(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    try:
        await world.start_agents(NODES, run_dir=str(tmp_path))
        await world.wait_for_facts(facts.GenerationStarted)
        words = ["report", "--coordinator", world.address, "--auth", f"secret:{world.folder.parent}/secret"]
        page = tmp_path / "page.html"
        config = tmp_path / "muster.toml"
        config.write_text("gpu_hour_price = 2.5\n")
        options = parser().parse_args([*words, "--config", str(config), "1", "-o", str(page)])
        assert await options.row.run(options) == 0
        missing = parser().parse_args([*words, "2", "-o", str(page)])
        with pytest.raises(WrongInput, match="no such job"):
            await missing.row.run(missing)
    finally:
        await world.close()
    text = "".join(Page(page.read_text()).text)
    for expected in ("train, job 1", "No fault was seen.", "n1", "node hours"):
        assert expected in text
    assert re.search("STARTING|RUNNING", text)
    assert "The journal ends" not in text


# -- a journal without its coordinator --


def journal(folder: Path, version: int) -> Path:
    path = folder / "journal.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((GOLDEN / f"format-{version}.sql").read_text())
    return path


@pytest.mark.parametrize("version", range(1, 11))
def test_a_journal_of_each_format_gives_a_report_and_stays_as_it_was(tmp_path: Path, version: int) -> None:
    path = journal(tmp_path, version)
    before = path.read_bytes()
    with closing(sqlite3.connect(path)) as database:
        gangs = [gang for (gang,) in database.execute("SELECT DISTINCT gang FROM facts WHERE name = 'GangRegistered'")]
    for gang in gangs:
        found = told(read_gang(tmp_path, gang))
        account = assemble.account_of(found, 0, 0.0)
        assert account.useful + sum(node_s for _, node_s in account.lost) == pytest.approx(account.allocated)
    assert (path.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (before, ["journal.db"])


def test_the_command_reads_a_journal_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal(tmp_path, 10)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--journal", str(tmp_path), "1"]) == 0
    assert "report-1.html" in capsys.readouterr().out
    text = (tmp_path / "report-1.html").read_text()
    assert "CANCELLED" in text
    assert main(["report", "--journal", str(tmp_path), "99"]) == 64
    assert "has no job 99" in capsys.readouterr().err


def test_what_a_dead_coordinator_has_kept_of_measured_times_counts(world: Scenario, tmp_path: Path) -> None:
    shares = Measured(checkpoint=0.25, data=0.125)
    AccountStore(tmp_path).note_measured("g", 1, shares)
    kept, records = read_measured(tmp_path, "g"), records_of(world)
    assert kept == {1: shares}
    alone, beside = sums(told(records, world.now).intervals), sums(told(records, world.now, shares=kept).intervals)
    assert sum(beside.values()) == pytest.approx(sum(alone.values()))
    assert beside[Category.USEFUL] < alone[Category.USEFUL]
    assert beside[Category.CHECKPOINT] == pytest.approx(2 * beside[Category.DATA])


def test_a_store_is_only_read_and_one_that_is_missing_or_damaged_is_no_error(tmp_path: Path) -> None:
    assert read_measured(tmp_path, "g") == {}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "goodput.db").write_text("no database" * 100)
    assert read_measured(tmp_path, "g") == {}
    assert (tmp_path / "goodput.db").read_text() == "no database" * 100


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableJournal, match="holds no journal: name the coordinator's --state-dir"):
        read_gang(tmp_path, "g1")


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_text("no database" * 100)
    with pytest.raises(UnreadableJournal, match=r"journal\.db can't be read"):
        read_gang(tmp_path, "g1")


def test_what_a_killed_coordinator_had_only_in_its_log_is_read(tmp_path: Path) -> None:
    job, killed = MadeUpJob(nodes=2, strikes=()), tmp_path / "killed"
    with closing(Journal(tmp_path / "state")) as running:
        for record in job.records():
            running.append([facts.decode(record.name, record.json)], record.at, "")
        shutil.copytree(tmp_path / "state", killed)
    assert (killed / "journal.db-wal").stat().st_size > 0
    assert [one.json for one in read_gang(killed, job=JOB)] == [one.json for one in job.records()]


def test_of_a_folder_that_two_machines_share_the_newest_journal_is_read(tmp_path: Path) -> None:
    for term, name in ((1, "old"), (2, "new")):
        with closing(Journal(tmp_path / name)) as journal:
            first = MadeUpJob(name=name).records()[0]
            journal.append([facts.decode(first.name, first.json)], 1.0, "")
        journal.path.rename(tmp_path / f"journal-{term:08d}.db")
    (found,) = read_gang(tmp_path, GANG)
    assert '"name":"new"' in found.json


# -- what it takes --

MISSING = (
    "import sys; sys.modules['matplotlib'] = None; from muster.launcher.main import main; sys.exit(main(sys.argv[1:]))"
)


def test_a_login_node_without_the_extra_is_told_which_one(tmp_path: Path) -> None:
    journal(tmp_path, 10)
    command = [sys.executable, "-c", MISSING, "report", "--journal", str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert "muster report needs matplotlib\n  install it: pip install 'muster[report]'" in done.stderr


def test_the_command_line_imports_no_pictures() -> None:
    code = "import sys, muster.launcher.commands.report; print(*{'matplotlib', 'numpy', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("tables", ["[]", '{"slurm": null}', '{"gpus_per_node": 1e999}', "[" * 100_000])
def test_tables_that_say_no_number_of_gpus_end_no_report(tables: str) -> None:
    job = MadeUpJob(nodes=2)
    spec = job.job_spec()
    spec.estimate_tables = tables
    assert report_data(Source(job.records(), spec, until=ENDS), price=0.0).head.job == JOB
