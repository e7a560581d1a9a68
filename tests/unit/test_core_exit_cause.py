"""Which line of a rank's last words is shown as the reason. The CUDA texts were written by an NVIDIA H100."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.coordinator.core.detection.attribution import cause_in
from muster.daemon.coordinator.core.recovery import failures
from muster.daemon.coordinator.core.recovery.failures import REASON_LENGTH
from muster.daemon.coordinator.core.state.events import RankState

_GOODBYE = (
    "[rank0]:[W1127 10:09:09.312386820 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not "
    "called before program exit, which can leak resources. (function operator())\n"
)
_OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB."
_ILLEGAL_ACCESS = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
_ABORTED = "[PG ID 0 Rank 1] Process group watchdog thread terminated with exception: NCCL communicator was aborted"
OUT_OF_MEMORY = f"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/alice/train.py", line 14, in fault
[rank0]:     keep = [torch.empty(1 << 33, dtype=torch.uint8, device="cuda") for _ in range(20)]
[rank0]:             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]: {_OUT_OF_MEMORY}
{_GOODBYE}"""
ILLEGAL_ACCESS = f"""\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/alice/train.py", line 1162, in synchronize
[rank3]:     return torch._C._cuda_synchronize()
[rank3]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank3]: {_ILLEGAL_ACCESS}
[rank3]: Search for `cudaErrorIllegalAddress' in NVIDIA's documentation for more information.
[rank3]: CUDA kernel errors might be asynchronously reported at some other API call.
[rank3]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1
[rank3]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
{_GOODBYE}"""
WATCHDOG = f"""\
[rank1]:[E1127 10:01:00.000000000 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {_ABORTED}
Exception raised from run at ProcessGroupNCCL.cpp:1901 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in libc10.so)
"""
SEGMENTATION_FAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f0e8f7fe700 (most recent call first):
  File "/home/alice/train.py", line 20 in step

Extension modules: numpy._core._multiarray_umath, torch._C (total: 53)
"""
CHAINED = """\
Traceback (most recent call last):
  File "/home/alice/data.py", line 3, in read
    return self.shards[key]
KeyError: 'a'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/alice/train.py", line 9, in <module>
    read()
ValueError: shard a is missing
"""
STATE_DICT = """\
Traceback (most recent call last):
  File "/home/alice/train.py", line 9, in <module>
    model.load_state_dict(state)
RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "head.weight".
"""
CAUGHT = """\
reading shard 3 failed, trying again
Traceback (most recent call last):
  File "/home/alice/data.py", line 3, in read
    raise TimeoutError("slow")
TimeoutError: slow
step 7 loss 2.1
the loss has left its range, giving up
"""
SYNTAX = """\
  File "/home/alice/train.py", line 2
    def f(:
          ^
SyntaxError: invalid syntax
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/alice/train.py", line 8, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/alice/train.py", line 7, in read
    |     raise ValueError(f"bad shard {n}")
    | ValueError: bad shard 1
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/home/alice/train.py", line 7, in read
    |     raise ValueError(f"bad shard {n}")
    | ValueError: bad shard 2
    +------------------------------------
"""
PANEL = """\
Usage: train.py [OPTIONS]
╭─ Error ──────────────────╮
│ Missing option '--lr'.   │
╰──────────────────────────╯
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OUT_OF_MEMORY, _OUT_OF_MEMORY),
        (ILLEGAL_ACCESS, _ILLEGAL_ACCESS),
        (ILLEGAL_ACCESS.replace("[rank3]: ", ""), _ILLEGAL_ACCESS),
        (WATCHDOG, _ABORTED),
        (SEGMENTATION_FAULT, "Segmentation fault"),
        (CHAINED, "ValueError: shard a is missing"),
        (
            STATE_DICT,
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "head.weight".',
        ),
        (SYNTAX, "SyntaxError: invalid syntax (/home/alice/train.py, line 2)"),
        (GROUP, "ValueError: bad shard 2"),
        ("".join(f"[rank3]: {line}" for line in GROUP.splitlines(keepends=True)), "ValueError: bad shard 2"),
        (PANEL, "Missing option '--lr'."),
        ("no more memory\n=======\n", "no more memory"),
        ("=======\n", "======="),
        (CAUGHT, "the loss has left its range, giving up"),
        ("python3: can't open file 'x.py'\n", "python3: can't open file 'x.py'"),
        (_GOODBYE, _GOODBYE.removeprefix("[rank0]:").strip()),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
        ('Traceback (most recent call last):\n  File "x.py", line 1\n', 'File "x.py", line 1'),
        ("Traceback (most recent call last):\n[rank0]:\n", "Traceback (most recent call last):"),
        ('  File "x.py", line 1\nValueError: a\n[rank0]:   \n', "ValueError: a"),
        ("[rank0]:\n", ""),
        ("\n \n", ""),
        ("", ""),
    ],
)
def test_the_line_that_says_why_a_rank_ended_is_found(text: str, cause: str) -> None:
    assert cause_in(text) == cause


@pytest.mark.parametrize("text", [OUT_OF_MEMORY, ILLEGAL_ACCESS])
def test_a_traceback_whose_beginning_is_cut_off_still_names_the_exception(text: str) -> None:
    assert cause_in(text[text.index('File "') - 20 :]) == cause_in(text)


_PIECES = [
    "[rank0]: ",
    "[rank0]:",
    "| ",
    "│",
    "+--",
    ":",
    " ",
    "\t",
    "x",
    "é",
    "SyntaxError: ",
    "ValueError: CUDA",
    "what():  ",
]
_FRAMES = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1',
    '  File "x.py", line 2, in f',
    "[W1127 10:09:09",
]


@given(st.lists(st.lists(st.sampled_from(_PIECES + _FRAMES), max_size=4).map("".join), max_size=6).map("\n".join))
def test_whatever_a_rank_has_written_there_is_an_answer_of_one_line(text: str) -> None:
    """The core stops at an exception."""
    cause = cause_in(text)
    assert "\n" not in cause
    assert cause == cause.strip()


def test_a_reason_that_is_cut_says_so() -> None:
    for length, shown in ((REASON_LENGTH, "x" * REASON_LENGTH), (REASON_LENGTH + 1, "x" * (REASON_LENGTH - 3) + "...")):
        rank = RankState(3, 1, running=False, exit_code=1, stderr_tail="x" * length)
        assert failures._exit_reason("n1", rank) == f"rank 3 on n1 exited with 1: {shown}"
