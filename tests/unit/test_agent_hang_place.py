"""Where a rank was, read from stacks as faulthandler writes them."""

import faulthandler
import tempfile
import threading

import pytest

from muster.daemon.agent.ranks.hang_place import MAX_WORDS, HangPlace, place_in

TORCH = "/opt/lib/python3.11/site-packages/torch"
OTHER = """
Thread 0x00007f2c5507a6c0 (most recent call first):
  File "/opt/lib/python3.11/threading.py", line 331 in wait
  File "/opt/muster/checkpoint/training/rank_signals/signs_of_life.py", line 45 in _run
"""
SCRIPT = '  File "/home/alice/train.py", line 88 in train_one\n  File "/home/alice/train.py", line 91 in <module>\n'


def stacks(*frames: tuple[str, int, str], thread: str = "Current thread") -> str:
    lines = "".join(f'  File "{path}", line {line} in {name}\n' for path, line, name in frames)
    return f"{OTHER}\n{thread} 0x00007f2c564adb80 (most recent call first):\n{lines}{SCRIPT}"


@pytest.mark.parametrize("thread", ["Current thread", "Thread"])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"),
        (f"{TORCH}/distributed/fsdp/_runtime_utils.py", "_unshard"),
        (f"{TORCH}/nn/parallel/distributed.py", "_sync_buffers"),
        (f"{TORCH}/autograd/graph.py", "_engine_run_backward"),
    ],
)
def test_a_rank_in_a_collective_or_a_backward_pass_waits(path: str, name: str, thread: str) -> None:
    file = path.rpartition("/")[2]
    expected = HangPlace(True, f"{name} ({file}:5), called by train_one (train.py:88)")
    assert place_in(stacks((path, 5, name), thread=thread)) == expected


def test_a_rank_is_elsewhere_if_its_innermost_function_is() -> None:
    hook = (f"{TORCH}/distributed/algorithms/hooks.py", 7, "hook")
    found = place_in(stacks(("/opt/lib/python3.11/socket.py", 706, "readinto"), hook))
    assert found == HangPlace(False, "readinto (socket.py:706), called by train_one (train.py:88)")
    assert place_in(stacks()) == HangPlace(False, "train_one (train.py:88)")


def test_a_library_without_a_script_is_named_alone() -> None:
    text = f'Current thread 0x1 (most recent call first):\n  File "{TORCH}/cuda/__init__.py", line 9 in synchronize\n'
    assert place_in(text) == HangPlace(False, "synchronize (__init__.py:9)")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no Python stacks within 1 s: see the states of its threads\n",
        "Current thread 0x1 (most recent call first):\n  <no Python frame>\n",
        'Current thread 0x1 (most recent call first):\n  File "cut',
        SCRIPT,
    ],
)
def test_other_text_shows_no_place(text: str) -> None:
    assert place_in(text) is None


def test_a_long_name_is_cut() -> None:
    found = place_in(stacks(("/home/alice/train.py", 1, "f" * 10_000)))
    assert found is not None
    assert len(found.where) == MAX_WORDS


def test_real_stacks_show_the_place_of_the_thread_that_wrote_them() -> None:
    ready, done = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        done.wait()

    other = threading.Thread(target=wait)
    other.start()
    ready.wait()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    done.set()
    other.join()
    found = place_in(text)
    assert found is not None
    assert not found.waits
    assert found.where.startswith(
        "test_real_stacks_show_the_place_of_the_thread_that_wrote_them (test_agent_hang_place.py:"
    )
