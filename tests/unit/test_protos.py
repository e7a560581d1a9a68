"""The generated code under src/muster/v1 is what protos/ gives."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("v1")
    # In a process of its own: the compiler leaves descriptors behind that clash with the imported ones.
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", out], check=True, capture_output=True, timeout=60)
    return out / "muster" / "v1"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"}


def test_regenerating_changes_nothing(regenerated: Path) -> None:
    committed = ROOT / "src" / "muster" / "v1"
    assert _names(regenerated) == _names(committed)
    changed = [name for name in sorted(_names(committed)) if _differ(committed / name, regenerated / name)]
    assert changed == [], "run `make protos`"


def _differ(one: Path, other: Path) -> bool:
    return one.read_bytes() != other.read_bytes()


def test_every_proto_is_generated() -> None:
    stems = {path.stem for path in (ROOT / "protos" / "muster" / "v1").glob("*.proto")}
    generated = {path.name for path in (ROOT / "src" / "muster" / "v1").glob("*_pb2*")}
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    assert generated == {stem + ending for stem in stems for ending in endings}
