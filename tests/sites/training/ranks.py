"""A rank of a training under DDP or FSDP2: gradients with and without faults, written to a file for each rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "ddp":
        return DistributedDataParallel(model)
    for child in (model[0], model[2]):
        fully_shard(child)
    return fully_shard(model)


def gradients(kind: str, faults: list[UnresolvedFault]) -> tuple[dict[str, list[float]], StepInjection]:
    """Whole gradients after reduction, by parameter."""
    model, x = made(kind), torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1))[dist.get_rank()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with StepInjection(model, faults, [optimizer]) as step:
        model(x).square().sum().backward()
        optimizer.step()
    found = {}
    for name, p in model.named_parameters():
        whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name.removeprefix("module.")] = whole.flatten().tolist()
    return found, step


def main(kind: str, folder: str, *sites: str) -> None:
    dist.init_process_group("gloo")
    last = dist.get_world_size() - 1
    golden, step = gradients(kind, [])
    answers = {"": {"gradients": golden, "collectives": list(step.names["comm"]), "hits": 0}}
    for site in sites:
        found, step = gradients(kind, [UnresolvedFault(site, fault_model("set:value=1e10"), rank=last)])
        answers[site] = {"gradients": found, "hits": len(step.applied_faults)}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers))
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)  # threads of gloo now and then end the process with an abort when it is torn down in order


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    main(*sys.argv[1:])
