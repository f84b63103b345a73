"""A rank of guarded trainings under DDP: how each ended, written to a file for each rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.basics.errors import UnsilentError
from unsilent.guard import Guard

STEPS = 20
SCENES = {
    "golden": {},
    "clean": {"guarded": True},
    "gradient": {"guarded": True, "corrupts": [14], "where": "gradient"},
    "statistic": {"guarded": True, "corrupts": [14], "where": "statistic"},
    "nan": {"guarded": True, "corrupts": [14], "where": "statistic", "value": float("nan")},
    "late": {"guarded": True, "corrupts": [14], "where": "statistic", "late": True},
    "last": {"guarded": True, "corrupts": [19], "where": "gradient", "late": True},
    "permanent": {"guarded": True, "corrupts": range(14, 40), "where": "gradient"},
    "harmed": {"corrupts": [14], "where": "gradient"},
}


def train(guarded=False, corrupts=(), where=None, value=1e12, late=None):
    """``corrupts``: how often a step was begun when the last rank is corrupted."""
    torch.manual_seed(0)
    # Statistics of each rank are its own.
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)),
        broadcast_buffers=False,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    last, now = dist.get_rank() == dist.get_world_size() - 1, False

    def spoil(gradient):
        """In this rank, before gradients are reduced."""
        if not now or where != "gradient":
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    model.module[4].weight.register_hook(spoil)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(6, 4, generator=generator) for _ in range(STEPS)]
    guard = Guard(model, optimizer, delayed_check=late) if guarded else None
    begun, ended = 0, "done"
    try:
        for x in guard.iterate(batches) if guard else batches:
            now = last and begun in corrupts
            begun += 1
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if now and where == "statistic":
                model.module[1].running_var[0] = value
    except UnsilentError as error:
        ended = f"{type(error).__name__}: {error}"
    bits = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in (*model.parameters(), *model.buffers())))
    bits.update(torch.random.get_rng_state().numpy().tobytes())
    alarms = [(a.step, a.tensor) for a in guard.alarms] if guard else []
    if guard:
        guard.close()
    return {"bits": bits.hexdigest(), "alarms": alarms, "begun": begun, "ended": ended}


def unlike(ranks):
    """Every rank trains a model of its own."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + dist.get_rank())])
    optimizer = torch.optim.Adam(model.parameters())
    guard = Guard(model, optimizer, ranks=ranks)
    try:
        for x in guard.iterate([torch.ones(1, 2)] * 3):
            model(x).sum().backward()
            optimizer.step()
    except UnsilentError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    answers = {name: train(**scene) for name, scene in SCENES.items()}
    answers |= {ranks: unlike(ranks) for ranks in ("all", "alone")}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers))
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)  # threads of gloo now and then end the process with an abort when it is torn down in order


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
