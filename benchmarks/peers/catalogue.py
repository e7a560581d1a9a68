"""Muster with a script of torchrun, and the alternatives. Fast ones stand first: the time limit cuts the slow ones."""

from __future__ import annotations

from benchmarks.peers.peer import (
    DEFAULT_SITE,
    EXPEDITED_SITE,
    TRAIN,
    TUNED_SITE,
    Peer,
    under_srun,
    under_torchrun,
    with_plain_torchrun,
)

_ENDPOINT = "Node 0 runs srun and torchrun's store: both die with the node, and agents have no other rendezvous."
_CHILDREN = (
    "The old step's slurmstepd on the first node waits 60 s and more for the dead node's slurmstepd (a constant of "
    "Slurm) before the job may start again."
)
_NO_CHILDREN = (
    "The slurmstepd that waits died as well: the job starts again sooner than after the loss of another node."
)
_NODE_DOWN = "Slurm does nothing before the node is DOWN, although all ranks died much earlier of the connection reset."

PEERS = (
    Peer(
        "muster_script",
        "muster submit --spares=2 with an unchanged batch script of torchrun, which has no line of Muster's library",
        TUNED_SITE,
        with_plain_torchrun(8, f"{TRAIN} --timeout 10"),
        90,
        faults=("rank_killed", "node_crash", "power_loss", "node0_crash"),
        submit="muster submit --parsable --spares=2",
    ),
    Peer(
        "torchrun_tuned",
        "9 agents, --nnodes=8: the ninth waits as torchrun's own spare (with two of them torch 2.14 restarts all ranks "
        "every 2 s for ever after the first loss); max-restarts 100, monitor interval 0.1 s, keep-alive 5 x 1 s, last "
        "call 1 s, collectives fail after 10 s, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it no agent can join "
        "later), Slurm job with --no-kill",
        TUNED_SITE,
        under_torchrun(
            9,
            "--nnodes=8 --max-restarts=100 --monitor-interval=0.1 --rdzv-conf="
            "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1,join_timeout=120",
            "--timeout 10",
            "OMP_NUM_THREADS=1 TORCH_ELASTIC_WORKER_IDENTICAL=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
        90,
        {
            "node_crash": "The dead agent's place is free once its keep-alive has lapsed; then the spare joins.",
            "power_loss": "The waiting spare takes the lapsed keep-alive for a change of members: all ranks restart.",
            "node0_crash": _ENDPOINT,
        },
        faults=("rank_killed", "node_crash", "power_loss", "node0_crash"),
    ),
    Peer(
        "torchrun_defaults",
        "10 agents, --nnodes=8:10 --max-restarts=3 as in torchrun's documentation, all else its defaults; "
        "all 10 nodes train, none is spare; Slurm job with --no-kill",
        TUNED_SITE,
        under_torchrun(10, "--nnodes=8:10 --max-restarts=3"),
        150,
        {
            "node_crash": "Meant to go on with 9 ranks. Agents whose rank failed and agents that saw a member leave "
            "count different restarts, so that their ranks don't find each other in the store that the rounds share.",
            "power_loss": "No rank fails before torch's own 30 minutes or TCP's 15, and no agent waits to join.",
            "node0_crash": _ENDPOINT,
        },
    ),
    Peer(
        "slurm_requeue_expedited",
        "sbatch --requeue=expedite, enable_expedited_requeue, SlurmdTimeout 10 s, srun --kill-on-bad-exit",
        EXPEDITED_SITE,
        under_srun("--requeue=expedite", "--kill-on-bad-exit=1"),
        180,
        {"node_crash": f"{_NODE_DOWN} {_CHILDREN}", "power_loss": _CHILDREN, "node0_crash": _NO_CHILDREN},
    ),
    Peer(
        "slurm_requeue_tuned",
        "sbatch --requeue, SlurmdTimeout 10 s, requeue_delay 1 s, srun --kill-on-bad-exit",
        TUNED_SITE,
        under_srun("--requeue", "--kill-on-bad-exit=1"),
        180,
        {"node_crash": f"{_NODE_DOWN} {_CHILDREN}", "power_loss": _CHILDREN, "node0_crash": _NO_CHILDREN},
    ),
    Peer(
        "slurm_requeue_defaults",
        "sbatch --requeue, SlurmdTimeout 300 s, requeue_delay 121 s, plain srun",
        DEFAULT_SITE,
        under_srun("--requeue"),
        600,
        {"node_crash": _NODE_DOWN},
    ),
)
