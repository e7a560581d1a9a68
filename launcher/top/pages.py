"""The whole screen: from what is known and where the user is to its lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.launcher.output.job_lines import Moment, goodput_share, goodput_words, job_ids, pace, says_no_step
from muster.launcher.output.job_list import RECENT_S, Selection
from muster.launcher.output.table import Cell, Coloured, Row
from muster.launcher.output.tables import coloured
from muster.launcher.top import job_page, place
from muster.launcher.top.cells import BOLD, EMPTY, MARKED, Line, Listing, fit, line, spread, text_of, wrapped
from muster.launcher.top.known import Job, Known
from muster.launcher.top.node_map import leaf_of, legend, node_map
from muster.launcher.top.place import KEYS, Body, Place
from muster.v1.api_pb2 import NodeView
from muster.wording import counted, duration

_DETAIL_LINES = 3
"""Lines below a list for all that is to be said of the record under the cursor."""
_NAME_CHARS = 12
"""Of a job's name in the list."""
_KEYS_WIDTH = 34
"""Of the column of the keys on their page."""
_STALE = "red"


def body_of(known: Known, where: Place, moment: Moment, width: int) -> Body | None:
    """The list or the map of the place; None: it has none, or nothing came yet."""
    if not where.job:
        if where.page == place.JOBS:
            return _job_list(known, where, moment).matching(where.wanted)
        return _body_of_nodes(known.nodes, known.jobs_of, where, width)
    job = known.jobs.get(where.job)
    if job is None:
        return None
    match where.page:
        case place.RANKS:
            return job_page.ranks(job).matching(where.wanted)
        case place.RECOVERIES:
            return job_page.recoveries(job.view, moment).matching(where.wanted)
        case place.EVENTS:
            return job_page.events(known.events_of(where.job), moment).matching(where.wanted)
        case place.NODES | place.MAP:
            return _body_of_nodes(job.view.nodes, lambda node: "", where, width)
        case _:
            return None


def _body_of_nodes(found: Sequence[NodeView], jobs: Callable[[NodeView], str], where: Place, width: int) -> Body:
    """Nodes as a list or as a map. An open leaf is a list of its nodes."""
    if where.leaf:
        found = [node for node in found if leaf_of(node) == where.leaf]
    listing = job_page.nodes(found, jobs).matching(where.wanted)
    if where.page == place.NODES or where.leaf:
        return listing
    if where.wanted:
        wanted = {node.node for node in listing.items}
        found = [node for node in found if node.node in wanted]
    return node_map(found, jobs, width)


def _job_list(known: Known, where: Place, moment: Moment) -> Listing[Job]:
    titles = ("job", "name", "phase", "pace", "goodput", "recovery", "step", "why")

    def row(job: Job) -> Row:
        view = job.view
        return (
            _first_job(job_ids(view).split()),
            view.name if len(view.name) <= _NAME_CHARS else f"{view.name[: _NAME_CHARS - 1]}…",
            coloured(view.phase),
            "" if view.final else pace(view.training),
            goodput_share(view),
            job_page.newest_recovery(view, moment),
            "" if says_no_step(view) else str(view.step),
            view.reason if view.final else view.waiting_for,
        )

    chosen = Selection(None if where.ended_too else RECENT_S)
    found = [job for job in known.all_jobs if chosen.includes(job.view, moment.now)]
    nothing = "the coordinator knows no jobs of yours" if known.listed_at_s else "waits for the first list of jobs"
    if known.listed:
        nothing = "no job goes on or has ended within a day (a: all jobs)"
    return Listing(titles, found, lambda job: job.view.gang_id, row, _job_words, nothing)


def _first_job(ids: Sequence[str]) -> str:
    """The gang's own job, and how many pool jobs it has."""
    return " ".join([*ids[:1], *([f"+{len(ids) - 1}"] if len(ids) > 1 else [])])


def _job_words(job: Job) -> str:
    view = job.view
    newest = view.recoveries[-1] if view.recoveries else None
    cause = f"newest recovery: {newest.action}, because {newest.cause}" if newest is not None else ""
    waits = f"waits for {view.waiting_for}" if view.waiting_for and not view.final else ""
    return "; ".join(filter(None, (view.reason if view.final else waits, cause, goodput_words(view))))


def picture(known: Known, where: Place, body: Body | None, moment: Moment, width: int, height: int) -> list[Line]:
    """`height` lines, none wider than `width`. `body`: that of the place."""
    lines = _keys(width) if where.keys_shown else _page(known, where, body, moment, width, height - 1)
    shown = [fit(one, width) for one in lines[: height - 1]]
    return [*shown, *[EMPTY] * (height - 1 - len(shown)), _footer(where, width)]


