"""What a monitor costs a training step, with all default signals on: its own calls are timed, not the difference of two runs.

    python -m benchmarks.monitor_cost [--device cuda] [--steps 180] [--mode strict] [--sampling fixed:1]
    python -m benchmarks.monitor_cost --short [2 20 200]

Every function that torch calls of the monitor is timed by CPU time of the process (and by the wall), and compared with that of
all steps after the intervals have settled. On a GPU the wall counts, and synchronisations of the host are counted with torch's
profiler: those of a monitored step must be as many as those of a bare step in lagged mode.

``--short`` trains two small transformers alike with clipped gradients, one of them monitored with the defaults, a block of steps
of one and then of the other, and compares the CPU time of the process: in the first 100 steps, and after them. Nothing in the
monitor is timed, so that all it does counts, and what it does to the caches of the processor. The other model's steps are no time
of the monitored training: its budget would be twice as large with them. Two models that are alike differ by
a percent without any monitor, by where their memory lies, so that several pairs are made anew and as many pairs without a monitor
are measured between them: the figures are means of pairs with their standard errors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.monitor.monitor import Monitor
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.monitor.signals.forward_hook import ForwardHook

SETTLED = 120
"""Steps until the larger budget of the beginning is over, and intervals have been looked at since."""
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

SHORT = {2: (32, 1, 16, 4, 100, 20, 12), 20: (64, 5, 64, 5, 100, 4, 12), 200: (128, 4, 128, 16, 150, 1, 6)}
"""By milliseconds of a step: width, layers, tokens and batch of a transformer; blocks of steps, steps of a block, pairs."""


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


def transformer(
    width: int, layers: int, tokens: int, batch: int
) -> tuple[torch.optim.Optimizer, nn.Module, Callable[[], Tensor]]:
    """A small language model, its optimizer, and one step of it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, width), blocks, nn.LayerNorm(width), nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randint(256, (batch, tokens))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return optimizer, model, step


def short_steps(milliseconds: int) -> dict[str, Any]:
    """What the monitor costs steps of about so many milliseconds."""
    *_, block, pairs = SHORT[milliseconds]
    runs: dict[bool, list[Any]] = {True: [], False: []}
    for number in range(2 * pairs):  # the monitored model is the first that is made in some, and the second in others
        runs[number % 2 == 0].append(paired_steps(milliseconds, number % 4 < 2, number % 2 == 0))
    result: dict[str, Any] = {
        "step_cpu_ms": round(1000 * float(np.median([one[0] for one in runs[True]])), 2), "pairs": pairs,
        "steps_of_a_pair": block * runs[True][0][0].size,
    }  # fmt: skip
    first = 100 // block
    for name, part in {"first_100": slice(0, first), "after": slice(first, None)}.items():
        for label, is_monitored in (("percent", True), ("percent_without_a_monitor", False)):
            shares = [100 * float(own[part].sum() / bare[part].sum() - 1) for bare, own, *_ in runs[is_monitored]]
            error = float(np.std(shares, ddof=1)) / pairs**0.5
            result[f"{name}_{label}"] = [round(float(np.mean(shares)), 2), round(error, 2)]
    added = np.concatenate([own - bare for bare, own, *_ in runs[True]])
    return result | {
        "median_microseconds": round(1e6 * float(np.median(added)), 1),
        "monitor_says_percent": round(100 * float(np.mean([one[2] for one in runs[True]])), 2),
        "intervals": asdict(runs[True][0][3]), "same_losses": all(one[4] for one in runs[True]),
    }  # fmt: skip


def paired_steps(milliseconds: int, is_first: bool, is_monitored: bool) -> tuple[Any, Any, float, Any, bool]:
    """Seconds of a step of each block without and with a monitor, float64[blocks] each; and what else is reported.

    Args:
        is_first: Whether the model that is monitored is made first.
        is_monitored: Whether there is a monitor at all.
    """
    *sizes, blocks, block, _ = SHORT[milliseconds]
    made = [transformer(*sizes) for _ in range(2)]
    (optimizer, model, monitored), (_, _, bare) = made if is_first else made[::-1]
    for _ in range(5):
        monitored()
        bare()
    seconds: dict[Callable[[], Tensor], list[float]] = {monitored: [], bare: []}
    with Monitor(model, optimizer) if is_monitored else contextlib.nullcontext() as monitor:
        for number in range(blocks):
            for run in (monitored, bare) if number % 2 else (bare, monitored):
                begun, wall = time.process_time(), time.perf_counter()
                for _ in range(block):
                    run()
                seconds[run].append((time.process_time() - begun) / block)
                if run is bare and monitor is not None:
                    apart = time.perf_counter() - wall  # no part of the training
                    monitor._costs.begun += apart
                    monitor._costs._looked += apart
        are_same = torch.equal(monitored().detach(), bare().detach())
        cost, intervals = (0.0, None) if monitor is None else (monitor.cost, monitor.intervals)
    return np.array(seconds[bare]), np.array(seconds[monitored]), cost, intervals, are_same


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", nargs="*", type=int, choices=list(SHORT), default=None)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--mode", default="lagged")
    parser.add_argument("--sampling", default="auto")
    parser.add_argument("--fingerprint", default="rotating")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.short is not None:
        for milliseconds in asked.short or SHORT:
            print(json.dumps(short_steps(milliseconds)), flush=True)
        return
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
