"""What a trial costs beside an eager forward pass where trials run together: by CUDA graphs on a GPU, from the tape on a CPU.

Run: ``python -m benchmarks device_trials [--device cuda] [--rounds N]``. ``device_campaigns`` times whole campaigns of
about 2,000 trials with both engines and says whether their canonical exports are the same; ``--rounds`` is not used there.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.models import calibrated, gpt
from benchmarks.subjects import LAWS, Law, Subject, draw_by_tensor, regions
from benchmarks.timing import clock
from unsilent.engine import make_engine

GROUP = 64
"""Trials that are given to the engine together."""
TRIALS = 400
"""Of each component in a campaign, about 2,000 of all."""
CAMPAIGNS = ("digits-cnn", "chargpt", "dlrm", "cifar-resnet32")


def gpt2(batch: int = 8, context: int = 256) -> tuple[nn.Module, Tensor]:
    """The shape of GPT-2, 12 blocks of width 768 and a vocabulary of 50,257, with weights of its own for the output layer."""
    from benchmarks.models import Gpt

    torch.manual_seed(0)
    model = Gpt(width=768, depth=12, heads=12, context=context, vocabulary=50257)
    return model.eval(), torch.randint(50257, (batch, context))


SUBJECTS = (
    Subject("ResNet-18, light stem, batch 64", lambda: calibrated("light"), 1, ""),
    Subject("ResNet-18, CIFAR stem, batch 64", lambda: calibrated("cifar"), 1, ""),
    Subject("GPT, 6 layers of width 128, batch 16 of 32 tokens", gpt, 1, "", "next-token"),
    Subject("GPT-2 shape, 12 layers of width 768, batch 8 of 256 tokens", gpt2, 1, "", "next-token"),
)
INPUTS = Law("inputs, uniform over elements", ("input:*",), "per-element")


def measure(subject: Subject, law: Law, rounds: int, device: str) -> str:
    """A table: milliseconds of a trial and the median ratio to an eager forward pass of the same round."""
    workload, now = subject.workload(), clock(device)
    plain, auto = (make_engine(workload, engine=name, device=device) for name in ("plain", "auto"))
    places = regions(plain, law)
    drawn, _ = draw_by_tensor(places, max(1024, 4 * len(places)), law.law)
    faults = itertools.cycle(drawn)
    share: list[bool] = []

    def together() -> None:
        many = list(itertools.islice(faults, GROUP))
        share.extend(outcome.graphed for outcome in auto.trials(many))

    model, x = plain.model, plain.batches[0]
    methods: dict[str, tuple[Callable[[], object], int]] = {
        "eager forward pass": (lambda: model(x), 1),
        "hand-written flip": ((peers.hand_neuron if law.neurons else peers.hand)(model, x), 1),
        "Unsilent, plain": (lambda: plain.trial(next(faults)), 1),
        "Unsilent, auto": (together, GROUP),
    }
    if peers.available() and law is not INPUTS:
        own, inputs = subject.make()
        moved = own.to(device), inputs.to(device)
        trial = peers.pytorchfi_neuron(*moved) if law.neurons else peers.pytorchfi(*moved, peers.LAYERS)
        methods["PyTorchFI 0.6.0"] = (trial, 1)
    if law is INPUTS:
        del methods["hand-written flip"]
    times: dict[str, list[float]] = {name: [] for name in methods}
    with torch.no_grad():
        for turn in range(rounds + 3):  # the planner measures in the first ones
            if turn == 3:
                share.clear()
                times = {name: [] for name in methods}
            for name, (call, trials) in methods.items():
                begun = now()
                for _ in range(1 if trials > 1 else 8):
                    call()
                times[name].append((now() - begun) / (trials if trials > 1 else 8))
    return "\n".join(_lines(subject, law, times, statistics.fmean(share)))


def _lines(subject: Subject, law: Law, times: dict[str, list[float]], share: float) -> Iterator[str]:
    yield f"\n{subject.name}: {law.title}; {100 * share:.0f} % of trials by CUDA graphs"
    yield f"{'':24}{'ms':>10}{'/ forward':>12}   quartiles"
    forward = times["eager forward pass"]
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, forward, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        yield f"{name:24}{1e3 * statistics.median(seconds):10.3f}{middle:12.3f}   {low:.3f} to {high:.3f}"


def main(rounds: int, device: str) -> None:
    """Tables of all subjects and laws."""
    torch.set_num_threads(1)
    for subject in SUBJECTS:
        tokens = subject.judge == "next-token"
        for law in (LAWS[0], *([] if tokens else [INPUTS]), LAWS[2]):
            try:
                print(measure(subject, law, max(rounds, 5), device), flush=True)
            except torch.OutOfMemoryError as error:
                print(f"\n{subject.name}: {law.title}: {error}", flush=True)


def campaigns(rounds: int, device: str) -> None:
    """Wall and CPU time of whole campaigns with both engines."""
    print(f"{'':16}{'engine':>8}{'trials':>8}{'wall s':>9}{'CPU s':>9}   canonical export")
    for name in CAMPAIGNS:
        exports: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            for engine in ("plain", "auto"):
                store = Path(folder) / f"{engine}.sqlite"
                report = _cli("pvf", name, "--device", device, "--trials", TRIALS, "--samples", "all",
                    "--engine", engine, "--jobs", 1, "--store", store, "--json")  # fmt: skip
                result: dict[str, Any] = json.loads(report)
                exports.append(_cli("export", store, "--canonical"))
                same = "" if engine == "plain" else "the same" if exports[0] == exports[1] else "DIFFERENT"
                print(
                    f"{name:16}{engine:>8}{result['trials_done']:8}{result['seconds']:9.1f}{result['cpu_seconds']:9.1f}   {same}",
                    flush=True,
                )


def _cli(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "unsilent", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout
