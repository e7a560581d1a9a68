"""What the documents say of the code holds."""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import get_args

import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.facts import Fact
from muster.daemon.coordinator.policy.policy import Over, SignalAction

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SOURCES = [
    path
    for path in sorted(ROOT.glob("[a-z]*/**/*.py"))
    if path.relative_to(ROOT).parts[0] not in ("src", "tests", "build")  # pip makes build when it installs a checkout
]
SOURCES += sorted((ROOT / "src/muster").glob("*.py"))  # its folders are links to those above
NAMED = re.compile(r"(?<!`)`([A-Za-z_]\w*)`(?!`)")
"""A name in backticks."""


def test_the_states_are_those_of_the_tables() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_states.py"], capture_output=True, text=True, timeout=60, check=True
    )
    assert made.stdout == (ROOT / "docs" / "STATES.md").read_text(), "run: python docs/make_states.py > docs/STATES.md"


def test_the_authority_matrix_is_the_table_that_decides() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_authority.py"], capture_output=True, text=True, timeout=60, check=True
    )
    assert made.stdout == (ROOT / "docs" / "SECURITY.md").read_text(), "run: python docs/make_authority.py --write"


def test_the_schema_is_that_of_the_model() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_schema.py"], capture_output=True, text=True, timeout=60, check=True
    )
    saved = (ROOT / "launcher" / "spec" / "job.schema.json").read_text()
    assert made.stdout == saved, "run: python docs/make_schema.py > launcher/spec/job.schema.json"


def test_the_attacks_name_tests_that_exist() -> None:
    named = re.findall(r"`(test_\w+)::(\w+)`", (ROOT / "docs" / "SECURITY.md").read_text())
    assert len(named) > 30
    for file, test in named:
        found = [path for path in (ROOT / "tests").glob(f"*/{file}.py") if f"def {test}(" in path.read_text()]
        assert found, f"{file}::{test}"


def test_each_record_that_an_owner_can_cause_has_its_bound() -> None:
    page = (ROOT / "docs" / "SECURITY.md").read_text()
    table = page.partition("## What an owner can add to the journal")[2].partition("\n## ")[0]
    causes = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| "))
    of_gangs = {kind.__name__ for kind in get_args(Fact) if "gang" in kind.__dataclass_fields__}
    assert of_gangs - set(re.findall(r"[A-Z]\w+", causes)) == set()


def _messages() -> str:
    """All text in the code, a line each, from its cached bytecode. Of text that is filled in, the parts between."""
    loaders = [SourceFileLoader(path.stem, str(path)) for path in SOURCES]
    return "\n".join(text for loader in loaders for text in _texts(loader.get_code(loader.name)))


def _texts(constant: object) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType | tuple | frozenset):
        for one in constant.co_consts if isinstance(constant, CodeType) else constant:
            yield from _texts(one)


SAID_BY_OTHERS = {"Epilog error", "Prolog error", "memory allocation of … failed"}


def test_messages_by_which_an_operator_searches_exist() -> None:
    """Those in quotation marks on the page for whoever is called. Numbers and names of nodes are filled in."""
    page = (ROOT / "docs" / "operations" / "something-is-down.md").read_text()
    quoted = set(re.findall(r'"([^"\n]+)"', page)) - SAID_BY_OTHERS
    assert len(quoted) > 20
    messages = _messages()
    for quotation in quoted:
        fixed = [part.strip(" :,()") for part in re.split(r"…|\d+|\bn\d", quotation)]
        missing = [part for part in fixed if part not in messages]
        assert not missing, f"{quotation}: no message says {missing}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_documents_that_the_code_names_exist() -> None:
    for path in SOURCES:
        for named in re.findall(r"\bdocs/[\w./-]*\w", path.read_text()):
            assert (ROOT / named).exists(), f"{path.relative_to(ROOT)}: {named}"


@pytest.mark.parametrize("elsewhere", ["trust issue", "Slurm facts", "slurm-facts"])
def test_no_file_refers_to_what_the_repository_does_not_hold(elsewhere: str) -> None:
    for path in (*SOURCES, *PAGES):
        assert elsewhere not in path.read_text(), path.relative_to(ROOT)


GLOSSARY = ROOT / "docs" / "GLOSSARY.md"
STORED = [
    *(ROOT / "protos").glob("muster/v1/*.proto"),
    *(ROOT / "daemon/coordinator/core/state").glob("*.py"),
    ROOT / "daemon/coordinator/policy/policy.toml",
]
"""Where a name is stored or sent, so that it can't be changed."""

