"""`muster runs`: the records of your runs: what was run, from which code, with what, and how it went.

`show` prints one, `diff` what differs between two, `export` writes the numbers that ranks reported for TensorBoard or
MLflow. A job that was requeued, or has grown, is one run. The records are files of the user's own. The
coordinator is asked only how runs go that are not over, and Slurm which of the rest have ended without a word.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.checkpoint.format.number_page import SAMPLER_POSITION
from muster.launcher.command import Command, connect, load_site, print_note, screen, show, time_arguments
from muster.launcher.errors import LauncherError, SiteFault, WrongInput
from muster.launcher.output.table import Cell, labelled, table
from muster.launcher.runs.record import VARIABLE, store_folder
from muster.wording import counted, listed

if TYPE_CHECKING:
    from muster.launcher.output.screen import Screen
    from muster.launcher.runs.store import Run, RunStore
    from muster.slurm.client.types import Gone, Job

SHOWN = 20
"""Runs of the list, unless all are asked for."""
_RUN = "a Slurm job id, a gang id, or a job's name: its newest run"


def _arguments(parser: argparse.ArgumentParser) -> None:
    _store_argument(parser, default="")
    time_arguments(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="list runs, the newest first (the default)")
    listing.add_argument("--name", help="only runs of jobs with this name")
    listing.add_argument("--all", action="store_true", help=f"not only the newest {SHOWN}")
    listing.add_argument("--json", action="store_true", help="print one run on each line, whole")
    one = actions.add_parser("show", help="show one run")
    one.add_argument("run", metavar="RUN", help=_RUN)
    one.add_argument("--json", action="store_true", help="print the whole record")
    pair = actions.add_parser("diff", help="show what differs between two runs")
    pair.add_argument("one", metavar="RUN", help=_RUN)
    pair.add_argument("other", metavar="RUN", help=_RUN)
    export = actions.add_parser("export", help="write the numbers of a run for another tool")
    export.add_argument("run", metavar="RUN", help=_RUN)
    target = export.add_mutually_exclusive_group(required=True)
    target.add_argument("--tensorboard", metavar="DIR", type=Path, help="a folder for TensorBoard's event file")
    target.add_argument("--mlflow", metavar="URI", help="MLflow's tracking server, or its folder")
    export.add_argument("--experiment", default="muster", help="MLflow's experiment; default muster")
    for action in (listing, one, pair, export):
        _store_argument(action, default=argparse.SUPPRESS)


def _store_argument(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--store", metavar="DIR", default=default, help=f"the folder of the records; default {VARIABLE}"
    )


async def _run(options: argparse.Namespace) -> int:
    store = _open(options.store)
    runs = store.runs()
    if any(not run.is_over for run in runs):
        told = await _told(options)
        runs = await _with_ends(store.runs(told) if told else runs, told)
    for name, why in store.left_out.items():
        print_note(f"muster: the record {name} is left out: {why}")
    match options.action:
        case "show":
            _show(_find(runs, options.run), options, as_json=options.json)
        case "diff":
            show(_difference(_find(runs, options.one), _find(runs, options.other), screen(options)))
        case "export":
            _export(_find(runs, options.run), options)
        case _:
            _list(runs, options)
    return 0


COMMAND = Command(_arguments, _run)


async def _told(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """How the caller's jobs go, as the coordinator says. A job whose first node is dead can't tell it itself."""
    from muster.daemon.agent.batch.run_summary import summary

    try:
        async with connect(load_site(options)) as coordinator:
            return {view.gang_id: summary(view) for view in await coordinator.gangs()}
    except LauncherError as error:
        print_note(f"muster: how runs go is as they and Slurm have told it: {error.message}")
        return {}


async def _with_ends(runs: Sequence[Run], told: Collection[str]) -> list[Run]:
    """`runs`, with Slurm's word for those of which nobody else has said that they are over: a job that is cancelled
    while the coordinator is down tells nothing more. A home may serve several clusters: Slurm knows nothing of a run of
    another one, or has a job of that number of its own. `told`: the gangs of which the coordinator has told."""
    from muster.launcher.runs.origins import cluster_name
    from muster.slurm.client.backends.commands import CliSlurm
    from muster.slurm.client.types import Unknown

    untold = [run for run in runs if not run.is_over and run.gang not in told]
    here = await cluster_name() if any(run.record.get("cluster") for run in untold) else ""
    untold = [run for run in untold if run.record.get("cluster") in (None, "", here)]
    asked = {run.gang: int(run.record["slurm_job_id"]) for run in untold}
    found = await CliSlurm().jobs(set(asked.values())) if asked else {}
    if isinstance(found, Unknown):
        return list(runs)
    ends = {gang: _end(found[job]) for gang, job in asked.items()}
    return [replace(run, outcome=run.outcome | ends.get(run.gang, {})) for run in runs]


def _end(job: Job | Gone) -> dict[str, str]:
    """The part of an outcome that says how Slurm has ended a job; empty: it has not. Slurm forgets a job after some
    minutes."""
    from muster.slurm.client.types import Gone

    if isinstance(job, Gone):
        return {"phase": "not in Slurm"}
    return {"phase": job.state.value} if job.final else {}


def _open(named: str) -> RunStore:
    try:
        from muster.launcher.runs.store import RunStore
    except ImportError:
        raise SiteFault("the records of runs need sqlite-utils", 'install it: pip install "muster[runs]"') from None
    return RunStore(store_folder(named, os.environ))


def _find(runs: Sequence[Run], wanted: str) -> Run:
    for run in runs:  # the newest first
        if wanted in (run.gang, str(run.record["slurm_job_id"]), run.record["name"]):
            return run
    hint = "muster runs lists them; --store names another folder"
    if wanted.startswith("local-"):
        hint = "muster run --local tests a script, and keeps no record: its files are in --run-dir"
    raise WrongInput(f"there is no record of a run {wanted!r}", hint)


def _list(runs: Sequence[Run], options: argparse.Namespace) -> None:
    name, everything = getattr(options, "name", None), getattr(options, "all", False)
    found = [run for run in runs if name in (None, run.record["name"])]
    shown = found if everything else found[:SHOWN]
    if getattr(options, "json", False):
        for run in shown:
            print(json.dumps({**run.record, "outcome": run.outcome}))
    elif shown:
        target = screen(options)
        titles = ("job", "name", target.titled("submitted"), "phase", "step", "commit", "note")
        show(table(target, titles, [_row(run, target) for run in shown]))
    else:
        print_note("muster: there are no records of runs yet: muster submit keeps one of each run")
    if len(shown) < len(found):
        print_note(
            f"{counted(len(found) - len(shown), 'older run is', 'older runs are')} not shown: muster runs list --all"
        )


def _row(run: Run, target: Screen) -> list[Cell]:
    record, outcome = run.record, run.outcome
    commit = str(record.get("repository", {}).get("commit", ""))[:10]
    changed = "+" if record.get("repository", {}).get("diff") else ""
    return [
        str(record["slurm_job_id"]), record["name"], target.time(record["submitted_s"]), outcome.get("phase", "QUEUED"),
        str(outcome.get("step", "")), commit + changed, record.get("note", ""),
    ]  # fmt: skip


def _show(run: Run, options: argparse.Namespace, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**run.record, "outcome": run.outcome}))
        return
    target = screen(options)
    show(labelled(target, _lines(run, target)))


def _lines(run: Run, target: Screen) -> Iterator[tuple[str, Cell]]:
    record, outcome, spec = run.record, run.outcome, run.record["spec"]
    yield "run", f"{record['name']}, job {record['slurm_job_id']}, gang {run.gang}"
    yield "submitted", f"{target.time(record['submitted_s'])} on {record['host']}"
    yield "phase", _phase(outcome)
    yield "command", " ".join(spec["command"])
    yield "nodes", f"{spec.get('nodes', 0)} and {counted(int(spec.get('spares', 0)), 'spare')}"
    for key in ("data", "seed", "note", "resumed_from"):
        if record.get(key):
            yield key.replace("_", " "), str(record[key])
    yield "code", _code(record.get("repository", {}))
    interpreter = record.get("interpreter", {})
    torch = interpreter.get("packages", {}).get("torch")
    packages = f"Python {interpreter.get('python')}, {counted(len(interpreter.get('packages', {})), 'package')}"
    yield "packages", interpreter.get("unknown") or packages + (f", torch {torch}" if torch else "")
    yield (
        "variables",
        f"{len(record['environment'])} of the shell, {len(spec.get('env', {}))} of [env]; secrets are left out",
    )
    for node, ranks in outcome.get("ranks_by_node", {}).items():
        yield "ranks", f"{node}: {', '.join(map(str, ranks))}"
    for line, nodes in outcome.get("hardware", {}).items():
        yield "hardware", f"{listed(nodes)}: {line}"
    for recovery in outcome.get("recoveries", []):
        yield "recovery", f"generation {recovery['generation']}: {recovery.get('action')}: {recovery.get('cause')}"
    for metric in outcome.get("training", {}).get("metrics", []):
        if metric["name"] == SAMPLER_POSITION:
            yield "sampler", f"position {metric['greatest']:,.0f} at step {int(metric['step']):,}"
    if outcome.get("durable_path"):
        yield "checkpoint", outcome["durable_path"]
    yield "whole", "muster runs show --json has all of it"


def _phase(outcome: dict[str, Any]) -> str:
    if not outcome:
        return "nothing is known yet: the job has not told anything in its run_dir"
    reason = f": {outcome['reason']}" if outcome.get("reason") else ""
    return f"{outcome['phase']}, step {outcome.get('step', 0)}, generation {outcome.get('generation', 0)}{reason}"


def _code(repository: dict[str, Any]) -> str:
    if "commit" not in repository:
        return str(repository.get("unknown", "not known"))
    lines = len(repository["diff"].splitlines())
    changed = f", with uncommitted changes ({counted(lines, 'line')} of diff)" if lines else ""
    return f"{repository['commit'][:12]} ({repository['branch']}) in {repository['folder']}{changed}"


def _difference(one: Run, other: Run, target: Screen) -> Iterator[str]:
    from muster.launcher.runs import difference

    titles = ("key", f"job {one.record['slurm_job_id']}", f"job {other.record['slurm_job_id']}")
    rows = [
        *difference.differences(one.record, other.record),
        *difference.outcome_differences(one.outcome, other.outcome),
    ]
    if rows:
        yield from table(target, titles, rows)
    else:
        yield "their records are equal"
    yield from difference.changes(one.record, other.record)


def _export(run: Run, options: argparse.Namespace) -> None:
    from muster.launcher.runs import export

    if options.tensorboard:
        count, where = export.to_tensorboard(run, options.tensorboard), str(options.tensorboard)
    else:
        count, where = export.to_mlflow(run, options.mlflow, options.experiment), options.mlflow
    print_note(f"{counted(count, 'value')} of {run.record['name']} in {where}")
