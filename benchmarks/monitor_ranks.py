"""Whether a monitor names the rank that a fault is in: faults one after another in one long-lived job of several processes.

    python -m benchmarks.monitor_ranks [--ranks 2,4] [--strategy ddp,fsdp2] [--alarms 50] [--fingerprint full]

Each job trains a small character GPT. A fault flips one bit in one rank: in the gradient of a layer's output, in a layer's output
(forward), in a weight between two steps, or in the optimizer's state. After the steps in which it can be found the state from
before is restored, and clean steps follow. Faults are drawn until each cell has so many that raised an alarm; a rank that is not
named counts as wrong. Bits of gradients and outputs are the six highest, as others raise hardly any alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

KINDS = ("gradient", "forward", "weight", "state")
WARM_UP = 120
FOLLOWED = 3
"""Steps after a fault in which an alarm is waited for."""
PAUSE = 3
"""Clean steps between two faults."""
MOST = 1500
"""Faults of a cell at most."""


def main() -> None:
    """Start a job for each number of ranks and strategy, and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--strategy", default="ddp,fsdp2")
    parser.add_argument("--alarms", type=int, default=50)
    parser.add_argument("--fingerprint", default="full")
    parser.add_argument("--sampling", default="fixed:1")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        job(asked)
        return
    for ranks in asked.ranks.split(","):
        for strategy in asked.strategy.split(","):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m",
                "benchmarks.monitor_ranks", "--job", "--strategy", strategy, "--alarms", str(asked.alarms), "--fingerprint",
                asked.fingerprint, "--sampling", asked.sampling,
            ]  # fmt: skip
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def job(asked: argparse.Namespace) -> None:
    """One rank of one job."""
    import torch.distributed as dist

    from unsilent.events.event_kinds import Event, Verdict
    from unsilent.monitor.monitor import Monitor

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inner, model = build(asked.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = batches_of(rank)
    verdicts: list[Event] = []

    def step() -> None:
        tokens = next(batches)
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with Monitor(model, optimizer, sinks=[verdicts.append], fingerprint=asked.fingerprint, sampling=asked.sampling):
        for _ in range(WARM_UP):
            step()
        for kind in KINDS:
            generator, named, faults = np.random.default_rng([ranks, KINDS.index(kind)]), Counter[str](), 0
            while sum(named.values()) < asked.alarms and faults < MOST:
                faults += 1
                faulty = int(generator.integers(ranks))
                held = [t.clone() for t in state_of(model, optimizer)]
                before = len(verdicts)
                fault = Fault(kind, inner, optimizer, generator)
                with fault.injected(faulty == rank):
                    step()
                for _ in range(FOLLOWED):
                    step()
                with torch.no_grad():
                    for tensor, copy in zip(state_of(model, optimizer), held, strict=True):
                        tensor.copy_(copy)
                found = [one for one in verdicts[before:] if isinstance(one, Verdict)]
                if found:
                    right = found[0].suspect == faulty
                    named["right" if right else "undetermined" if found[0].suspect < 0 else "wrong"] += 1
                for _ in range(PAUSE):
                    step()
            if rank == 0:
                print(json.dumps({
                    "strategy": asked.strategy, "ranks": ranks, "fault": kind, "fingerprint": asked.fingerprint, "faults": faults,
                    "alarms": sum(named.values()), **named,
                }), flush=True)  # fmt: skip
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort in an orderly end


def build(strategy: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model, and what is called in its place."""
    from unsilent.workloads.character_models import CharGpt

    torch.manual_seed(0)
    model = CharGpt(32, 2)
    if strategy == "ddp":
        return model, torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, model


def batches_of(rank: int) -> Iterator[torch.Tensor]:
    """Other batches of text in each rank."""
    from unsilent.workloads.help_texts import CONTEXT, load_help_texts

    text = load_help_texts().train
    generator = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (8, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)]


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that a step changes, of this rank."""
    states = [value for entries in optimizer.state.values() for value in entries.values() if torch.is_tensor(value)]
    return [local(tensor) for tensor in (*model.parameters(), *states)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this rank."""
    result: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return result


class Fault:
    """One bit of one value, drawn alike in every rank."""

    def __init__(self, kind: str, model: torch.nn.Module, optimizer: Any, generator: np.random.Generator) -> None:
        layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        self._kind, self._optimizer = kind, optimizer
        self._layer = layers[int(generator.integers(len(layers)))]
        self._weight = weights[int(generator.integers(len(weights)))]
        self._key = str(generator.choice(["exp_avg", "exp_avg_sq"]))
        self._place, self._bit = (
            float(generator.random()),
            int(generator.integers(26 if kind in ("gradient", "forward") else 0, 32)),
        )

    def flip(self, tensor: torch.Tensor) -> None:
        """Flip the bit, unnoticed by torch."""
        words = tensor.detach().numpy(force=True).reshape(-1).view(np.uint32)
        if len(words):
            words[int(self._place * len(words))] ^= np.uint32(1 << self._bit)

    @contextmanager
    def injected(self, is_here: bool) -> Iterator[None]:
        """The fault happens in this step, or before it."""
        if not is_here:
            yield
            return
        if self._kind in ("weight", "state"):
            tensor = self._weight if self._kind == "weight" else self._optimizer.state[self._weight][self._key]
            self.flip(local(tensor))
            yield
            return

        def after(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            if self._kind == "forward":
                changed = output.clone()
                self.flip(changed)
                return changed
            output.register_hook(self._of_gradient)
            return output

        hook = self._layer.register_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()

    def _of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone(memory_format=torch.contiguous_format)
        self.flip(changed)
        return changed


if __name__ == "__main__":
    main()