RETIRED = {
    "ballot": "commit tracker",
    "bargain": "fencing timeouts",
    "botched": "flush_failed",
    "crew": "rank supervisor",
    "custody": "retention",
    "depot": "kept memory",
    "desk": "replica receiver",
    "doubted": "not yet attributed",
    "ears": "handlers",
    "echoes": "correlated faults",
    "incumbent": "lease holder",
    "knock": "probe",
    "law": "invariant",
    "laws": "invariants",
    "mutants": "planted bugs",
    "neighbourhood": "peer monitor",
    "outcast": "no member",
    "patience": "timeout",
    "rehearsal": "scenario",
    "rungs": "kinds of recovery",
    "shelf": "shard store",
    "sight": "observed state",
    "spell": "period of silence",
    "stamp": "version",
    "tallies": "index",
    "tally": "index",
    "tenure": "leadership",
    "turnover": "event processing",
    "uneasy": "suspected",
    "wards": "nodes whose replicas it holds",
    "warmth": "zygote",
    "weather": "network conditions",
}
"""Words that readers stumbled over, and what is said instead."""


def _glossary() -> list[list[str]]:
    """Term, meaning, origin and kept name of each line."""
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_glossary_lists_each_term_once_and_in_order() -> None:
    terms = [term.casefold() for term, *_ in _glossary()]
    assert len(terms) > 80
    assert terms == sorted(set(terms))


def test_each_line_of_the_glossary_is_whole() -> None:
    for row in _glossary():
        assert len(row) == 4, row
        assert row[1].endswith((".", ".)")), row[0]


def test_names_that_the_glossary_keeps_are_stored() -> None:
    stored = "".join(path.read_text() for path in STORED)
    for term, _, _, kept in _glossary():
        assert all(re.search(rf"\b{name}\b", stored) for name in NAMED.findall(kept)), f"{term}: {kept}"


def test_every_term_of_the_glossary_is_used() -> None:
    """Somewhere in code, wire or documents: as words, in snake_case or in CamelCase."""
    wire = (ROOT / "protos").glob("muster/v1/*.proto")
    text = " ".join(path.read_text() for path in (*SOURCES, *wire, *PAGES) if path != GLOSSARY)
    text = re.sub(r"[\s_-]+", " ", re.sub(r"([a-z])([A-Z])", r"\1 \2", text)).casefold()
    assert not [term for term, *_ in _glossary() if term.casefold().replace("-", " ") not in text]


def test_retired_words_are_used_no_more() -> None:
    """In the two documents that a newcomer reads first, and where each module says what it is for."""
    texts = {path: path.read_text() for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md")}
    texts |= {path: ast.get_docstring(_tree(path)) or "" for path in SOURCES}
    words = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
    for path, text in texts.items():
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)  # names that are stored may be quoted
        found = words.search(prose)
        assert not found, f"{path.relative_to(ROOT)}: {found[1]}; say: {RETIRED[found[1].lower()]}"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(_tree(path)))


def _names(path: Path) -> Iterator[str]:
    """Every name that the code of a module uses or makes, be it in a short text that is no docstring."""
    docstrings = {id(node.value) for node in _nodes(path) if isinstance(node, ast.Expr)}
    for node in _nodes(path):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.alias(name=name, asname=given):
                yield given or name
            case ast.Constant(value=str(text)) if len(text) < 80 and id(node) not in docstrings:
                yield from re.findall(r"\w+", text)
            case _:
                pass


def test_names_in_docstrings_are_names_of_the_code() -> None:
    """A class's or a function's docstring names what its module knows, or a class."""
    classes = {node.name for path in SOURCES for node in _nodes(path) if isinstance(node, ast.ClassDef)}
    for path in SOURCES:
        known = {*_names(path), *classes, *keyword.kwlist, *dir(builtins)}
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                unknown = set(NAMED.findall(ast.get_docstring(node) or "")) - known
                assert not unknown, f"{path.relative_to(ROOT)}: {node.name} speaks of {unknown}"


def test_modules_of_the_core_name_what_there_is() -> None:
    modules = {name for path in SOURCES for name in (path.stem, path.parent.name)}
    for path in SOURCES:
        if "core" in path.relative_to(ROOT).parts:
            unknown = set(NAMED.findall(ast.get_docstring(_tree(path)) or "")) - {*_names(path), *modules}
            assert not unknown, f"{path.relative_to(ROOT)} speaks of {unknown}"


