"""muster-healthcheck, for slurm.conf's HealthCheckProgram: reports what musterd knows of this node.

It changes nothing in Slurm. The coordinator drains a node that is out of service. slurmd logs what this program prints
and its exit status, so the log of the node has the node's own word while the coordinator is away.

Exit status: 0, the node may run jobs; 1, it may not. musterd does not answer: the site's choice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from muster.slurm.hooks import node_verdict


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Entry point of `muster-healthcheck`."""
    return check(node_verdict.Hook.of(environ))


def check(hook: node_verdict.Hook) -> int:
    """Print why the node may run no jobs, or why that is not known; return the exit status."""
    return node_verdict.ask(hook).report("muster-healthcheck")


if __name__ == "__main__":
    sys.exit(main())
