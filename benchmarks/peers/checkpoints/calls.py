"""What the programs of this folder share: a state of given size, and calls as lines of JSON. Imports none of Muster."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch

Calls = Mapping[str, Callable[[], Any]]


def state_of(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the job, in memory that all libraries of this machine share."""
    whole = torch.frombuffer(mmap.mmap(job["descriptor"], 0), dtype=torch.float32)
    count = job["width"] ** 2
    return {f"tensor{n}": whole[n * count : (n + 1) * count] for n in range(whole.numel() // count)}


def serve(make: Callable[[dict[str, Any]], Calls]) -> None:
    """Answer each line of standard input, the name of a call, with one line of JSON: its seconds, or its error.

    Args:
        make: what the library does with the job on the command line. Its errors are those of each call.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is no answer
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    calls: Calls = {}
    for line in sys.stdin:
        try:
            calls = calls or make(job)
            began = time.monotonic()
            calls[line.strip()]()
            _write(answers, seconds=time.monotonic() - began)
        except Exception as error:  # noqa: BLE001  # the table shows it
            _write(answers, error=f"{type(error).__name__}: {error}")
    # Threads and processes of the library must not keep this one.
    os._exit(0)


def _write(answers: TextIO, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