QUOTED = re.compile(r"`([^`\n]+)`")
FOREIGN = {"torch.distributed.checkpoint"}
"""Dotted names in ARCHITECTURE.md that are not Muster's."""


@cache
def _defined() -> frozenset[tuple[str, str]]:
    """What exists: (module, function, method, class or constant) and (class, field or method)."""
    found: set[tuple[str, str]] = set()
    for path in SOURCES:
        tree = _tree(path)
        for owner in (tree, *(node for node in _nodes(path) if isinstance(node, ast.ClassDef))):
            names = {name for node in owner.body for name in _defined_by(node)}
            found |= {(path.stem, name) for name in names}
            if isinstance(owner, ast.ClassDef):
                found |= {(owner.name, name) for name in names}
    return frozenset(found)


def _defined_by(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return []


def _missing(quoted: str) -> bool:
    """What a document quotes is a path, a `module.function`, a class or a word of the wire that is not there."""
    if " " in quoted:
        return False  # a command
    if "/" in quoted:
        return not (ROOT / quoted).exists()
    if quoted.startswith("muster."):
        return not ROOT.joinpath(*quoted.split(".")[1:]).exists()
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", quoted) and quoted not in FOREIGN:
        owner, name = quoted.split(".")[-2:]
        return (owner, name) not in _defined()
    return False


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_and_functions_that_a_guide_names_exist(page: str) -> None:
    quoted = QUOTED.findall(re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL))
    assert len(quoted) > 80
    missing = [name for name in quoted if _missing(name)]
    assert not missing, f"{page} names what is not there (any more): write there what it is called now"


def test_paths_within_sentences_exist() -> None:
    tops = {path.name for path in ROOT.iterdir()}
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        paths = [name for name in QUOTED.findall(prose) if "/" in name and " " not in name]
        gone = [name for name in paths if name.split("/")[0] in tops and not (ROOT / name).exists()]
        assert not gone, f"{page.name}: {gone}"


def test_words_that_the_architecture_quotes_are_in_the_code() -> None:
    """Facts, events, messages, commands: a single word in backticks."""
    wire = [*(ROOT / "protos").glob("muster/v1/*.proto"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    known = set(re.findall(r"[\w-]+", "".join(path.read_text() for path in (*SOURCES, *wire))))
    quoted = re.findall(r"`([\w-]+)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert not {name for name in quoted if name not in known}


def _timeouts() -> list[tuple[str, float, object]]:
    """Of each row of the table in ARCHITECTURE.md: the name, its number, and what the code has."""
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## How long is each timeout?")[2].partition("\n## ")[0]
    rows, module = [], None
    for seconds, name, path in re.findall(
        r"^\| ([\d.]+) \|.*\| `([\w.]+)`(?: in `([\w/.]+)`|, there) \|$", table, re.M
    ):
        module = importlib.import_module(f"muster.{path.removesuffix('.py').replace('/', '.')}") if path else module
        owner, constant = name.split(".")
        kind = getattr(module, owner, None)
        rows.append((name, float(seconds), getattr(kind() if kind else module, constant)))
    assert len(rows) == table.count("\n| ") - 2
    return rows


@pytest.mark.parametrize(("name", "documented", "real"), _timeouts())
def test_the_table_of_timeouts_is_true(name: str, documented: float, real: object) -> None:
    assert documented == real, name


@pytest.mark.parametrize("name", ["lease.py/none", "failure_detector.no_such_function", "Member.no_such_field"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert _missing(name)


def test_the_layout_names_every_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    layout = {name.rstrip("/") for name in QUOTED.findall(text[text.index("## Layout") : text.index("## Which file")])}
    folders = {str(path.parent.relative_to(ROOT)) for path in SOURCES if path.stat().st_size}
    assert not {name for name in folders - layout if "/" in name and not name.startswith(("benchmarks", "examples"))}


def test_links_to_headings_lead_to_headings() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            heading = re.findall(r"^#+ (.*)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in heading}
            assert anchor in anchors, f"{page.name}: #{anchor}"


def test_a_signals_event_names_every_judgement() -> None:
    assert re.findall(r'"(\w+)"', events.NodeSignalled.__doc__ or "") == [
        *get_args(SignalAction),
        *get_args(Over),
    ]
