"""``python -m benchmarks.peers``: the peers alone, on a cluster of their own or a running one."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.measure import BUDGET_S, FAULTS, measure_peers
from muster.slurm.cluster.cluster import Cluster
from muster.slurm.cluster.spec import ClusterSpec


def main() -> int:
    """Measure, print one JSON object, end the cluster that was started for it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--peers", nargs="+", choices=[p.name for p in PEERS], default=[])
    parser.add_argument("--faults", nargs="+", choices=[f.name for f in FAULTS], default=[])
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    parser.add_argument("--cluster", help="use this running cluster instead of a new one")
    args = parser.parse_args()
    cluster = Cluster.attach(args.cluster) if args.cluster else Cluster.up(ClusterSpec(nodes=10, daemons=False))
    try:
        found = measure_peers(
            cluster,
            args.runs,
            lambda line: print(line, file=sys.stderr, flush=True),
            peers=args.peers,
            faults=args.faults,
            budget_s=args.budget,
        )
    finally:
        if not args.cluster:
            cluster.down()
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
