"""What a plain trial costs beside one forward: ResNet-18 shape, batch 64, one thread, with peers beside it.

A trial of ours is the whole of it: draw, inject with verification, forward, judge all samples, undo with proof, make the
row. Run: ``python -m benchmarks plain_trial [--device cuda] [--rounds N]``.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

import unsilent
from benchmarks import peers
from benchmarks.models import calibrated
from benchmarks.timing import Figure, interleave, table
from unsilent.campaigns.spec import TrialId
from unsilent.faults import fault_model
from unsilent.sites import Parameters
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec


def trial_cost(stem: str, rounds: int, device: str) -> dict[str, Figure]:
    """Figures of one model shape."""
    model, x = calibrated(stem)
    # One component: faults uniform over weights for everyone, since a fault near the input slows the forward itself down.
    workload = unsilent.Workload(model, [x], components={"all": "*"})
    runner = TrialRunner(PvfSpec("bench", device=device, at=("param:*.weight",)), workload)
    model, x = runner.engine.model, runner.engine.batches[0]
    trials = (TrialId(name, 1, k) for k in itertools.count() for name in runner.targets)

    def synchronised(run):  # type: ignore[no-untyped-def]
        def call() -> None:
            run()
            if device != "cpu":
                torch.cuda.synchronize()

        return call

    methods = {
        "forward": synchronised(lambda: model(x)),
        "hand: flip, run, flip back": synchronised(peers.hand(model, x)),
        "Unsilent trial": lambda: runner.run(next(trials)),
    }
    if device == "cpu" and peers.available():
        copies = [calibrated(stem) for _ in range(3)]
        methods["PyTorchFI 0.6.0 weight flip"] = peers.pytorchfi(*copies[0])
        methods["MRFI 2.1.0 weight flip, 1 layer"] = peers.mrfi(*copies[1], "layers.2.0.conv1")
        methods["MRFI 2.1.0 weight flip, all layers"] = peers.mrfi(*copies[2], "all")
    with torch.no_grad():
        return interleave(methods, rounds)


def injection_cost(rounds: int, device: str) -> dict[str, Figure]:
    """Draw, apply and undo (each verified) on the 11.2 M weights, without a forward."""
    model, _ = calibrated("light")
    parameters = Parameters(model.to(device))
    regions = parameters.select("param:*")
    rng = np.random.default_rng(0)

    def inject(text: str):  # type: ignore[no-untyped-def]
        fault = fault_model(text)

        def call() -> None:
            with parameters.inject(fault.draw(regions, rng)):
                pass

        return call

    texts = ["bitflip", "bitflip:rate=1e-6", "bitflip:count=128", "burst:length=2", "zero:run=16"]
    return interleave({text: inject(text) for text in texts}, rounds, calls=20)


def main(rounds: int, device: str) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    for stem, times in (("light", 3), ("cifar", 1)):
        figures = trial_cost(stem, rounds * times, device)
        print(table(f"\nResNet-18, {stem} stem, batch 64, {device}, {rounds * times} rounds", figures))
    size = sum(p.numel() for p in calibrated("light")[0].parameters())
    print(table(f"\nDraw + apply + undo on {size / 1e6:.1f} M weights, {device}", injection_cost(rounds, device)))
