"""What the documents show can be copied: commands are understood, files are valid, Python is Python."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.agent.__main__ import _parser as agent_parser
from muster.daemon.coordinator.__main__ import _parser as coordinator_parser
from muster.daemon.coordinator.policy import policy
from muster.daemon.node.__main__ import _parser as daemon_parser
from muster.daemon.transport.site_config import Site
from muster.fabric.cost import accelerators
from muster.fabric.sources import site_file
from muster.launcher.main import parser
from muster.launcher.spec.spec import Job, parse
from muster.slurm.client.parsing.hostlist import expand

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

JOB = """
name = "tiny"
nodes = 16
command = ["python3", "train.py"]
run_dir = "/shared/tiny"
"""
"""What a part of a job.toml is shown without."""
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
REMOVED = re.compile(r"^### Removed$.*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)
"""What a part of the changes says is gone."""
SHOWN_COMMAND = re.compile(r"(?:^\s*(?:[$#] )?|[|:] )muster ([a-z][^\n#;]*)", re.MULTILINE)
"""After a prompt, in a pipe, or at the end of a sentence that advises it."""
NO_SETTINGS = {"fs.protected_symlinks", "fenced_generation"}
"""Of the kernel; of a message."""


def _blocks(page: Path, kind: str) -> Iterator[str]:
    """The blocks of code in a page whose fence says `kind`."""
    return (textwrap.dedent(block) for says, block in FENCED.findall(page.read_text()) if says == kind)


def _shown_commands() -> Iterator[tuple[str, list[str]]]:
    """The page and the words of each command of `muster` in a block."""
    for page in PAGES:
        for line in SHOWN_COMMAND.findall("\n".join(_blocks(page, ""))):
            yield page.name, ["42" if word == "JOB" else word for word in shlex.split(line)]


def _sentences() -> Iterator[tuple[str, str]]:
    """The page and the text of each short quotation of code in a sentence."""
    for page in PAGES:
        prose = REMOVED.sub("", FENCED.sub("", page.read_text()))
        for quoted in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose):
            yield page.name, " ".join(quoted.split())


PROGRAMS = {
    "muster": parser(),
    "muster-agent": agent_parser(),
    "muster-coordinator": coordinator_parser(),
    "musterd": daemon_parser(),
}


def _commands(program: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of a program, and those of its commands."""
    yield program
    for action in program._actions:
        if isinstance(action, argparse._SubParsersAction):
            for row in action.choices.values():
                yield from _commands(row)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_help_is_cut_off(program: str) -> None:
    for command in _commands(PROGRAMS[program]):
        for text in (command.description, *(action.help for action in command._actions)):
            whole = (text or "").count("(") == (text or "").count(")") and not (text or "").endswith(",")
            assert whole, f"{command.prog}: {text}"


def test_commands_that_are_shown_are_understood() -> None:
    shown = list(_shown_commands())
    assert len(shown) > 30
    for page, words in shown:
        try:
            PROGRAMS["muster"].parse_args(words)
        except SystemExit:
            pytest.fail(f"{page}: muster {shlex.join(words)}")


def test_options_of_a_job_that_are_shown_fit_a_job() -> None:
    quoted = [(page, shlex.split(text)[1:]) for page, text in _sentences() if re.match(r"muster \w.* job\.toml$", text)]
    shown = [(page, words) for page, words in _shown_commands() if any(word.endswith("job.toml") for word in words)]
    assert len(shown) > 5
    assert quoted
    for page, words in [*shown, *quoted]:
        parse(JOB, page, PROGRAMS["muster"].parse_args(words))


