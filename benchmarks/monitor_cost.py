"""What a monitor costs a training step, with all default signals on: its own calls are timed, not the difference of two runs.

    python -m benchmarks.monitor_cost [--device cuda] [--steps 60] [--mode strict] [--sampling fixed:1]

Every function that torch calls of the monitor is timed by CPU time of the process (and by the wall), and compared with that of
all steps after the intervals have settled. On a GPU the wall counts, and synchronisations of the host are counted with torch's
profiler: those of a monitored step must be as many as those of a bare step in lagged mode.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from unsilent.monitor.monitor import Monitor
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.monitor.signals.forward_hook import ForwardHook

SETTLED = 20
"""Steps until the intervals of sampling have been looked at three times."""
ENTRIES = {
    SignalCollector: ("before_backward", "after_backward", "_before_step", "_after_step", "_gradient_arrived"),
    ForwardHook: ("__call__",),
    Monitor: ("_before_step", "_after_step"),
}
SIZES: dict[str, tuple[dict[str, int], tuple[int, int], torch.dtype]] = {
    "cpu": (
        {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "vocab_size": 1024},
        (8, 512),
        torch.float32,
    ),
    "cuda": (
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "vocab_size": 32000},
        (16, 1024),
        torch.bfloat16,
    ),
}
"""Of the Llama on each device: its sizes, its batch and its type."""


class Clock:
    """Adds up the CPU time and the time of the wall of functions, the outermost of calls inside each other."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            if self._depth:
                return function(*args, **named)
            self._depth += 1
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.cpu += time.process_time() - cpu
                self.wall += time.perf_counter() - wall
                self._depth -= 1

        return run


def llama(device: str) -> tuple[Any, torch.Tensor]:
    """A Llama, and a batch of tokens for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes, shape, dtype = SIZES[device]
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=shape[1], **sizes)
    tokens = torch.randint(int(sizes["vocab_size"]), shape, device=device)
    return LlamaForCausalLM(config).to(device=device, dtype=dtype), tokens


def host_synchronisations(step: Callable[[], None]) -> int:
    """How often one step waits for the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    return sum(one.count for one in trace.key_averages() if "Synchronize" in one.key)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--mode", default="lagged")
    parser.add_argument("--sampling", default="auto")
    parser.add_argument("--fingerprint", default="rotating")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, tokens = llama(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    step()
    bare = host_synchronisations(step) if asked.device == "cuda" else None
    clock = Clock()
    for owner, names in ENTRIES.items():
        for name in names:
            setattr(owner, name, clock.timed(getattr(owner, name)))
    rows = []
    with Monitor(model, optimizer, mode=asked.mode, sampling=asked.sampling, fingerprint=asked.fingerprint) as monitor:
        for number in range(asked.steps):
            clock.cpu = clock.wall = 0.0
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            if asked.device == "cuda" and number % 10 == 9:
                torch.cuda.synchronize()
            if number >= SETTLED:
                rows.append((clock.cpu, time.process_time() - cpu, clock.wall, time.perf_counter() - wall))
        monitored = host_synchronisations(step) if asked.device == "cuda" else None
    own, whole, own_wall, whole_wall = np.array(rows).T
    shares = own / (whole - own)
    print(json.dumps({
        "parameters": sum(p.numel() for p in model.parameters()), "tokens": list(tokens.shape), "series": len(monitor.series),
        "mode": asked.mode, "fingerprint": asked.fingerprint, "intervals": asdict(monitor.intervals),
        "step_cpu_ms": round(1000 * float(np.median(whole)), 1), "monitor_cpu_ms": round(1000 * float(own.mean()), 2),
        "cpu_percent": round(100 * float(own.sum() / (whole - own).sum()), 3),
        "cpu_percent_of_steps_10_50_90": [round(100 * float(q), 3) for q in np.quantile(shares, (0.1, 0.5, 0.9))],
        "wall_percent": round(100 * float(own_wall.sum() / (whole_wall - own_wall).sum()), 3),
        "host_synchronisations": {"bare": bare, "monitored": monitored},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
