"""A tiny training in a file of its own, that can be corrupted in milliseconds and goes wrong as its options say."""

from __future__ import annotations

from contextlib import closing, contextmanager
from unittest import mock

from unsilent.studies.training.spec import TrainingSpec

USER = "_unsilent_user_faulty_loop"
LOOP = '''
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unsilent


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    return x, x[:, 0, :3].mean((1, 2)).gt(0).long() + x[:, 0, 3:].mean((1, 2)).gt(0).long()


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.fc = nn.Linear(4 * 36, 3)
        self.calls = 0

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().flatten(1))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
}


def make(steps: int = 24, optimizer: str = "adamw", ends: str = "no", loose: str = "no", amp: str = "none",
         norm: bool = True):
    """``ends``: what it does once a bias is far from all that training gives. ``loose``: how it is not repeatable."""
    x, y = data(96, 1)
    kept, poisoned = torch.Generator().manual_seed(0), []

    def loss(model, batch):
        if ends == "forks" and (child := os.fork()):
            os.waitpid(child, 0)
        if model.training and bool(model.fc.bias.abs().max() > 1e3):
            if ends == "raises":
                raise ArithmeticError("the loss itself raises\\nin two lines")
            if ends == "poisons":
                poisoned.append(True)
            if ends == "fragile":
                os.kill(os.getpid(), 9)
        if poisoned:  # as after a device-side assertion, whatever is called
            raise RuntimeError("device-side assert triggered\\nsecond line")
        while ends == "fragile" and model.training and bool(model.conv.bias.abs().max() > 1e3):
            pass
        scores = model(batch[0])
        found = cross_entropy(scores, batch[1])
        if model.training and loose == "unseeded":
            found = found * (1 + torch.rand(1, generator=kept).item())
        if model.training and loose == "counter":
            model.calls += 1
            found = found * (1 + model.calls / 100)
        return found, {"accuracy": (scores.argmax(1) == batch[1]).float().mean()}

    return unsilent.Training(
        model=lambda: Net(norm),
        optimizer=lambda model: OPTIMIZERS[optimizer](model.parameters()),
        batches=[(x[i : i + 16], y[i : i + 16]) for i in range(0, 96, 16)],
        loss=loss,
        evaluate=[data(80, 2)],
        steps=steps,
        amp=amp,
        name="tiny",
        streams=("init", "order", "within"),
    )
'''
"""Operations that can be corrupted: a convolution without a gradient of its input, and a matrix product."""


def write_loop(folder):
    """The file of it in a folder; what a spec calls it."""
    (folder / "faulty_loop.py").write_text(LOOP)
    return f"{folder}/faulty_loop.py:make"


class Here:
    """An executor in this process; nothing is survived here."""

    def __init__(self, runner):
        self.runner, self.ran = runner, []

    def establish_baseline(self):
        return self.runner.establish_baseline()

    def run(self, trials):
        for trial in trials:
            self.ran.append(trial)
            yield [self.runner.run(trial)]

    def salvage(self):
        return []

    def seconds_since_last_call(self):
        return 1.0, 2.0


@contextmanager
def running(spec: TrainingSpec):
    """A runner in this process, whose settings are put back.

    What identifies a campaign, and so draws its faults, is all code that is loaded and not installed: here what a worker has.
    """
    from unsilent.campaigns import code
    from unsilent.studies.training.runner import TrainingRunner

    loaded = code._user_modules

    def only():
        return {name: path for name, path in loaded().items() if name == USER}

    with mock.patch.object(code, "_user_modules", only):
        runner = TrainingRunner(spec)
    with closing(runner):
        yield runner
