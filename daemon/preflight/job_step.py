"""The node check as one task of a Slurm step: `muster check` starts it on each node with srun.

    INTERPRETER -c COMMAND ROOT SECONDS

It runs the check with a deadline, and prints one line: {"node": ..., "check": ...}. Then it reads one line from its
standard input, {"port": ..., "nodes": [...]}: these nodes form pairs (`pair_rates`). At the end of its input, or if its
node is not among them, it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import sys

from muster.daemon.preflight import check_process, pair_rates, step_line

COMMAND = """\
import sys
sys.path.insert(0, sys.argv[1])
from muster.daemon.preflight import job_step
del sys.path[0]
job_step.main()
"""


def main() -> None:
    """Check this node and print the result."""
    command = check_process.command([sys.executable, *(["-P"] if sys.flags.safe_path else [])])
    result = asyncio.run(check_process.run_check(command, os.environ, deadline_s=float(sys.argv[2])))
    node = _node_name()
    step_line.say({"node": node, "check": dataclasses.asdict(result)})
    if line := sys.stdin.readline():
        pairs = json.loads(line)
        if node in pairs["nodes"]:
            pair_rates.measure(node, pairs["port"], pairs["nodes"])
            os._exit(0)  # the interpreter's cleanup takes a second with torch and is useless here


def _node_name() -> str:
    """This node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
