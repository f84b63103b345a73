"""What determinism costs: the time of operations and training steps with ``torch.use_deterministic_algorithms``, by default = 1.

Modes take turns: torch as it is; deterministic; deterministic, but without the filling of uninitialised memory. On a CPU two
threads run, since with one nothing races and nothing but the filling is left; one thread is a fourth mode, the other way to the
same bits every time. The time is that of the wall (what is lost may be a thread), with CPU time beside it. On a GPU the fourth
mode is cuDNN's autotuning, a faster default to compare with. Beside the cost stands what it buys: distinct results over repeats.

Threads that wait busily make such times useless on shared cores: set ``OMP_WAIT_POLICY=passive`` before start.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.determinism_subjects import Build, Subject, models, operations
from benchmarks.timing import Figure, clock, interleave
from unsilent.explain import switching
from unsilent.explain.switching import Mode

THREADS = 2
LONG_ENOUGH = 0.01
"""Seconds of one timed call; shorter ones are repeated until they take so long."""
TOP = 4
"""Kernels shown of a model."""


def modes(device: str) -> dict[str, Mode]:
    """By name, the baseline first."""
    own = {"default": Mode(), "deterministic": Mode(True), "without filling": Mode(True, fill=False)}
    return own | ({"one thread": Mode(threads=1)} if device == "cpu" else {"default, tuned": Mode(tune=True)})


@contextmanager
def switched(mode: Mode) -> Iterator[None]:
    """`switching.switched`, in which operations without a deterministic form are refused."""
    with switching.switched(mode):
        mode.set(warn_only=False)
        yield


def distinct(outcome: Callable[[], Iterable[Tensor]], repeats: int) -> int:
    """Different results, bit by bit, of so many calls."""
    found = set()
    for _ in range(repeats):
        tensors = [t.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for t in outcome()]
        found.add(hashlib.sha256(b"".join(tensors)).hexdigest())
    return len(found)


# Measuring.


class Cost(NamedTuple):
    """``refused``: torch's reason, by mode; the other fields lack these modes. ``cpu``: CPU time, empty on a GPU."""

    wall: Mapping[str, Figure]
    cpu: Mapping[str, Figure]
    distinct: Mapping[str, int]
    refused: Mapping[str, str]


def prepared(build: Build, device: str) -> tuple[dict[str, Subject], dict[str, str]]:
    """The subject in every mode, run once; where torch refuses the mode, the first line of its reason instead."""
    ready, refused = {}, {}
    for name, mode in modes(device).items():
        with switched(mode):
            try:
                subject = build(device)
                subject.call()
            except RuntimeError as error:
                if not mode.deterministic:
                    raise
                refused[name] = str(error).splitlines()[0]
            else:
                ready[name] = subject
    return ready, refused


def cost(build: Build, rounds: int, device: str, repeats: int) -> Cost:
    """Time of a call in every mode and distinct outcomes over ``repeats``."""
    ready, refused = prepared(build, device)
    now = time.perf_counter if device == "cpu" else clock(device)
    begun = now()
    ready["default"].call()
    calls = max(1, round(LONG_ENOUGH / max(now() - begun, 1e-6)))

    def method(mode: Mode, subject: Subject) -> Callable[[], None]:
        def run() -> None:
            with switched(mode):
                for _ in range(calls):
                    subject.call()

        return run

    methods = {name: method(modes(device)[name], subject) for name, subject in ready.items()}
    wall = _each(interleave(methods, rounds, clock=now), calls)
    cpu = _each(interleave(methods, rounds), calls) if device == "cpu" else {}
    different = {}
    for name, subject in ready.items():
        with switched(modes(device)[name]):
            different[name] = distinct(subject.outcome, repeats)
    return Cost(wall, cpu, different, refused)


def _each(figures: Mapping[str, Figure], calls: int) -> dict[str, Figure]:
    return {name: figure._replace(seconds=figure.seconds / calls) for name, figure in figures.items()}


