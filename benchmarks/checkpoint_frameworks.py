"""``python -m benchmarks.checkpoint_frameworks [--pairs N]``: the same faults in checkpoints of PyTorch and Keras.

One small CNN on the digits, with the same initial weights, batches and Adam, is trained to a step in PyTorch and in Keras (its
torch backend), and saved with ``torch.save`` and as a ``.keras`` file. In each pair, faults are drawn in a copy of the PyTorch
file and replayed in a copy of the Keras file: the same bits of the same elements, whose axes Keras stores in another order, or
with ``--equivalent layer`` the same bits of random elements of the same tensor, as hdf5_corrupter replays an injection without
indices. Both are resumed. A resume is harmful if it ends with more than 2 points less of held-out accuracy than the clean resume
of its framework, or with a loss that is not finite. Where a score is not finite, no answer counts as right. Differences are
PyTorch minus Keras, intervals are at 95 %.

Needs keras (3.15 was used) and ``unsilent[hdf5]``. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from unsilent.checkpoints.corrupting import corrupt, replay
from unsilent.checkpoints.drawing import DrawOptions
from unsilent.statistics.comparing import paired
from unsilent.statistics.intervals import clopper_pearson
from unsilent.workloads.digits import digits

os.environ["KERAS_BACKEND"] = "torch"

SECTIONS = {"weights": "model/*", "first moment": "optimizer/*/exp_avg", "second moment": "optimizer/*/exp_avg_sq"}
FLIPS = (1, 10, 100, 1000)
SAVED, END = 84, 168
"""Steps of 64 images: 4 and 8 epochs."""
BATCH, RATE, EPSILON, GAP = 64, 2e-3, 1e-7, 0.02
LAYERS = {"conv1": "conv2d", "conv2": "conv2d_1", "fc1": "dense", "fc2": "dense_1"}
"""What the layers are called in PyTorch, and in a ``.keras`` file: there by their class and number."""
AXES = {"conv": (2, 3, 1, 0), "fc": (1, 0)}
"""Where Keras has the axes of a PyTorch weight: [out, in, h, w] as [h, w, in, out], and [out, in] as [in, out]."""


class Ending(NamedTuple):
    """Held-out accuracy, held-out loss (mean cross-entropy), and all weights in PyTorch's order of axes, float32[n]."""

    accuracy: float
    loss: float
    weights: Any


