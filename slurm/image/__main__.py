"""The image tool: ``python -m muster.slurm.image build | base | demo | run [--suite SUITE] -- COMMAND``.

``build`` builds the image of the tests, ``demo`` the image of `make demo`, ``base`` the layers below Muster's own.
``run`` runs a command in a temporary container of the tests' image, with this checkout mounted read-only: for commands
that need PyTorch, which the host does not have. Muster is then imported from the checkout, not from the image. The tool
needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence

from muster.slurm.image.build import LABEL, ensure_base, ensure_cluster_image, ensure_tests
from muster.slurm.image.engine import EngineError, find_engine
from muster.slurm.image.recipe import ROOT, SUITES, Recipe

SOURCE = "/source"  # the checkout's folder in the container


def main() -> int:
    """Runs one verb. Exit status: the command's own for ``run``; else 0 success, 1 failure."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m muster.slurm.image", description=__doc__)
    parser.add_argument("verb", choices=["build", "base", "demo", "run"])
    parser.add_argument("--user", default="root")
    parser.add_argument("--suite", default="forky", choices=SUITES, help="Debian: Slurm 26.05 or 24.11")
    args = parser.parse_args(argv[:cut])
    try:
        if args.verb == "run":
            return _run(argv[cut + 1 :], args.user, args.suite)
        engine = find_engine()
        if args.verb == "base":
            print(ensure_base(engine, Recipe.of(args.suite)))
        else:
            print(ensure_cluster_image(engine, Recipe.of(args.suite, for_tests=args.verb == "build")))
    except EngineError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(command: Sequence[str], user: str, suite: str) -> int:
    """Runs `command` in the folder /source. Its output goes to the caller's output. Returns its exit status.

    The container has only a loopback interface, and is removed afterwards, also after Ctrl-C.
    """
    engine = find_engine()
    image = ensure_tests(engine, Recipe.of(suite))
    name = f"muster-run-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        return engine.interactive(
            *("run", "--rm", "--pull=never", "--network=none", "--name", name, "--label", f"{LABEL}=run"),
            *("--volume", f"{ROOT}:{SOURCE}:ro"),
            *("--workdir", SOURCE, "--user", user, "--shm-size=1g", "--cap-add=SYS_PTRACE", *engine.ulimits),
            *("--env", f"PYTHONPATH={SOURCE}/src", "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "HOME=/tmp"),
            *(image, *command),
        )
    finally:
        engine.call("rm", "--force", name)


if __name__ == "__main__":
    sys.exit(main())