def kernels(build: Build, rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Mode -> kernel -> milliseconds of a call, the least over rounds; ``all``: the sum of these.

    The least, since a profiler reads the wall clock: a kernel that waited for a core is no slower one. On a GPU the kernels that
    ran there. On a CPU torch's operations, each without those it called in turn.
    """
    ready, _ = prepared(build, device)
    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    order, rng = list(ready), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            with switched(modes(device)[name]), profile(activities=[activity]) as profiled:
                ready[name].call()
                clock(device)()
            own: dict[str, float] = defaultdict(float)
            for event in profiled.key_averages():
                if device != "cpu" and event.is_user_annotation:
                    continue  # a span around kernels, which are counted themselves
                own[event.key] += (event.self_cpu_time_total if device == "cpu" else event.self_device_time_total) / 1e3
            times[name].append(own)
    least: dict[str, dict[str, float]] = {}
    for name, found in times.items():
        every = {kernel for own in found for kernel in own}
        least[name] = {kernel: min(own.get(kernel, 0.0) for own in found) for kernel in every}
        least[name]["all"] = sum(least[name].values())
    return least


# Printing.


def main(rounds: int, device: str = "cpu") -> None:
    """Print the tables."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes four lines at every start otherwise
    if device != "cpu":
        _cuda()
    else:
        waiting = os.environ.get("OMP_WAIT_POLICY", "not set: expect noise")
        print(
            f"\n{THREADS} threads on {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, waiting: {waiting}"
        )
    try:
        for title, subjects, repeats in (("operation", operations(), 20), ("training step", models(), 5)):
            print("\n" + _heading(title, device, repeats))
            for name, build in subjects.items():
                print(_row(name, cost(build, rounds * 3, device, repeats), device), flush=True)
        columns = ["kernel, ms a step", *modes(device), "deterministic / default"]
        print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for name, build in models().items():
            print("\n".join(_kernel_rows(name, kernels(build, rounds * 6, device), device)), flush=True)
    finally:
        torch.set_num_threads(before)


def _cuda() -> None:
    """What must be set before CUDA starts, and what the reader must know."""
    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        print("CUDA was started without CUBLAS_WORKSPACE_CONFIG: run this benchmark alone")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    print(
        f"\n{torch.cuda.get_device_name()}; CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']} in all modes; "
        f"TF32: matmul {torch.backends.cuda.matmul.allow_tf32}, cuDNN {torch.backends.cudnn.allow_tf32}"
    )


def _heading(title: str, device: str, repeats: int) -> str:
    others = list(modes(device))[1:]
    columns = [title, "default ms", *(f"{name} / default" for name in others)]
    columns += [f"CPU time, {name}" for name in others] if device == "cpu" else []
    columns += [f"distinct of {repeats}: {', '.join(modes(device))}"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _row(name: str, found: Cost, device: str) -> str:
    names = list(modes(device))
    cells = [name, f"{found.wall['default'].seconds * 1e3:.3g}"]
    for figures in (found.wall, found.cpu) if device == "cpu" else (found.wall,):
        for mode in names[1:]:
            if mode in found.refused:
                cells.append("refused")
                continue
            figure = figures[mode]
            between = f" ({figure.low:.2f} – {figure.high:.2f})" if figures is found.wall else ""
            cells.append(f"{figure.ratio:.2f}{between}")
    cells.append(", ".join(str(found.distinct.get(mode, "–")) for mode in names))
    return f"| {' | '.join(cells)} |"


def _kernel_rows(name: str, found: Mapping[str, Mapping[str, float]], device: str) -> list[str]:
    """The sum and the kernels that take longest in any mode."""
    longest: dict[str, float] = defaultdict(float)
    for own in found.values():
        for kernel, ms in own.items():
            longest[kernel] = max(longest[kernel], ms)
    shown = sorted(longest, key=lambda kernel: (-longest[kernel], kernel))[: TOP + 1]
    assert "all" in shown
    rows = []
    for kernel in ["all", *(k for k in shown if k != "all")]:
        label = f"**{name}**, all" if kernel == "all" else f"… `{kernel}`"
        own = {mode: found[mode].get(kernel, 0.0) if mode in found else None for mode in modes(device)}
        cells = [label, *("refused" if ms is None else f"{ms:.3f}" for ms in own.values())]
        both = own["deterministic"], own["default"]
        cells.append(f"{both[0] / both[1]:.2f}" if both[0] is not None and both[1] else "–")
        rows.append(f"| {' | '.join(cells)} |")
    return rows