class Cnn(nn.Module):
    """Images [n, 1, 8, 8] -> scores [n, 10]; flattened in Keras's order: height, width, channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.fc1, self.fc2 = nn.Linear(144, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        return self.fc2(functional.relu(self.fc1(x.permute(0, 2, 3, 1).flatten(1))))  # type: ignore[no-any-return]


def batches(begin: int, end: int) -> Iterator[torch.Tensor]:
    """The images of each step: those of an epoch in an order that depends on the epoch alone."""
    steps = len(digits().train) // BATCH
    for step in range(begin, end):
        order = np.random.default_rng(step // steps).permutation(len(digits().train))
        yield torch.from_numpy(order[step % steps * BATCH :][:BATCH])


def ending(scores: torch.Tensor, weights: Sequence[torch.Tensor]) -> Ending:
    """What a training ended with."""
    labels = digits().test_labels
    accuracy = (scores.argmax(1) == labels).double().mean().item() if scores.isfinite().all() else 0.0
    flat = torch.cat([weight.detach().reshape(-1) for weight in weights])
    return Ending(accuracy, functional.cross_entropy(scores, labels).item(), flat.numpy().copy())


class PyTorch:
    """The cell in PyTorch."""

    suffix = ".pt"

    def __init__(self, path: Path | None = None) -> None:
        torch.manual_seed(0)
        self.model = Cnn()
        self.optimizer = torch.optim.Adam(self.model.parameters(), RATE, eps=EPSILON)
        if path:
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    def train(self, begin: int, end: int) -> PyTorch:
        data = digits()
        for rows in batches(begin, end):
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(data.train[rows]), data.train_labels[rows]).backward()
            self.optimizer.step()
        return self

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def ending(self) -> Ending:
        with torch.no_grad():
            return ending(self.model(digits().test), list(self.model.parameters()))


class Keras:
    """The cell in Keras: the functional model, as its users write it, on images with the channels last."""

    suffix = ".keras"

    def __init__(self, path: Path | None = None) -> None:
        import keras
        from keras import layers

        if path:
            self.model = keras.saving.load_model(path)
            return
        self.model = keras.Sequential([
            keras.Input((8, 8, 1)), layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, strides=2, activation="relu"), layers.Flatten(),
            layers.Dense(32, activation="relu"), layers.Dense(10),
        ])  # fmt: skip
        for variable, (name, tensor) in zip(self.model.weights, PyTorch().model.named_parameters(), strict=True):
            variable.assign(tensor.detach().permute(axes_of(name, tensor.dim())))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.Adam(RATE, epsilon=EPSILON), loss)

    def train(self, begin: int, end: int) -> Keras:
        data = digits()
        for rows in batches(begin, end):
            self.model.train_on_batch(data.train[rows].permute(0, 2, 3, 1), data.train_labels[rows])
        return self

    def save(self, path: Path) -> None:
        self.model.save(path)

    def ending(self) -> Ending:
        names = [name for name, _ in Cnn().named_parameters()]
        pairs = [
            (variable.value, axes_of(name, variable.ndim))
            for name, variable in zip(names, self.model.weights, strict=True)
        ]
        with torch.no_grad():
            scores = self.model(digits().test.permute(0, 2, 3, 1))
        return ending(scores, [value.permute(np.argsort(axes).tolist()) for value, axes in pairs])


FRAMEWORKS = (PyTorch, Keras)


def axes_of(name: str, dimensions: int) -> tuple[int, ...]:
    """Where Keras has the axes of a parameter of PyTorch."""
    return AXES[name.partition(".")[0][:-1]] if dimensions > 1 else (0,)


def equivalents() -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Names of the PyTorch file -> names of the Keras file, and -> the order of the axes there.

    Keras numbers the state of its optimizer: iteration, learning rate, then both moments of every weight.
    """
    names, axes = {}, {}
    for number, (name, tensor) in enumerate(Cnn().named_parameters()):
        layer, _, kind = name.partition(".")
        names[f"model/{name}"] = f"model/{LAYERS[layer]}/vars/{int(kind == 'bias')}"
        for place, moment in enumerate(("exp_avg", "exp_avg_sq")):
            names[f"optimizer/{name}/{moment}"] = f"optimizer/vars/{2 + 2 * number + place}"
        axes |= dict.fromkeys((f"model/{name}", f"optimizer/{name}"), axes_of(name, tensor.dim()))
    return names, axes


class Pair(NamedTuple):
    """How the resumes of one injection ended."""

    section: str
    flips: int
    pytorch: Ending
    keras: Ending


def altered(folder: Path, section: str, flips: int, seed: int, equivalent: str) -> tuple[Path, Path]:
    """Copies of both clean checkpoints with the same faults; ``equivalent``: see the module."""
    first, second = (Path(shutil.copy(folder / f"clean{f.suffix}", folder / f"altered{f.suffix}")) for f in FRAMEWORKS)
    for path in (first, second):
        path.with_name(f"{path.name}.undo.jsonl").unlink(missing_ok=True)
    made = corrupt(
        first, [SECTIONS[section]], fault=f"bitflip:count={flips}", options=DrawOptions(seed=seed), crc="fixed"
    )
    (names, axes), saved = equivalents(), folder / "made.json"
    if equivalent == "element":
        saved.write_text(json.dumps(made.injection))
        replay(second, saved, names=names, axes=axes, crc="fixed")
        return first, second
    sequence = {}  # as hdf5_corrupter saves it with no index; it counts bits from the sign
    for fault in (hit.fault for hit in made.receipt.applied_faults):
        words = fault.operands.tolist()
        bits = [[31 - bit for bit in range(32) if word >> bit & 1] for word in words]
        sequence["/" + names[fault.site.removeprefix("file:")]] = [[[], each] for each in bits]
    saved.write_text(json.dumps(sequence))
    replay(second, saved, seed=10**6 + seed, crc="fixed")
    return first, second


