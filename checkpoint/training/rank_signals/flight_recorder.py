"""How many collectives this process has entered, as PyTorch's flight recorder counts them.

If no rank makes progress, the rank that has entered fewer collectives of the default process group than all others is
the one that they wait for. A rank that hangs inside NCCL's call has not entered that collective yet, as NCCL's recorder
counts.

PyTorch also dumps the whole recorder into files, as pickles, which nobody may read who does not trust their author. So
the process asks its own recorder, for JSON, and only for the counters: that looks at no event of the GPU and takes no
lock that a collective holds.

The recorder of ProcessGroupNCCL is `FlightRecorder<CUDAEvent>`, that of gloo (since torch 2.8) the general one. Both
write the same JSON (`FlightRecorder::dump_json` in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp), of which the
part `pg_status` is read. The default group has the id 0 there. Recorders are on by TORCH_FR_BUFFER_SIZE, or
TORCH_NCCL_TRACE_BUFFER_SIZE in older versions.

Rejected: the list of collectives. To make it, PyTorch asks the GPU about events, which may hang in a GPU that does.
Ranks ask after their first step, because PyTorch does not lock the counters while a process group is made. In jobs with
tensor or pipeline parallelism ranks wait in other groups, and messages from rank to rank may be counted, so these jobs
are left out. This was run with gloo (torch 2.13), and with NCCL never with more than one rank.
"""

import json
import sys
from typing import Any

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of PyTorch. A version or build without one of them has no such recorder."""
_DEFAULT_GROUP = "0"
_MOST = 2**63 - 1


def entered_collectives(bindings: Any = None) -> int | None:
    """The number of collectives of the default process group that this process has entered; None: nobody counts them.

    It takes some 0.1 ms, and imports nothing. `bindings`: PyTorch's module, if it is imported.
    """
    bindings = bindings or sys.modules.get("torch._C._distributed_c10d")
    for name in _RECORDERS:
        if (dump := getattr(bindings, name, None)) is not None:
            try:
                number = entered_in(dump(includeCollectives=False))
            except (RuntimeError, TypeError):  # a recorder that refuses, or takes other arguments
                continue
            if number is not None:
                return number
    return None


def entered_in(dump: bytes | str) -> int | None:
    """The number of collectives of the default group in a recorder's JSON; None if the JSON does not say it."""
    try:
        number = int(json.loads(dump)["pg_status"][_DEFAULT_GROUP]["last_enqueued_collective"])
    except (ValueError, KeyError, TypeError):
        return None
    return min(max(number, 0), _MOST)  # -1: none yet
