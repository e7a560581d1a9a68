"""`muster report`: its page in a real browser, and the report of a job on a real Slurm that lost a rank and a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from tests.cluster.chromium import chromium, watched

from muster.launcher.report.page import page_of
from muster.launcher.report.show import Source, report_data
from muster.launcher.report.testing.made_up_job import ENDS, MadeUpJob
from muster.v1.api_pb2 import GangView

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOST_BYTES = 150_000
"""Of a picture in docs."""
SECTIONS = ["Summary", "Time line", "Recoveries", "Goodput", "Training", "Step time by rank", "Ranks on the network"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up job with all pictures."""
    folder = tmp_path_factory.mktemp("report")
    job = MadeUpJob(nodes=14, run_dir=str(folder))
    job.write_series(bins=120)
    view = GangView(phase="RUNNING", step=100_000, run_dir=str(folder))
    data = report_data(Source(job.records(), job.job_spec(), view, ENDS), price=2.5)
    page = folder / "report.html"
    page.write_text(page_of(replace(data, head=replace(data.head, user="alice")), UTC))
    return page


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    """The report in the browser, with a clean console and no network at the end."""
    one = browser.new_page(viewport={"width": 1100, "height": 900})
    said = watched(one)
    one.goto(report.as_uri())
    yield one
    one.close()
    assert said == []


def test_the_page_has_its_sections_and_its_pictures_have_axes(page: Page) -> None:
    assert page.locator("h2").all_inner_texts() == SECTIONS
    assert page.locator("svg").count() == 10
    curve = page.locator("#training svg").nth(1)
    assert {"loss", "step", "15,000"} <= {*curve.locator("text").all_text_contents()}
    assert {"rank", "seconds of a step, without waiting"} <= {*page.locator("#ranks svg text").all_text_contents()}
    for number in range(10):
        box = page.locator("svg").nth(number).bounding_box()
        assert box is not None
        assert box["width"] > 600
        assert box["height"] > 80


def test_no_two_labels_of_a_picture_lie_on_each_other(page: Page) -> None:
    overlaps = page.evaluate("""() => [...document.querySelectorAll('svg')].flatMap(svg => {
        const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim())
            .map(t => [t.textContent, t.getBoundingClientRect()])
        return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([_, b]) =>
            Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([other]) => `${one} | ${other}`))})""")
    assert overlaps == []


def test_a_screen_reader_hears_the_sections_the_pictures_and_the_tables(page: Page) -> None:
    said = page.locator("body").aria_snapshot()
    for words in (
        'link "Skip to the report"',
        'navigation "Contents"',
        'heading "Goodput" [level=2]',
        'img "Time line of the job',
        'img "Step time of each rank over time',
        'region "Faults: what failed, what was done, what it cost"',
        'columnheader "what failed"',
    ):
        assert words in said, words


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id || location.hash") in ("report", "#report")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open") is True


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(23, 26, 31)")])
def test_the_pictures_follow_the_scheme(page: Page, scheme: str, paper: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    ink = page.evaluate("getComputedStyle(document.querySelector('#timeline svg text')).fill")
    assert ink == page.evaluate("getComputedStyle(document.body).color")
    shown = page.screenshot()
    assert len(shown) > 10_000


def test_a_narrow_screen_shows_all_of_it(page: Page) -> None:
    page.set_viewport_size({"width": 800, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= 800")


def test_it_is_printed_on_a4_with_the_tables_that_are_open(page: Page, tmp_path: Path) -> None:
    page.locator("summary").first.click()
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert [page.locator("details").nth(number).is_visible() for number in (0, 1)] == [True, False]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    printed = page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    assert b"/MediaBox [0 0 594" in printed.replace(b"[0 0 595", b"[0 0 594")


@pytest.mark.parametrize(("scheme", "section"), [("light", "summary"), ("dark", "ranks")])
def test_the_pictures_of_the_documentation_are_there(page: Page, scheme: str, section: str) -> None:
    """MUSTER_GOLDEN=write makes them anew."""
    file = DOCS / f"report-{scheme}.png"
    if os.environ.get("MUSTER_GOLDEN") == "write":
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": 900, "height": 860})
        page.evaluate("id => document.getElementById(id).scrollIntoView()", section)
        file.write_bytes(page.screenshot())
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size < MOST_BYTES
