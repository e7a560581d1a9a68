"""Where a rank that hangs was: in a call that waits for other ranks, or elsewhere. Read from its Python stacks.

If all ranks but one wait for the others, that one hangs, and they wait for it. The stacks are those of faulthandler. A
rank waits if the innermost Python function of its main thread belongs to `torch.distributed`, to
DistributedDataParallel, or to a backward pass, in which gradients are summed. A rank in a native library is where
Python has called it: `loss.item()` counts as elsewhere, although a GPU may wait there for a collective.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WAITING_MODULES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/graph.py",
    "/torch/autograd/__init__.py",
)
"""Parts of the paths of modules whose functions wait for other ranks."""
MAX_WORDS = 200
"""The longest description that is reported, in characters."""
_LIBRARIES = (
    "/lib/python3",
    "/dist-packages/",
    "/site-packages/",
    "/muster/checkpoint/",
    "/muster/daemon/",
    "<frozen ",
)
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ ", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d+) in (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HangPlace:
    """`waits`: for other ranks. `where`: the innermost function, and the script's function that led to it."""

    waits: bool
    where: str


def place_in(stacks: str) -> HangPlace | None:
    """The place of the main thread, which runs the script; None if the stacks don't show it."""
    frames = _FRAME.findall(_main_thread(stacks))
    if not frames:
        return None
    innermost = frames[0]
    own = next((frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)), innermost)
    words = [_words(innermost)] if own == innermost else [_words(innermost), _words(own)]
    waits = any(part in innermost[0] for part in WAITING_MODULES)
    return HangPlace(waits, ", called by ".join(words)[:MAX_WORDS])


def _main_thread(stacks: str) -> str:
    """The part of the thread that got the signal, or of the oldest one, which comes last: each is the main thread."""
    found = list(_THREAD.finditer(stacks))
    if not found:
        return ""
    main = next((number for number, thread in enumerate(found) if thread[1] == "Current thread"), len(found) - 1)
    return stacks[found[main].start() : found[main + 1].start() if main + 1 < len(found) else None]


def _words(frame: tuple[str, str, str]) -> str:
    path, line, name = frame
    return f"{name} ({path.rpartition('/')[2]}:{line})"
