"""The image tool: ``python -m muster.slurm.image build | base | demo | run -- COMMAND``.

``build`` builds the image of the tests, ``demo`` the image of `make demo`, ``base`` the layers below Muster's own. The
tool needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import sys

from muster.slurm.image.build import ensure_base, ensure_cluster_image
from muster.slurm.image.engine import EngineError, find_engine
from muster.slurm.image.recipe import Recipe
from muster.slurm.image.run import run_in_image


def main() -> int:
    """Runs one verb. Exit status: the command's own for ``run``; else 0 success, 1 failure."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m muster.slurm.image", description=__doc__)
    parser.add_argument("verb", choices=["build", "base", "demo", "run"])
    parser.add_argument("--user", default="root")
    args = parser.parse_args(argv[:cut])
    try:
        if args.verb == "run":
            return run_in_image(argv[cut + 1 :], args.user)
        engine = find_engine()
        if args.verb == "base":
            print(ensure_base(engine))
        else:
            print(ensure_cluster_image(engine, Recipe(for_tests=args.verb == "build")))
    except EngineError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
