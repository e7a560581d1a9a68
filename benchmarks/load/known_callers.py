"""The attack of `muster.daemon.testing.known_user` on the processes of a measurement, as another user.

    python -m benchmarks.load.known_callers FOLDER COORDINATOR_PORT AGENT_PORT UID SECONDS

The last line of the output is a JSON object: how often each status came back. Start it as root: it becomes the user.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

from benchmarks.load import known_agent, site
from muster.daemon.testing.known_user import Attacker, Target, all_attacks, tls_context


async def _attack(folder: Path, coordinator: int, agent: int, uid: int, seconds: float) -> Counter[str]:
    attacker = Attacker(site.Site(folder).credentials())
    planned = all_attacks(
        Target("127.0.0.1", f"127.0.0.1:{coordinator}", tls_context()),
        Target(known_agent.NAME, f"127.0.0.1:{agent}", tls_context()),
    )
    "".encode("idna")  # the user may not read the library that each connection with TLS asks for
    os.setresuid(uid, uid, uid)
    return await attacker.run_all(planned, seconds)


if __name__ == "__main__":
    where, coordinator_port, agent_port, uid, seconds = sys.argv[1:]
    found = asyncio.run(_attack(Path(where), int(coordinator_port), int(agent_port), int(uid), float(seconds)))
    print(json.dumps(found), flush=True)
