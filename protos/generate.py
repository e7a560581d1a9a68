"""Regenerates src/muster/v1 from protos/: `make protos`.

The output is committed, so that an installation needs no compiler. A test checks that the committed files are current.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(out: Path) -> None:
    """Writes the modules and their type stubs to `out`/muster/v1.

    Raises:
        RuntimeError: the compiler refused a file; its message is on stderr.
    """
    protos = ROOT / "protos"
    names = sorted(str(p.relative_to(protos)) for p in protos.glob("muster/v1/*.proto"))
    include = str(files("grpc_tools") / "_proto")
    kinds = ["--python_out", "--grpc_python_out", "--mypy_out", "--mypy_grpc_out"]
    outputs = [f"{kind}={out}" for kind in kinds]
    # Use the plugins of this environment, even if the environment is not activated.
    plugins = [f"--plugin={name}={Path(sys.executable).parent / name}" for name in PLUGINS]
    if protoc.main(["protoc", f"-I{protos}", f"-I{include}", *plugins, *outputs, *names]) != 0:
        raise RuntimeError("protoc failed: see above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src")
