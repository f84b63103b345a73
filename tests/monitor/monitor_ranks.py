"""What `test_monitor_ranks` runs under torchrun in each process: scenes of a monitored training, their results as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from unreachable import Unreachable

from unsilent.basics.errors import UnsilentError
from unsilent.events.event_kinds import MonitorFailed
from unsilent.guard import RepeatabilityWarning
from unsilent.monitor import Monitor, agreement, exchange, reporter
from unsilent.monitor.signals.state_watch import StateWatch

STEPS = 36
AT = 30
"""The step, counted as they are begun, in which the last rank is corrupted."""
READ_ALL = {"sampling": "fixed:1", "fingerprint": "full"}


class Seen(Unreachable):
    """What a scene counts and collects. Nothing leads to it, for it is no part of the loop."""

    def __init__(self):
        self.begun, self.now, self.losses, self.intervals, self.events = 0, False, [], [], []


def local(tensor):
    """What this rank holds."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def flip(tensor, bit=29):
    local(tensor).view(-1).view(torch.int32).numpy()[0] ^= 1 << bit


def bits_of(model, optimizer):
    moments = [table["exp_avg"] for table in optimizer.state.values()]
    tensors = [*model.parameters(), *model.buffers(), *moments]
    return hashlib.sha256(b"".join(local(t).numpy().tobytes() for t in tensors)).hexdigest()


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def sharded(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def train(
    fault=None,
    monitored=True,
    uses=None,
    late=False,
    steps=STEPS,
    wrap=DistributedDataParallel,
    before_step=None,
    at=AT,
    **options,
):
    """One training of all ranks; ``fault`` is where the last rank is corrupted in the step ``at``."""
    inner = make()
    model = wrap(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, is_faulty_rank = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    seen = Seen()
    spoil = lambda g: g * 1e9 if seen.now and fault == "gradient" else g  # noqa: E731
    inner[3].register_forward_hook(lambda module, args, output: output.register_hook(spoil) and None)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(steps)]

    def step(x):
        seen.now = is_faulty_rank and seen.begun == at
        if before_step:
            before_step(seen.begun, rank)
        if seen.now and fault == "weight":
            flip(inner[3].weight)
        if seen.now and fault == "moment":
            flip(optimizer.state[inner[3].weight]["exp_avg"])
        seen.begun += 1
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.losses.append(loss.item())
        seen.intervals.append(dataclasses.astuple(monitor.intervals) if monitor else None)

    monitor = Monitor(model, optimizer, sinks=[seen.events.append], **options) if monitored else None
    ended = "done"
    try:
        with monitor or contextlib.nullcontext():
            if monitor:
                monitor._is_late = late
            if uses == "iterate":
                for x in monitor.iterate(batches):
                    step(x)
            else:
                for x in batches:
                    if uses == "step":
                        monitor.step(step, x)
                    else:
                        step(x)
    except UnsilentError as error:
        ended = f"{type(error).__name__} {getattr(error, 'exit_code', '')}: {error}"
    verdicts = [(v.step, v.suspect, v.reason, v.tensor, v.action) for v in monitor.verdicts] if monitor else []
    return {
        "bits": bits_of(model, optimizer),
        "losses": seen.losses,
        "begun": seen.begun,
        "ended": ended,
        "verdicts": verdicts,
        "alarms": [(a.step, a.tensor, a.level) for a in monitor.alarms] if monitor else [],
        "failed": [event.error for event in seen.events if isinstance(event, MonitorFailed)],
        "intervals": seen.intervals,
    }


def sleepy(number, rank):
    """Steps of different ranks take different times."""
    time.sleep(0.002 * rank)


def exploding(at):
    """The monitor of the last rank fails."""

    def plant(number, rank):
        if number == at and rank == dist.get_world_size() - 1:

            def explode(self, *args):
                raise ZeroDivisionError("planted")

            StateWatch.take = explode

    return plant


def failing():
    plain = StateWatch.take
    try:
        return train(before_step=exploding(6), **READ_ALL)
    finally:
        StateWatch.take = plain


def uneven(error=False):
    """The first rank makes three steps more than the others, which end as usual, or by an exception that is caught."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begun, steps = time.monotonic(), 9 if dist.get_rank() else 12
    with contextlib.suppress(KeyError), Monitor(model, optimizer, strict=not error):
        for number in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            if error and dist.get_rank() and number == 5:
                raise KeyError
    seconds = time.monotonic() - begun
    dist.barrier()
    return seconds


def lasting():
    """Replicas differ from a step on, which is reported again and again."""
    with waiting(reporter, REPEAT_SECONDS=0.0):
        return train("weight", sampling="fixed:3", rule="nonfinite", steps=60)


@contextlib.contextmanager
def waiting(module, **seconds):
    """With other times of waiting."""
    before = {name: getattr(module, name) for name in seconds}
    for name, value in seconds.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def averaged(rounds=3, **options):
    """The last rank makes more steps of its own before all average their parameters, in each of some rounds."""
    model, events = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begun = time.monotonic()
    with waiting(agreement, ACTING_SECONDS=1.0), Monitor(model, optimizer, sinks=[events.append], **options) as monitor:
        for _ in range(rounds):
            for _ in range(10 + 3 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).square().sum().backward()
                optimizer.step()
            for parameter in model.parameters():
                dist.all_reduce(parameter.data, dist.ReduceOp.SUM)
                parameter.data /= dist.get_world_size()
        is_off = monitor._is_off
    seconds = time.monotonic() - begun
    dist.barrier()
    return {
        "seconds": seconds,
        "verdicts": len(monitor.verdicts),
        "steps": events[-1].steps,
        "is_off": is_off,
        "failed": [event.error for event in events if isinstance(event, MonitorFailed)],
    }


def only_one_trains():
    """Then all do."""
    begun = time.monotonic()
    with waiting(exchange, MEETING_SECONDS=2.0):
        alone = train_alone() if dist.get_rank() == 0 else None
        dist.barrier()
        seconds = time.monotonic() - begun
        together = train("weight", **READ_ALL)
    return alone, seconds, [verdict[1] for verdict in together["verdicts"]]


def train_alone():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
        return monitor._exchange.world_size


def differing_settings():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        Monitor(model, optimizer, budget=0.5 + 0.1 * dist.get_rank(), on_alarm="log")
    except UnsilentError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def different_models():
    """Every rank trains a model of its own; that is no fault."""
    model = make(seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, **READ_ALL) as monitor:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
    return len(monitor.verdicts)


def several_monitors():
    """One after the other; the groups of the first ones are left."""
    results = [train(steps=3, **READ_ALL)["ended"] for _ in range(4)]
    return results, len(dist.distributed_c10d._world.pg_map)


SCENES = {
    "golden": lambda: train(monitored=False),
    "clean": lambda: train(**READ_ALL),
    "strict": lambda: train(mode="strict", **READ_ALL),
    "gradient": lambda: train("gradient", **READ_ALL),
    "weight": lambda: train("weight", **READ_ALL),
    "moment": lambda: train("moment", **READ_ALL),
    "vote": lambda: train("weight", sampling="fixed:3", rule="nonfinite", steps=42),
    "lasting": lasting,
    "from-the-start": lambda: train("weight", sampling="fixed:3", rule="nonfinite", steps=12, at=2),
    "skip": lambda: train("gradient", mode="strict", on_alarm="skip", **READ_ALL),
    "stop": lambda: train("gradient", on_alarm="stop", **READ_ALL),
    "stop-weight": lambda: train("weight", on_alarm="stop", **READ_ALL),
    "failing": failing,
    "sampling": lambda: train(before_step=sleepy, steps=60, rule="nonfinite"),
    "sharded-golden": lambda: train(monitored=False, wrap=sharded),
    "sharded-clean": lambda: train(wrap=sharded, **READ_ALL),
    "sharded-gradient": lambda: train("gradient", wrap=sharded, **READ_ALL),
    "sharded-weight": lambda: train("weight", wrap=sharded, **READ_ALL),
    "sharded-moment": lambda: train("moment", wrap=sharded, **READ_ALL),
    "settings": differing_settings,
    "models": different_models,
    "several": several_monitors,
    "uneven": uneven,
    "error": lambda: uneven(error=True),
    "averaged": averaged,
    "averaged-stop": lambda: averaged(on_alarm="stop", sampling="fixed:1"),
    "one": only_one_trains,
    **{
        f"rerun-{fault}-{uses}{'-late' if late else ''}": lambda fault=fault, uses=uses, late=late: train(
            fault, uses=uses, late=late, on_alarm="rerun", **READ_ALL
        )
        for fault in ("gradient", "weight", "moment")
        for uses in ("iterate", "step")
        for late in (False, True)
    },
}


def killed(folder):
    """The last rank is killed in the middle of a step; the others end by an error of their own, and not by torchrun's signal."""
    if dist.get_rank() < dist.get_world_size() - 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters())
    with Monitor(model, optimizer, events=Path(folder, "events.jsonl"), **READ_ALL):
        for number in range(40):
            if number == 20 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()


def destroyed(folder):
    """The program ends torch.distributed while the monitor is open, as scripts do that `unsilent run` starts."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, events=Path(folder, "events.jsonl")):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
        dist.barrier()
        dist.destroy_process_group()


def main(folder: str, *names: str) -> None:
    dist.init_process_group("gloo")
    if names in (("killed",), ("destroyed",)):
        globals()[names[0]](folder)
        return
    warnings.simplefilter("ignore", RepeatabilityWarning)  # steps that were begun are counted on purpose
    answers = {name: SCENES[name]() for name in names or SCENES}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers))
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)  # threads of gloo now and then end the process with an abort when it is torn down in order


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
