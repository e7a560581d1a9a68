"""The training script of bench_start, as a user has it: plain PyTorch, DDP, and one optimizer step.

Each rank writes a line to the file marks, with the wall-clock times at which it began, had imported, was in the process
group, and had finished its step.
"""

import os
import time

began = time.time()
import no_libuv  # noqa: E402, F401  (nothing but the name is needed)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

imported = time.time()
torch.set_num_threads(1)
os.environ.setdefault("RANK", os.environ.get("SLURM_PROCID", ""))
os.environ.setdefault("WORLD_SIZE", os.environ.get("SLURM_NTASKS", ""))
dist.init_process_group("gloo")
joined = time.time()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 64)).sum().backward()
optimizer.step()
with open("marks", "a") as marks:
    marks.write(f"{began:.6f} {imported:.6f} {joined:.6f} {time.time():.6f}\n")
dist.destroy_process_group()
