"""What the guard costs a training step: its parts timed themselves, not as the difference of two trainings.

In a guarded step the snapshot, the step and the check are timed one after the other, by the wall and by CPU time; on a GPU each
until the device is done, but for what the guard itself waits for. A round is the mean over as many steps as there are from one
state that is kept to the next. Shares are of the step of the same round; medians over rounds with a 95 % interval (of order
statistics). After each round the moments are read once, plainly. A recovery is timed from the check that finds a planted value
to the end of the last step that is executed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom

from unsilent.basics.sizes import human_bytes
from unsilent.guard import Guard
from unsilent.guard.bounds import WARM_UP
from unsilent.guard.watched_tensors import find_history_tensors
from unsilent.guard.workload import Counters


class Subject(NamedTuple):
    """A training; ``gradients``: they are there when a step begins."""

    name: str
    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    others: list[Any]
    step: Callable[[], object]
    gradients: bool
    rounds: int


def llama(device: str) -> Subject:
    """A Llama of 5.3 million parameters on 8 sequences of 512 tokens, AdamW."""
    shape = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    return _llama(device, shape, heads=4, tokens=(8, 512), rounds=3)


def large_llama(device: str) -> Subject:
    """A Llama of 374 million parameters on 16 sequences of 1,024 tokens, in bfloat16 by autocast, fused AdamW."""
    shape = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
    return _llama(device, shape, heads=16, tokens=(16, 1024), rounds=2, dtype=torch.bfloat16)


def _llama(
    device: str, shape: dict[str, int], heads: int, tokens: tuple[int, int], rounds: int, dtype: Any = torch.float32
) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    own = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": tokens[1]}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **own)).to(device)
    narrow = dtype is not torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=narrow or None)
    drawn = torch.randint(shape["vocab_size"], tokens, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=narrow):
            loss = model(input_ids=drawn, labels=drawn).loss
        loss.backward()
        optimizer.step()

    count = sum(p.numel() for p in model.parameters())
    name = f"Llama, {count / 1e6:.1f} M parameters, {tokens[0]} x {tokens[1]} tokens, {dtype}"
    return Subject(name, model, [optimizer], [], step, True, rounds)


def small(name: str, device: str) -> Subject:
    """A training workload: the smaller a step, the larger the share of the guard."""
    from unsilent.workloads import load_training
    from unsilent.workloads.trainings.base import Seeds

    workload = load_training(name, {"device": device})
    state = workload.start(Seeds.same_for_all(0))
    count = sum(p.numel() for p in state.model.parameters())
    title, others = f"{name}, {count} parameters", [*state.schedulers, Counters(state)]
    return Subject(title, state.model, state.optimizers, others, lambda: workload.step(state), False, 50)


class Clock:
    """Reads wall and CPU time, [2], once the device is done."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def __call__(self) -> np.ndarray:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return np.array([time.perf_counter(), time.process_time()])


def main(rounds: int, device: str = "cpu") -> None:
    """Print a table for each training."""
    torch.set_num_threads(1)
    variants: list[dict[str, Any]] = [{}]
    makes = [llama, lambda d: small("train-resnet", d), lambda d: small("train-chargpt", d)]
    if device != "cpu":
        variants += [{"snapshot_location": "host"}, {"spread": 1, "snapshot_interval": 4}]
        makes = [large_llama, *makes]
    for make in makes:
        for options in variants:
            _report(make(device), rounds, Clock(device), device, options)


def _report(subject: Subject, rounds: int, now: Clock, device: str, options: dict[str, Any]) -> None:
    guard = Guard(
        subject.model,
        subject.optimizers,
        *subject.others,
        snapshot_gradients=subject.gradients,
        **options,
    )
    interval = guard.plan.interval
    for _ in range(WARM_UP + 2):
        guard.step(subject.step)
    parts: dict[str, list[np.ndarray]] = {key: [] for key in ("step", "check", "snapshot", "synchronisation", "read")}
    for _ in range(max(rounds * subject.rounds, 6)):
        waited, spent = guard.overhead.synchronise, np.zeros((3, 2))
        for _ in range(interval):  # one of these steps begins with a state that is kept
            times = [now()]
            for part in (lambda: guard.begin(subject.step), subject.step, guard.end):
                part()
                times.append(now())
            spent += np.diff(times, axis=0) / interval
        wait = np.full(2, guard.overhead.synchronise - waited) / interval
        snapshot, step, check = spent
        for key, value in (("step", step), ("check", check - wait), ("snapshot", snapshot), ("synchronisation", wait)):
            parts[key].append(value)
        guard.begin(subject.step)
        subject.step()
        moments, begun = _moments(subject), now()
        for tensor in moments:
            tensor.sum()
        parts["read"].append(now() - begun)
        guard.end()
    guard.check_pending_steps()
    print(f"\n{subject.name} ({device}), {len(parts['step'])} times {interval} steps; {options or 'defaults'}")
    print(f"{guard.plan}; noticed at most {guard.plan.latency} steps later")
    print(
        f"one state {human_bytes(guard.nbytes // guard.plan.states)}, moments {human_bytes(_size(_moments(subject)))}"
    )
    print(f"{'':26}{'wall ms':>30}{'CPU ms':>30}{'% of step, CPU':>26}{'wall':>9}")
    found = {key: np.array(values) for key, values in parts.items()}
    found["sum of the three"] = found["check"] + found["snapshot"] + found["synchronisation"]
    for key in ("step", "check", "snapshot", "synchronisation", "sum of the three", "read"):
        label = {"read": "one plain read of moments"}.get(key, key)
        share = 100 * found[key] / found["step"]
        wall, cpu = (_interval(found[key][:, i] * 1e3) for i in (0, 1))
        print(f"{label:26}{wall:>30}{cpu:>30}{_interval(share[:, 1]):>26}{np.median(share[:, 0]):9.3f}")
    print(f"alarms: {len(guard.alarms)}")
    _recover(guard, subject, now, np.median(found["step"], axis=0))
    guard.close()


def _recover(guard: Guard, subject: Subject, now: Clock, step: np.ndarray, times: int = 5) -> None:
    """Plant a value a few times and print what going back and executing steps again costs."""
    back, whole = [], []
    for _ in range(times):
        for _ in range(3):
            guard.step(subject.step)
        guard.check_pending_steps()
        guard.begin(subject.step)
        subject.step()
        _moments(subject)[0].view(-1)[0] = float("nan")
        spent, begun = guard.overhead.recovery, now()
        guard.end()
        guard.check_pending_steps()
        whole.append(now() - begun)
        back.append(guard.overhead.recovery - spent)
    assert guard.recoveries == times
    both = np.median(whole, axis=0)
    print(
        f"recovery: {np.median(back) * 1e3:.2f} ms to put the state back; with the steps executed again "
        f"{both[0] * 1e3:.1f} ms wall, {both[1] * 1e3:.1f} ms CPU ({both[1] / step[1]:.2f} steps)"
    )


def _moments(subject: Subject) -> list[torch.Tensor]:
    return [part.tensor for part in find_history_tensors(subject.model, subject.optimizers)]


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _interval(values: np.ndarray) -> str:
    """Median and the 95 % interval of it."""
    ordered, count = np.sort(values), len(values)
    low = int(binom.ppf(0.025, count, 0.5)) - 1
    return f"{np.median(values):.3f} ({ordered[max(low, 0)]:.3f} – {ordered[min(count - 1 - low, count - 1)]:.3f})"
