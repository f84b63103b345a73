"""What a faulty training run step costs, and that all others cost what they did.

In every round each kind of step runs once, in shuffled order: a plain step, a plain step of a loop that was corrupted before, and
steps with a fault. On a GPU the time is that of the wall, with the device waited for.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import interleave, table
from unsilent.faults import fault_model
from unsilent.faults.hardware.presets import preset
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection
from unsilent.workloads import load_training
from unsilent.workloads.cifar_resnet import CifarResNet


class Running(NamedTuple):
    """A training that has begun."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], object]


class Loop(NamedTuple):
    """A model with its batch; ``layer``: a site of the middle of it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    layer: str

    def start(self, device: str) -> Running:
        """A copy of its own, so that what one leaves behind slows no other."""
        model = copy.deepcopy(self.model).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters())
        inputs, targets = self.inputs.to(device), self.targets.to(device)

        def step() -> None:
            optimizer.zero_grad()
            out = model(inputs)
            F.cross_entropy(out.flatten(0, -2), targets.flatten()).backward()
            optimizer.step()

        return Running(model, [optimizer], step)


class BuiltIn(NamedTuple):
    """A built-in training."""

    name: str
    layer: str

    def start(self, device: str) -> Running:
        """A state of its own."""
        training = load_training(self.name, {"device": device})
        state = training.start(0)
        return Running(state.model, list(state.optimizers), lambda: training.step(state))


def small_cnn() -> Loop:
    """Three convolutions with batch norm on 64 images of 16 x 16."""
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Loop(model, torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,)), "op:3#convolution.0")


def resnet20() -> Loop:
    """The CIFAR ResNet-20 on 32 images."""
    return Loop(
        CifarResNet(20), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)), "op:layer2.0.conv2#convolution.0"
    )


def transformer() -> Loop:
    """Four encoder layers of width 128 on 16 sequences of 64 tokens."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(64, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 64)
    )
    return Loop(model, torch.randint(0, 64, (16, 64)), torch.randint(0, 64, (16, 64)), "op:1.layers.2.linear1#addmm.0")


BUILT_IN = (
    BuiltIn("train-resnet", "op:block2.conv1#convolution.0"),
    BuiltIn("train-chargpt", "op:blocks.1.mlp.0#addmm.0"),
    BuiltIn("train-vit", "op:blocks.1.mlp.0#addmm.0"),
)


def main(rounds: int, device: str = "cpu") -> None:
    """Print a table for each model."""
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else _waited
    loops: dict[str, Callable[[], Loop | BuiltIn]] = {
        "small CNN": small_cnn,
        "cifar-resnet20": resnet20,
        "transformer": transformer,
        **{site.name: partial(BuiltIn, *site) for site in BUILT_IN},
    }
    for name, make in loops.items():
        torch.manual_seed(0)
        figures = interleave(_steps(make(), device), rounds * 3, clock=clock)
        print("\n" + table(f"{name}: a training step ({device})", figures))


def _waited() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _steps(loop: Loop | BuiltIn, device: str) -> dict[str, Callable[[], object]]:
    """The kinds of step by name, plain first."""

    def trained(corrupted: bool, *faults: UnresolvedFault) -> Callable[[], object]:
        torch.manual_seed(1)
        model, optimizers, step = loop.start(device)
        if corrupted and not faults:
            with StepInjection(
                model, [UnresolvedFault(f"{loop.layer}/grad_wt/out", fault_model("bitflip"))], optimizers
            ):
                step()
            return step

        def call() -> None:
            with StepInjection(model, faults, optimizers) if corrupted else nullcontext():
                step()

        return call

    at, flip = loop.layer, fault_model("bitflip")
    parameter = f"{at.removeprefix('op:').partition('#')[0]}.weight"
    return {
        "plain": trained(False),
        "plain, after a corrupted one": trained(True),
        "forward output": trained(True, UnresolvedFault(f"{at}/fwd/out", flip)),
        "weight gradient": trained(True, UnresolvedFault(f"{at}/grad_wt/out", flip)),
        "operand of the weight gradient": trained(True, UnresolvedFault(f"{at}/grad_wt/first", flip)),
        "operand of the input gradient": trained(True, UnresolvedFault(f"{at}/grad_in/second", flip)),
        "INPUT_16, forward": trained(True, preset("INPUT_16").fault_at_operation(at, "fwd")),
        "N16_RD, input gradient": trained(True, preset("N16_RD").fault_at_operation(at, "grad_in")),
        "activation kept for the backward": trained(
            True, UnresolvedFault(f"{at.replace('op:', 'saved:')}/first", flip)
        ),
        "operation of the update": trained(True, UnresolvedFault(f"op:{parameter}#addcdiv.0/optim/out", flip)),
        "parameter": trained(True, UnresolvedFault(f"param:{parameter}", flip)),
        "gradient": trained(True, UnresolvedFault(f"gradient:{parameter}", flip)),
    }
