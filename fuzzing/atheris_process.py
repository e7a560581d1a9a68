"""The process of one target under atheris: `python -m fuzzing.atheris_process TARGET [--planted] -- LIBFUZZER-OPTIONS`.

Modules are instrumented as they are imported, so nothing of Muster is imported before.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import atheris


def main() -> None:
    """Never returns."""
    name, *words = sys.argv[1 : sys.argv.index("--")]
    with atheris.instrument_imports(include=["muster", "tomllib", "json"]):
        from fuzzing.catalogue import load
        from fuzzing.planted_bugs import PLANTED_BUGS
        from muster.simulator.planted_bugs.planting import planted

        target = load(name)
    atheris.Setup([sys.argv[0], *sys.argv[sys.argv.index("--") + 1 :]], target.check)
    with planted(PLANTED_BUGS[name]) if "--planted" in words else nullcontext():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
