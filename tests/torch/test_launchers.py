"""PyTorch's own launchers, as users type them, become the gang: Muster starts the ranks that they would start."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.launcher.scripts.torchrun_call import FLAGS
from muster.v1.agent_pb2 import DUTY_EXIT, RANK_PHASE_EXITED, Order

pytestmark = pytest.mark.torch

TRAIN = """
    import json, os, sys
    import torch, torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        dist.init_process_group("gloo")
        total = torch.ones(1) * (1 + dist.get_rank())
        dist.all_reduce(total)
        values = [os.environ.get(name) for name in ("LOCAL_RANK", "WORLD_SIZE", "MUSTER_TASK_SOCKET")]
        print("shown " + json.dumps([dist.get_rank(), total.item(), sys.argv[1:], values]))
        if "fail" in sys.argv and dist.get_rank() == 1:
            raise ValueError("as it was asked")

    main()
"""


@pytest.fixture
async def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    (tmp_path / "environment").write_bytes(b"PATH=/usr/local/bin:/usr/bin:/bin\0HOME=/tmp\0")
    monkeypatch.setenv("MUSTER_RANK_ENVIRONMENT", str(tmp_path / "environment"))
    async with scripted_gang(tmp_path, preload=()) as found:
        found.script(TRAIN)
        yield found


async def run_ranks(gang: Gang, count: int = 2) -> list[int]:
    """From the hand-over on, until all ranks of the one node have ended. Their exit codes."""
    await gang.until(lambda: "n0" in gang.coordinator.agents and gang.status("n0").warm == count)
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    order = gang.run_order(1)
    order.world_size = count
    for rank in range(1, count):
        order.places.add(rank=rank, node="n0", local_rank=rank)
    gang.coordinator.order(order)
    await gang.until(lambda: [r.phase for r in gang.status("n0").ranks] == [RANK_PHASE_EXITED] * count)
    return [rank.exit_code for rank in gang.status("n0").ranks]


MODULE = f"{sys.executable} -m torch.distributed.run --nproc-per-node=2"


# One form is in the test of what @record has written.
@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        f"exec {MODULE} train.py --lr 1",
        f"{MODULE} --standalone -m train --lr 1; echo after $?",
        f"{MODULE} --rdzv-backend c10d --rdzv-endpoint nowhere:1 --no-python {sys.executable} train.py --lr 1",
        f"{MODULE} --nnodes=1 --node_rank=0 --master_addr=nowhere --master_port=1 train.py --lr 1",
    ],
)
async def test_each_form_of_torchrun_starts_its_ranks_through_muster(gang: Gang, words: str) -> None:
    gang.launch_task("n0", "bash", "-c", words, nodes=1)
    assert await run_ranks(gang) == [0, 0]
    gang.coordinator.order(Order(duty=DUTY_EXIT, job_over=True))
    assert await gang.exit_code("n0") == 0
    ranks_were_started_as_by_torchrun(gang, ["--lr", "1"])
    assert ("after 0" in (gang.folder / "n0.out").read_text()) == ("echo" in words)


def ranks_were_started_as_by_torchrun(gang: Gang, arguments: list[str]) -> None:
    """Both ranks have met, and have the arguments and the variables that torchrun gives."""
    lines = (gang.folder / "n0.out").read_text().splitlines()
    shown = [json.loads(line[6:]) for line in lines if line.startswith("shown ")]
    assert sorted(shown) == [[rank, 3.0, arguments, [str(rank), "2", None]] for rank in (0, 1)]


SHOW_TORCH = """
    import atexit, gc, json, logging, os, signal, sys, threading, warnings
    print("forked:", "torch.distributed.run" in sys.modules)
    import torch
    from torch.distributed.launcher import api, launch_agent

    print("threads:", torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count())
    print("parallel:", torch.__config__.parallel_info().split())
    print("native threads:", len(os.listdir("/proc/self/task")), open("/proc/self/comm").read().strip())
    print("warnings:", warnings.filters)
    print("logging:", [str(handler) for handler in (*logging.root.handlers, *logging.getLogger("torch").handlers)])
    print("levels:", [logging.getLogger(name).level for name in ("", "torch", "torch.distributed")])
    print("signals:", [str(signal.getsignal(number)) for number in signal.valid_signals()])
    print("hooks:", sys.excepthook, threading.excepthook, len(sys.meta_path), len(sys.path_hooks), atexit._ncallbacks())
    print("path:", sys.path, gc.isenabled(), gc.get_threshold(), sys.flags)
    print("launchers:", launch_agent.__module__, api.launch_agent.__module__)
    print("defaults:", torch.get_default_dtype(), torch.is_grad_enabled(), torch.cuda.is_initialized())
    links = [f"/proc/self/fd/{n}" for n in range(99) if os.path.lexists(f"/proc/self/fd/{n}")]
    print("files:", sorted(os.readlink(link).split(":")[0] for link in links))
    torch.manual_seed(1)
    print("sum:", torch.randn(300, 300).matmul(torch.randn(300, 300)).sum().item())