def measure(pairs: int, folder: Path, equivalent: str = "element") -> Iterator[Pair]:
    """The clean resumes as a pair of 0 flips, then so many pairs for each section and number of flips."""

    def resume(framework: type[PyTorch] | type[Keras], path: Path) -> Ending:
        return framework(path).train(SAVED, END).ending()

    files = [folder / f"clean{framework.suffix}" for framework in FRAMEWORKS]
    for framework, path in zip(FRAMEWORKS, files, strict=True):
        framework().train(0, SAVED).save(path)
    clean = [resume(framework, path) for framework, path in zip(FRAMEWORKS, files, strict=True)]
    yield Pair("clean", 0, *clean)
    for section in SECTIONS:
        for flips in FLIPS:
            for number in range(pairs):
                paths = altered(folder, section, flips, number, equivalent)
                yield Pair(section, flips, *map(resume, FRAMEWORKS, paths))
    for first, again in zip(clean, map(resume, FRAMEWORKS, files), strict=True):
        if first.weights.tobytes() != again.weights.tobytes():
            raise RuntimeError("a clean resume did not repeat bit for bit")


def is_harmful(end: Ending, clean: Ending) -> bool:
    """Whether a resume is harmful; see the module."""
    return clean.accuracy - end.accuracy > GAP or not np.isfinite(end.loss)


def row(name: str, pairs: Sequence[Pair], clean: Pair) -> str:
    """The table's row of some pairs."""
    sides = [([p.pytorch for p in pairs], clean.pytorch), ([p.keras for p in pairs], clean.keras)]
    lost = [np.array([own.accuracy - end.accuracy for end in ends]) for ends, own in sides]
    change = [np.array([end.loss - own.loss for end in ends]) for ends, own in sides]
    harmful = [np.array([is_harmful(end, own) for end in ends]) for ends, own in sides]
    shares = [clopper_pearson(int(each.sum()), len(pairs)) for each in (*harmful, harmful[0] == harmful[1])]
    differences = [paired(x.astype(float) - y) for x, y in (harmful, lost)]
    cells = [f"{x.estimate:.1%} [{x.low:.1%}, {x.high:.1%}]" for x in shares]
    cells += [f"{100 * (x.estimate or 0):+.1f} [{100 * x.low:+.1f}, {100 * x.high:+.1f}]" for x in differences]
    cells.append(" / ".join(f"{np.median(np.where(np.isnan(each), np.inf, each)):+.2g}" for each in change))
    return f"| {name} | {len(pairs)} | {' | '.join(cells)} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_frameworks", description=__doc__)
    parser.add_argument("--pairs", type=int, default=50, help="for each section and number of flips")
    parser.add_argument("--equivalent", choices=("element", "layer"), default="element")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        clean, *pairs = measure(asked.pairs, Path(folder), asked.equivalent)
    for name, end in (("PyTorch", clean.pytorch), ("Keras", clean.keras)):
        print(f"clean resume, {name}: accuracy {end.accuracy:.4f}, loss {end.loss:.5f}")
    for step in (1, SAVED, END):
        first, second = (framework().train(0, step).ending().weights for framework in FRAMEWORKS)
        apart = np.linalg.norm(first - second) / np.linalg.norm(second)
        print(f"clean weights after {step} steps: {apart:.5f} apart (relative L2)")
    print("| section | flips | pairs | harmful, PyTorch | harmful, Keras | same verdict | harmful, difference, points "
          "| lost accuracy, difference, points | median change of loss |")  # fmt: skip
    print("|" + "---|" * 9)
    for section in SECTIONS:
        own = [pair for pair in pairs if pair.section == section]
        for flips in FLIPS:
            print(row(f"{section} | {flips}", [pair for pair in own if pair.flips == flips], clean))
        print(row(f"{section} | all", own, clean))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
