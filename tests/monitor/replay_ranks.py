"""What `test_replay_ranks` runs under torchrun in each process: alarms whose step two ranks execute again."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unreachable import Unreachable

from unsilent.monitor import Monitor, alarm_replay
from unsilent.recovery import fault_verdict, step_replay
from unsilent.sites.dispatch_mode import DispatchMode

STEPS, AT, FAULTY_RANK = 36, 30, 1


class Seen(Unreachable):
    """What a scene counts and collects. Nothing leads to it, for it is no part of the loop."""

    def __init__(self):
        self.begun, self.step, self.evidence, self.messages, self.codes = 0, 0, [], [], []


class Messages(logging.Handler):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def emit(self, record):
        self.seen.messages.append(record.getMessage())


class Device(DispatchMode):
    """The product of the step with the alarm has a wrong element on one rank: in how many of its executions, if not in all."""

    def __init__(self, seen, times):
        super().__init__()
        self.seen, self.times, self.rank = seen, times, dist.get_rank()

    def _dispatched(self, func, args, kwargs):
        result = func(*args, **kwargs)
        is_its_turn = func is torch.ops.aten.addmm.default and self.seen.step == AT and self.rank == FAULTY_RANK
        if is_its_turn and self.times > 0 and result.shape[1] == 2:
            self.times -= 1
            result.view(-1)[0] += 1e6
        return result


def with_wrong_payload(seen, bucket):
    """What one rank gives to the sum over ranks has an element that is not finite, each time."""
    payload = bucket.buffer() / dist.get_world_size()
    if seen.step == AT and dist.get_rank() == FAULTY_RANK:
        payload.view(-1)[3] = float("nan")
    return dist.all_reduce(payload, async_op=True).get_future().then(lambda done: done.value()[0])


def train(fault="", on_alarm="replay", wrap=DistributedDataParallel, has_loop=True, by_number=False):
    torch.manual_seed(0 if wrap is DistributedDataParallel else dist.get_rank())
    inner = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))
    model = wrap(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, seen = dist.get_rank(), Seen()
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(10 + rank)
    batches = [{"x": torch.randn(6, 4, generator=generator), "at": (number, None)} for number in range(STEPS)]
    if fault == "batch" and rank == FAULTY_RANK:
        batches[AT]["x"][2, 1] = float("nan")

    def judge(evidence):
        verdict = fault_verdict.judge(evidence)
        seen.evidence.append(dataclasses.asdict(evidence))
        seen.codes.append(verdict.code)
        return dataclasses.replace(verdict, exit_code=0)  # the training goes on

    alarm_replay.judge, step_replay.SECONDS = judge, 0.0  # three executions
    handler = Messages(seen)
    logging.getLogger("unsilent.monitor").addHandler(handler)
    logging.getLogger("unsilent.monitor").setLevel(logging.INFO)
    times = {"device": 10**6, "transient": 1}.get(fault, 0)
    shard = torch.stack([one["x"] for one in batches])
    if by_number:
        batches = [{"at": one["at"]} for one in batches]
    if fault == "payload":
        model.register_comm_hook(seen, with_wrong_payload)

    def step(batch):
        seen.begun, seen.step = seen.begun + 1, batch["at"][0]
        optimizer.zero_grad()
        model(shard[seen.step] if by_number else batch["x"]).square().mean().backward()
        optimizer.step()

    with Device(seen, times), Monitor(model, optimizer, on_alarm=on_alarm, sampling="fixed:1") as monitor:
        if on_alarm == "replay" and has_loop:
            for batch in monitor.iterate(batches):
                step(batch)
        else:
            for batch in batches:
                step(batch)
    logging.getLogger("unsilent.monitor").removeHandler(handler)
    state = [*model.parameters(), *(t for table in optimizer.state.values() for t in table.values())]
    bits = [tensor.detach().view(-1).view(torch.int32).tolist() for tensor in state]
    return {
        "bits": bits, "begun": seen.begun, "evidence": seen.evidence, "codes": seen.codes, "messages": seen.messages,
        "suspects": [verdict.suspect for verdict in monitor.verdicts], "generator": torch.get_rng_state().tolist(),
    }  # fmt: skip


SCENES = {
    "logged": lambda: train("transient", on_alarm="log"),
    "transient": lambda: train("transient"),
    "batch": lambda: train("batch"),
    "device": lambda: train("device"),
    "numbers": lambda: train("batch", by_number=True),
    "numbers, device": lambda: train("device", by_number=True),
    "payload": lambda: train("payload"),
    "apart": lambda: train("device", wrap=lambda model: model),
    "no loop": lambda: train("device", has_loop=False),
}


def main(folder):
    dist.init_process_group("gloo")
    results = {name: scene() for name, scene in SCENES.items()}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
