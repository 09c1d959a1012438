"""One process that trains the MLP of `benchmarks/fit` with torch: see `run.py`.

python torch_player.py CONTROL KIND RANK SIZE
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve

CONTROL, KIND, RANK, SIZE = sys.argv[1:]
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[int(RANK) % len(CORES)]})

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

BATCH, WARM_UP = 128, 3
torch.set_num_threads(1)
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
# Another port than that of the job, and gloo's interface to the other host.
host, port = workers[0].rsplit(":", 1)
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group(
    "gloo", f"tcp://{host}:{int(port) + 2}", rank=int(RANK), world_size=int(SIZE)
)
torch.manual_seed(0)
sizes = [784, 1024, 1024, 1024, 1024]
hidden: list[Any] = []
for rows, columns in itertools.pairwise(sizes):
    hidden += [torch.nn.Linear(rows, columns), torch.nn.ReLU()]
# With several buckets the hook's calls of gloo come in another order on the two ranks,
# which ends in "Received data size doesn't match expected size".
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*hidden, torch.nn.Linear(1024, 10)),
    bucket_cap_mb=100 if KIND == "powersgd" else 25,
)
if KIND == "powersgd":
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
generator = torch.Generator().manual_seed(int(RANK))
x = torch.rand(16 * BATCH, 784, generator=generator)
y = torch.randint(0, 10, (16 * BATCH,), generator=generator)


def answer(order: dict[str, Any]) -> dict[str, float]:
    """Train for some steps; return the seconds of one."""
    began = 0.0
    for step in range(order["steps"] + WARM_UP):
        if step == WARM_UP:
            began = time.perf_counter()
        rows = slice(step % 16 * BATCH, (step % 16 + 1) * BATCH)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return {"seconds": (time.perf_counter() - began) / order["steps"]}


serve(CONTROL, int(RANK), answer)
