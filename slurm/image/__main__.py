"""The image tool: ``python -m muster.slurm.image build | base | run -- COMMAND``."""

from __future__ import annotations

import argparse
import sys

from muster.slurm.cluster.engine import EngineError, find_engine
from muster.slurm.image.build import ensure_base, ensure_cluster_image
from muster.slurm.image.run import run_in_image


def main() -> int:
    """Run one verb. Exit codes: the command's own for ``run``; else 0 done, 1 failed."""
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m muster.slurm.image", description=__doc__)
    parser.add_argument("verb", choices=["build", "base", "run"])
    parser.add_argument("--user", default="root")
    args = parser.parse_args(argv[:cut])
    try:
        if args.verb == "run":
            return run_in_image(argv[cut + 1 :], user=args.user)
        engine = find_engine()
        print(ensure_base(engine) if args.verb == "base" else ensure_cluster_image(engine))
    except EngineError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