def _named_options(command: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """The options among the words that the command lacks. Values may be missing, as in `muster logs --stacks`."""
    rows = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    if rows and words and not words[0].startswith("-"):
        assert words[0] in rows[0].choices, words
        return _named_options(rows[0].choices[words[0]], words[1:])
    options = {word.partition("=")[0] for word in words if word.startswith("-")} - {"--"}
    return options - set(command._option_string_actions)


def test_commands_within_sentences_exist_with_their_options() -> None:
    checked = 0
    for page, text in _sentences():
        program, *words = text.split()
        if program in PROGRAMS and words and re.match(r"[a-z-]", words[0]):
            assert not _named_options(PROGRAMS[program], words), f"{page}: {text}"
            checked += 1
    assert checked > 100


def test_what_is_installed_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(page.read_text() for page in PAGES)
    extras = re.findall(r"""(?:install -e |checkout|install "muster)'?\.?\[([a-z0-9,]+)\]""", text)
    assert len(extras) > 2
    assert {name for listed in extras for name in listed.split(",")} <= set(project["optional-dependencies"])
    assert set(re.findall(r"/opt/muster/bin/(muster[\w-]*)\b(?!\*)", text)) <= set(project["scripts"])


def test_options_of_units_exist() -> None:
    for page in PAGES:
        for line in re.findall(r"^MUSTER_COORDINATOR_OPTIONS=(.*)$", page.read_text(), re.MULTILINE):
            PROGRAMS["muster-coordinator"].parse_args(shlex.split(line))


def _read_as_the_program_does(text: str, folder: Path) -> None:
    table = tomllib.loads(text)
    first = next(iter(table))
    if first in Job.model_fields and (first != "hooks" or text.startswith("# job.toml")):  # the policy has hooks, too
        parse(text if "name" in table else f"{JOB}\n{text}", "job.toml")
    elif first in Site.__dataclass_fields__:
        (folder / "muster.toml").write_text(text)
        Site.load(config=folder / "muster.toml", environ={"MUSTER_COORDINATOR": "mgmt1:7070"})
    elif first in tomllib.loads(Path(policy.__file__).with_name("policy.toml").read_text()):
        (folder / "policy.toml").write_text(text)
        policy.Policy.load(folder / "policy.toml")
    elif first in site_file._FabricFile.model_fields:
        site_file.read_site(table, expand, expand("n[0-15]"))
    else:
        accelerators.read(table, "accelerators.toml")


EXAMPLES = [path.read_text() for path in sorted(ROOT.glob("examples/*/*.toml"))]


@pytest.mark.parametrize("block", [*EXAMPLES, *(block for page in PAGES for block in _blocks(page, "toml"))])
def test_a_file_that_is_shown_is_valid(block: str, tmp_path: Path) -> None:
    _read_as_the_program_does(block, tmp_path)


def test_the_example_at_the_head_of_the_policy_is_valid(tmp_path: Path) -> None:
    shipped = Path(policy.__file__).with_name("policy.toml").read_text()
    example = re.search(r"for example\n#\n((?:#     .+\n)+)", shipped)
    assert example
    (tmp_path / "policy.toml").write_text(re.sub("^#", "", example[1], flags=re.MULTILINE))
    assert policy.Policy.load(tmp_path / "policy.toml").changes()


def _keys(table: dict[str, Any]) -> set[str]:
    """All keys of a table, and of those in it."""
    return set(table).union(*(_keys(value) for value in table.values() if isinstance(value, dict)))


def test_settings_within_sentences_exist() -> None:
    known = _keys(Job.model_json_schema()) | set(Site.__dataclass_fields__) | _keys(policy._shipped_table())
    quoted = [(page, text) for page, text in _sentences() if re.fullmatch(r"[a-z_.]+ = .+", text)]
    assert len(quoted) > 15
    for page, text in quoted:
        if (key := text.partition(" = ")[0]) not in NO_SETTINGS:
            assert key.rpartition(".")[2] in known, f"{page}: {text}"
            tomllib.loads(text)


def test_every_setting_of_a_site_has_its_row() -> None:
    rows = "".join(re.findall(r"^\| `.*", (ROOT / "docs" / "operations" / "settings.md").read_text(), re.MULTILINE))
    settings = {*Site.__dataclass_fields__, *policy._Limits.model_fields}
    assert {key for key in settings if f"`{key}`" not in rows} == set()


def test_every_kind_of_signal_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "operations" / "signals.md").read_text()
    table = page.partition("## The kinds of signals")[2].partition("\n## ")[0]
    kinds = {kind for kind, rows in policy._shipped_table().items() if "default" in rows} - {"straggler"}
    assert set(re.findall(r"`([a-z-]+)`", table)) == kinds


@pytest.mark.parametrize("block", [block for page in PAGES for block in _blocks(page, "python")])
def test_python_that_is_shown_compiles_and_imports_what_there_is(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("muster."):
            path = ROOT.joinpath(*str(node.module).split(".")[1:])  # an adapter's library may not be installed here
            source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            names = [name.name for name in node.names if not (path / f"{name.name}.py").exists()]
            assert not [
                name for name in names if not re.search(rf"\b(class|def|import) {name}\b|^{name} = ", source, re.M)
            ]
