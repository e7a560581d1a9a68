"""A job whose loss jumps goes back by itself, and reads other batches. With a real training on a real Slurm."""

from __future__ import annotations

import pytest

from muster.slurm.testcluster.cluster import LOGIN, Cluster
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]  # a minute, in which the coordinator sees some twenty losses

FIRST, LAST, MARGIN = 120, 160, 40
"""The batches at which the loss is high, some eight seconds of them, of which the first two seen reveal the spike; and
the margin, which covers the rest of them."""
SCRIPT = f"""
import time, torch
import torch.distributed as dist
from muster.checkpoint import Checkpoint, ShardedSampler

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
sampler = ShardedSampler(1 << 20, batch_size=1, seed=1)
checkpoint = Checkpoint(model=torch.nn.Linear(2, 2), sampler=sampler)
step = checkpoint.restore()
while True:
    batch = 1 + sampler.position // dist.get_world_size()
    step += 1
    dist.all_reduce(torch.ones(1))
    print(step, batch, flush=True)
    checkpoint.step(step, loss=9.0 if {FIRST} <= batch < {LAST} else 2.0 + 0.01 * (batch % 7))
    time.sleep(0.2)
"""
FOLDER = "/shared/losses"
JOB = f"""
name = "losses"
nodes = 2
command = ["python3", "{FOLDER}/train.py"]
run_dir = "{FOLDER}"
durable_dir = "{FOLDER}/durable"
checkpoint.durable_every = "20 steps"

[loss]
spike = "roll_back"
window = 16
in_a_row = 2
margin_steps = {MARGIN}
"""


def test_a_job_goes_back_from_a_spike_and_skips_its_batches(healthy: Cluster) -> None:
    healthy.sh(LOGIN, f"mkdir -p {FOLDER}; cat >{FOLDER}/train.py <<'EOF'\n{SCRIPT}\nEOF", user="alice")
    healthy.sh(LOGIN, f"cat >{FOLDER}/job.toml <<'EOF'\n{JOB}\nEOF", user="alice")
    job = healthy.exec(LOGIN, "muster", "submit", f"{FOLDER}/job.toml", user="alice").stdout.strip()

    def lines() -> list[tuple[int, int]]:
        """Steps and batches of the second generation, on rank 0."""
        text = healthy.sh(LOGIN, f"cat {FOLDER}/logs/*/g2/rank0*.log 2>/dev/null || true", user="alice")
        found = (line.split() for line in text.splitlines())
        return [(int(words[0]), int(words[1])) for words in found if len(words) == 2 and all(map(str.isdigit, words))]

    try:
        wait_until(lambda: len(lines()) > 5, 180, "the job trains again")
        events = " ".join(healthy.exec(LOGIN, "muster", "events", job, user="alice").stdout.split())
        assert "has a spike at step" in events
        assert "; the gang goes back" in events
        step, batch = lines()[0]
        assert 0 < step <= FIRST - MARGIN
        assert batch >= LAST
        assert all(batch - step == lines()[0][1] - lines()[0][0] for step, batch in lines())
    finally:
        healthy.exec(LOGIN, "muster", "cancel", job, user="alice")
