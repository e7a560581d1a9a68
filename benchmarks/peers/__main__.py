"""``python -m benchmarks.peers``: measures only the alternatives, on a new cluster or a running one."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.measure import FAULTS, TIME_LIMIT_S, measure_peers
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import ClusterSpec


def main() -> int:
    """Measures, prints one JSON object, and removes the cluster that it started."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--peers", nargs="+", choices=[p.name for p in PEERS], default=[])
    parser.add_argument("--faults", nargs="+", choices=[f.name for f in FAULTS], default=[])
    parser.add_argument("--budget", type=float, default=TIME_LIMIT_S, metavar="SECONDS")
    parser.add_argument("--cluster", help="use this running cluster instead of a new one")
    args = parser.parse_args()
    cluster = Cluster.attach(args.cluster) if args.cluster else Cluster.up(ClusterSpec(nodes=10))
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