def _page(known: Known, where: Place, body: Body | None, moment: Moment, width: int, height: int) -> list[Line]:
    job = known.jobs.get(where.job)
    head = _heading(known, where, job, moment, width)
    if where.job and job is None:
        return head
    if job is not None and where.page == place.OVERVIEW:
        return [*head, *_overview(known, job, moment, width, height - len(head))]
    if body is None:
        return head
    if where.node:
        return [*head, EMPTY, *wrapped(body.words(where.cursor), width, height)]
    if where.page == place.MAP and not where.leaf:
        head += wrapped(legend(job.view.nodes if job is not None else known.nodes), width, 2)
    room = height - len(head) - _DETAIL_LINES - 1
    lines = body.draw(where.cursor, width, room)
    detail = wrapped(body.words(where.cursor), width, _DETAIL_LINES)
    return [*head, *lines, *[EMPTY] * (room - len(lines)), line("─" * width), *detail]


def _heading(known: Known, where: Place, job: Job | None, moment: Moment, width: int) -> list[Line]:
    """What this is, and how old: what is not heard any more is never shown as if it were."""
    if where.job:
        at_s, left = (job.at_s, job_page.title(job.view, moment)) if job is not None else (0.0, line(where.job))
    else:
        at_s, left = min(known.listed_at_s, known.nodes_at_s), _fleet_title(known)
    over = job is not None and job.view.final
    age = duration(max(0, round(moment.now - at_s)))
    if known.trouble and not over:
        right = line(Coloured(f"STALE, as of {age} ago" if at_s else "nothing heard yet", _STALE))
        why = (line(Coloured(text_of(one), _STALE)) for one in wrapped(known.trouble, width, 2))
        return [spread(left, right, width), *why]
    if not at_s:
        right = line("nothing heard yet")
    elif over:
        right = line("the job has ended")
    else:  # a job is sent when something has changed, a list is asked for again and again
        right = line(f"last change {age} ago" if where.job else f"as of {age} ago")
    return [spread(left, right, width)]


def _fleet_title(known: Known) -> Line:
    running = sum(not job.view.final for job in known.all_jobs)
    troubled = sum(node.verdict != "FIT" for node in known.nodes)
    return line(
        Coloured("muster", BOLD),
        f"  {counted(len(known.listed), 'job')}, {running} going on  {counted(len(known.nodes), 'node', form=',')}, ",
        Coloured(f"{troubled:,} not FIT", "yellow" if troubled else ""),
    )


def _overview(known: Known, job: Job, moment: Moment, width: int, height: int) -> list[Line]:
    """The summary, then of each list as much as there is room for: recoveries and events get a third each at most."""
    head = job_page.summary(job, moment, width)[: max(5, height // 2)]
    recoveries = job_page.recoveries(job.view, moment)
    ranks, events = job_page.ranks(job), job_page.events(known.events_of(job.view.gang_id), moment)
    room = height - len(head) - 3  # a title each
    third = max(2, room // 3)
    shares = [min(third, len(listing.items) + 1) for listing in (recoveries, events)]
    lines = [
        *head,
        _section("recoveries (v)", str(len(recoveries.items)), width),
        *recoveries.draw(None, width, shares[0]),
    ]
    lines += [
        _section("ranks (r)", job_page.ranks_title(job), width),
        *ranks.draw(None, width, max(2, room - sum(shares))),
    ]
    return [*lines, _section("events (e)", "", width), *events.draw(None, width, shares[1])]


def _section(name: str, words: str, width: int) -> Line:
    left = line("── ", Coloured(name, BOLD), f"  {words} " if words else " ")
    return (*left, Coloured("─" * max(0, width - len(text_of(left))), ""))


def _keys(width: int) -> list[Line]:
    lines = [line(Coloured("keys", BOLD)), EMPTY]
    for keys, words in KEYS:
        first, *more = wrapped(words, width - _KEYS_WIDTH, 3)
        lines += [line(f"  {keys}".ljust(_KEYS_WIDTH), *first), *(line(" " * _KEYS_WIDTH, *one) for one in more)]
    return lines


def _footer(where: Place, width: int) -> Line:
    if where.typing:
        return fit(line(Coloured(f"/{where.wanted}_", MARKED), "  Enter keeps it, Esc drops it"), width)
    kept = f"only {where.wanted!r} (Esc: all)  " if where.wanted else ""
    pages = place.OF_JOB if where.job else place.OF_FLEET
    cells: list[Cell] = [kept, "with all that have ended (a: without)  " * where.ended_too]
    for key, page in pages.items():
        cells += [
            Coloured(f"[{key}]{page}" if page == where.page else f"{key} {page}", BOLD * (page == where.page)),
            "  ",
        ]
    return spread(line(*cells), line("? keys  q end"), width)
