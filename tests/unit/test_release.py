"""What a release installs is locked, licensed and audited, and its wheel can be built again."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.side_by_side import wheel_of

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ["requirements.lock", "tools.lock"]
EXTRAS = ("coordinator", "daemon")
"""What a site installs of Muster. PyTorch and pyslurm are the site's own."""
LICENCES = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|Public Domain)\b", re.IGNORECASE)
"""Licences without duties beyond notices."""
TOOLS = ROOT / ".venv" / "release-tools" / "bin" / "python"
"""`make dist` makes it."""


def _entries(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each locked package."""
    entries = {}
    for entry in (ROOT / "release" / name).read_text().replace("\\\n", " ").splitlines():
        found = re.fullmatch(r"([\w.-]+)==(\S+)( ; [^-]+)?((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", entry)
        assert found, f"{name}: no locked version with hashes: {entry[:80]}"
        entries[canonicalize_name(found[1])] = (found[2], found[4].split())
    return entries


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_one_version_and_hashes(name: str) -> None:
    entries = _entries(name)
    assert len(entries) > 20
    assert all(hashes for _, hashes in entries.values())
    # grpcio has a wheel for each machine and each Python: a lock made from one machine's wheels has one hash.
    assert name == "tools.lock" or len(entries["grpcio"][1]) > 20


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_server(name: str) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted-host", (ROOT / "release" / name).read_text())


def test_the_lock_satisfies_the_project_and_all_that_it_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    locked, seen = _entries("requirements.lock"), set[str]()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        assert name in locked, f"not in release/requirements.lock: {requirement}; run: make lock"
        assert locked[name][0] in requirement.specifier, f"{requirement}: {locked[name][0]}; run: make lock"
        if name not in seen:
            seen.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            wanted += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert set(locked) == seen, "run: make lock"


def test_a_release_has_the_versions_that_the_tests_run_with() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    tested = {canonicalize_name(name): version for name, version in pins.items()}
    for name, (version, _) in _entries("requirements.lock").items():
        assert tested.get(name, version) == version, f"{name}: run: make lock"
        assert metadata.version(name) == version or name not in tested, f"{name}: run: make setup"


def test_what_a_release_installs_has_a_licence_without_duties() -> None:
    for name in _entries("requirements.lock"):
        about = metadata.metadata(name)
        classified = [line for line in about.get_all("Classifier", []) if line.startswith("License ::")]
        stated = " ".join([about.get("License-Expression", ""), about.get("License", "")[:80], *classified])
        assert LICENCES.search(stated), f"{name}: {stated}"


VULNERABLE = {"name": "requests", "version": "2.19.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.20.0"]}]}
SKIPPED = {"name": "requests", "skip_reason": "not found"}


def _pip_audit(folder: Path, canary: dict[str, object], locked: dict[str, object]) -> list[str]:
    """A command that answers as pip-audit does: for the canary, and for a lock. Its status is 0 if it finds nothing."""
    answers = {"canary.txt": {"dependencies": [canary]}, "some.lock": {"dependencies": [locked]}}
    command = folder / "pip-audit"
    command.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"answer = {answers!r}[pathlib.Path(sys.argv[-1]).name]\nprint(json.dumps(answer))\n"
        "sys.exit(any(package.get('vulns') for package in answer['dependencies']))\n"
    )
    command.chmod(0o755)
    return [str(command)]


@pytest.fixture
def audit(load_release: Callable[[str], ModuleType]) -> ModuleType:
    return load_release("audit")


@pytest.fixture
def load_release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of the folder release, which is no part of the package."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(ROOT)
        return __import__(f"release.{name}", fromlist=[name])

    return load


def _lock(folder: Path) -> Path:
    lock = folder / "some.lock"
    lock.write_text("some==1.0\n")
    return lock


def test_an_audit_that_finds_nothing_known_passes(tmp_path: Path, audit: ModuleType) -> None:
    command = _pip_audit(tmp_path, VULNERABLE, {"name": "some", "version": "1.0", "vulns": []})
    assert audit.main((), command, [_lock(tmp_path)]) == 0


def test_a_known_vulnerability_fails_the_audit(
    tmp_path: Path, audit: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"name": "some", "version": "1.0", "vulns": [{"id": "PYSEC-2", "fix_versions": ["1.1"]}]}
    assert audit.main((), _pip_audit(tmp_path, VULNERABLE, found), [_lock(tmp_path)]) == audit.EXIT_VULNERABLE
    assert "some 1.0: PYSEC-2, fixed in 1.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("canary", "locked"),
    [
        (SKIPPED, {"name": "some", "version": "1.0", "vulns": []}),
        ({**VULNERABLE, "vulns": []}, {"name": "some", "version": "1.0", "vulns": []}),
        (VULNERABLE, {"name": "some", "skip_reason": "not found"}),
    ],
    ids=["canary skipped", "canary unknown", "locked package skipped"],
)
def test_a_database_that_proves_nothing_fails_the_audit(
    tmp_path: Path,
    audit: ModuleType,
    capsys: pytest.CaptureFixture[str],
    canary: dict[str, object],
    locked: dict[str, object],
) -> None:
    """pip-audit itself reports "no known vulnerabilities" and exits with 0 in each of these cases."""
    assert audit.main((), _pip_audit(tmp_path, canary, locked), [_lock(tmp_path)]) == audit.EXIT_UNAVAILABLE
    assert "NOTHING WAS AUDITED" in capsys.readouterr().err


def test_an_audit_without_an_answer_fails(tmp_path: Path, audit: ModuleType) -> None:
    command = [sys.executable, "-c", "raise ConnectionError('no route')"]
    assert audit.main((), command, [_lock(tmp_path)]) == audit.EXIT_UNAVAILABLE


@pytest.mark.long
@pytest.mark.skipif(not TOOLS.exists(), reason="the tools of a release are not installed: make dist")
def test_two_builds_of_a_commit_give_the_same_bytes(tmp_path: Path) -> None:
    """The second one runs with another umask, time zone, folder and order of hashes."""
    digests = []
    for number, zone in enumerate(("UTC", "Asia/Tokyo")):
        into = tmp_path / zone.replace("/", "-")
        changed = {"TZ": zone, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [TOOLS, "-m", "release.build_wheel", into],
            cwd=into.parent, env={**os.environ, **changed}, umask=0o077 if number else 0o022, timeout=600, check=True,
        )  # fmt: skip
        (wheel,) = into.glob("*.whl")
        digests.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_an_earlier_version_that_this_clone_lacks_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"needs the commit 0{40}, .*git fetch --unshallow"):
        wheel_of("0" * 40, tmp_path)
