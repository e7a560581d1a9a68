"""What one user with valid credentials can hold of a coordinator and of another user's agent, while gangs train.

    python -m benchmarks.bench_known [--seconds S]

`benchmarks.load.known_callers` attacks both at once, with TLS and munge, as a user without a job. Meanwhile nodes send
heartbeats to the coordinator, another agent pings the agent, and nodes report fatal Xids. Measured: the growth of
both over idle at the peak; the heartbeats and pings that come late or not at all; how long the verdicts take. It needs
root, to be two users, and munge.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import bench_verdicts
from benchmarks.bench_reconnect import start_load, wait_attached
from benchmarks.load import known_agent, private_munged, site
from benchmarks.load.site_processes import Process, made_site, memory_mib
from muster.daemon.agent.failure_detector.peers import PeerChannels
from muster.daemon.host import clock
from muster.v1 import peer_pb2

NODES, PROCESSES, HEARTBEAT_S = 328, 2, 1.0
STRANGER = 65534
"""nobody's uid."""
VERDICTS = 40
ATTACK_S = 20.0
SETTLE_S = 3.0
PING_S, LATE_S = 0.25, 1.0
"""Seconds between two pings of a link, and after which an answer to one is missed."""

Figures = dict[str, float | str]


class Link:
    """The link of another agent of the gang to the attacked one."""

    def __init__(self) -> None:
        self.missed = self.answered = 0

    async def run(self, found: site.Site, port: int) -> None:
        """Ping for ever."""
        channels = PeerChannels(found.credentials(), known_agent.GANG, plain_text=False)
        channels.use_authorities((found.folder / "agent.pem").read_bytes())
        ping = peer_pb2.LinkPing(gang_id=known_agent.GANG, node="n2", seq=0)
        call = await channels.open_link(known_agent.NODE, f"127.0.0.1:{port}", ping)
        try:
            while True:
                sent = clock.monotonic()
                await call.write(ping)
                await call.read()
                self.missed += clock.monotonic() - sent > LATE_S
                self.answered += 1
                await asyncio.sleep(PING_S)
        finally:
            call.cancel()
            await channels.close()


async def known_callers(folder: Path, attack_s: float) -> Figures:
    """See the module. Empty: this process is not root, or munge is not installed."""
    if os.getuid() != 0 or not private_munged.MUNGED:
        return {}
    folder.chmod(0o711)  # the other user reaches munged's socket
    async with made_site(folder) as (found, _):
        others, begun = NODES - site.GANGS * site.NODES_PER_GANG, clock.monotonic()
        coordinator = await Process.start("site_coordinator", folder, 0, others, HEARTBEAT_S)
        agent = await Process.start("known_agent", folder)
        ports = [int(await process.wait_told("port")) for process in (coordinator, agent)]
        load = await start_load(found, ports[0], NODES, PROCESSES)
        await wait_attached(load, NODES, begun)
        await load[0].wait_told("running")
        link = Link()
        linking = asyncio.create_task(link.run(found, ports[1]))
        await asyncio.sleep(SETTLE_S)
        calm = await _heartbeats(load, attack_s / 2)
        before = [memory_mib(process.pid, "VmRSS") for process in (coordinator, agent)]
        attack = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.load.known_callers"),
            *(str(folder), *map(str, ports), str(STRANGER), str(attack_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        beating = asyncio.create_task(_heartbeats(load, attack_s))
        reported = await bench_verdicts.report_faults(load[1:], others)
        judged = await bench_verdicts.told([coordinator], "judged", list(reported))
        rate = await beating
        told, _ = await attack.communicate()
        print(told.decode().strip(), flush=True)
        peaks = [memory_mib(process.pid, "VmHWM") for process in (coordinator, agent)]
        linking.cancel()
        missed_links = link.missed if linking.cancelled() or not linking.done() else link.missed + 1
        grown = [round(peak - idle, 1) for peak, idle in zip(peaks, before, strict=True)]
        latencies_ms = sorted(1000 * (judged[name] - at) for name, at in reported.items())
        figures: Figures = {
            "known_rss_mib": max(grown),
            "known_coordinator_rss_mib": grown[0],
            "known_agent_rss_mib": grown[1],
            "known_heartbeats_missed": missed_links + max(0, round((calm - rate) * attack_s - NODES)),
            "known_links_answered": link.answered,
            "known_heartbeats_per_s": round(rate),
            "known_calm_heartbeats_per_s": round(calm),
            "known_verdict_p50_ms": round(statistics.median(latencies_ms), 1),
            "known_verdict_p99_ms": round(statistics.quantiles(latencies_ms, n=100, method="inclusive")[98], 1),
        }
        for process in load:
            await process.kill()
        await agent.stop()
        await coordinator.stop()
        return figures


async def _heartbeats(load: list[Process], seconds: float) -> float:
    """Heartbeats a second that are answered, for so long."""
    before, begun = sum(process.told["heartbeats"] for process in load), clock.monotonic()
    await asyncio.sleep(seconds)
    return (sum(process.told["heartbeats"] for process in load) - before) / (clock.monotonic() - begun)


def main() -> None:
    """Measure once, and print the figures."""
    parser = argparse.ArgumentParser(description="what one user with valid credentials can hold")
    parser.add_argument("--seconds", type=float, default=ATTACK_S, help="seconds of the attack; default %(default)g")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(known_callers(Path(folder), seconds))))


if __name__ == "__main__":
    main()