"""


async def test_a_rank_sees_the_same_torch_whether_its_launcher_was_forked_or_not(tmp_path: Path) -> None:
    """The second launcher has a flag of the interpreter, and is not forked. OMP_NUM_THREADS is not set."""
    (tmp_path / "show.py").write_text(textwrap.dedent(SHOW_TORCH))
    torchrun = Path(shutil.which("torchrun") or "")
    python = torchrun.read_text().splitlines()[0].removeprefix("#!")
    shown = []
    for words in (f"{python} {torchrun}", f"{python} -q {torchrun}"):
        async with scripted_gang(tmp_path, preload=()) as gang:
            gang.launch_task("n0", "bash", "-c", f"{words} show.py", nodes=1)
            await run_ranks(gang, 1)
            shown.append(gang.output(0, 1).splitlines())
            gang.log(0, 1).unlink()
        (tmp_path / "secret").unlink()
    assert [lines.pop(0) for lines in shown] == ["forked: True", "forked: False"]
    differ = [pair for pair in itertools.zip_longest(*shown) if pair[0] != pair[1]]
    assert not differ, "\n".join(f"{one}\n{other}" for one, other in differ)
    assert shown[0][-1].startswith("sum:")


OWN_PORT = """
    import os, sys
    import torch, torch.distributed as dist

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
    dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
    total = torch.ones(1) * (1 + dist.get_rank())
    dist.all_reduce(total)
    print("sum", total.item())
"""


# native.sbatch (tests/cluster/test_script_shapes.py) chooses a port, too.
@pytest.mark.long
async def test_ranks_of_srun_meet_at_the_port_that_their_script_chooses(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (sys.executable, gang.script(OWN_PORT), str(port))
    gang.launch("n0", *words, nodes=1, ranks_per_node=2, ranks_of_srun=True)
    assert await run_ranks(gang) == [0, 0]
    for rank in (0, 1):
        assert "sum 3.0" in gang.output(rank, 1).splitlines()


def test_the_options_of_torchrun_without_a_value_are_known() -> None:
    """`muster run` finds the script behind them."""
    found = {name for action in get_args_parser()._actions if action.nargs == 0 for name in action.option_strings}
    assert found <= FLAGS


KILLED = """
    import os
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    names = ("LOCAL_RANK", "ROLE_NAME", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS")
    print(*(os.environ[name] for name in names), flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
"""


def test_muster_run_takes_the_place_of_torchrun_on_a_workstation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(KILLED))
    words = "run --nproc-per-node 2 --fresh --role trainer --max-restarts=2 --local-ranks-filter 1 --tee 3 -m train"
    argv = [sys.executable, "-m", "muster.launcher", *words.split()]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line for line in lines if " trainer " in line} == {"[trainer1]:1 trainer 2 1"}
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr
    waits, starts = (done.stderr.index(words) for words in ("torchrun imports PyTorch", "generation 1 starts"))
    assert waits < starts


OWN_ADDRESS = """
    import os, sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
    total = torch.ones(1) * (1 + dist.get_rank())
    dist.all_reduce(total)
    print("sum", total.item(), flush=True)
"""


@pytest.mark.long
def test_ranks_of_torchrun_meet_at_the_address_in_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(OWN_ADDRESS))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    argv = [sys.executable, "-m", "muster.launcher", "run", "--fresh", "--nproc-per-node=2", "train.py", address]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("sum 3.0") == 2, done.stdout  # some builds of gloo write lines, too


async def test_what_record_has_written_is_told_and_the_wrapper_gets_the_exit_code(gang: Gang) -> None:
    gang.launch_task("n0", "bash", "-c", f"{MODULE} train.py fail; echo after $?", nodes=1)
    assert (await run_ranks(gang))[1] == 1
    gang.coordinator.order(Order(duty=DUTY_EXIT, exit_code=93, job_over=True))
    assert await gang.exit_code("n0") == 93
    ranks_were_started_as_by_torchrun(gang, ["fail"])
    assert "after 1\n" in (gang.folder / "n0.out").read_text()
    told = (gang.folder / "n0.err").read_text()
    assert "rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: " in told
    assert "ValueError: as it was asked" in told
