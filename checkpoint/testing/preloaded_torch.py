"""What ranks of tests import, for the process that forks them: `rank_processes` has it imported there.

torch reads OMP_NUM_THREADS when it is imported.
"""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"

for _module in (
    "torch",
    "torch._dynamo",  # optimizers import it with their first step
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "muster.checkpoint.training.loop",
):
    importlib.import_module(_module)
