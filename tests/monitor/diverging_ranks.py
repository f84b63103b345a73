"""A training of two ranks for ``unsilent run``, one of which changes a weight in the middle of a step."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(160):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    if step == 60 and dist.get_rank() == 1:
        with torch.no_grad():
            model.module[2].weight[0, 0] += 1e-3
    optimizer.step()
    time.sleep(0.005)
dist.barrier()
dist.destroy_process_group()
