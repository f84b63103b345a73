"""What `test_incident_ranks` runs under torchrun in each process: a training whose last rank has a fault in its gradient."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.monitor import Monitor
from unsilent.recovery.fault_verdict import FaultVerdict

STEPS, FAULTS = 60, (40, 50)


def train(folder, events_of=(0, 1)):
    """``events_of``: ranks that write events."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-15)
    now = False
    model.module[0].weight.register_hook(lambda g: g * 1e12 if now and rank == 1 else g)
    generator = torch.Generator().manual_seed(rank)
    events = folder / "e.jsonl" if rank in events_of else None
    with Monitor(model, optimizer, events=events, sampling=1) as monitor:
        for step in range(STEPS):
            now = step in FAULTS
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            if step == STEPS - 1:
                verdict = FaultVerdict(kind="transient", step=FAULTS[0], rank=1, code="UNSILENT-T01", exit_code=0)
                monitor._reporter.fault_verdict(verdict)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()
