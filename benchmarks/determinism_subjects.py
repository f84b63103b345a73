"""What `determinism` measures: operations forward and backward, and training steps of whole models.

The six-layer network is ``MediumCNN`` of github.com/usyd-fsalab/NeuralNetworkRandomness, for images of 32 x 32 instead of
224 x 224: the sixth pooling, which would leave nothing, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsilent.workloads import load_training

KERNEL_SIZES = (1, 3, 5, 7)
TRAININGS = ("train-resnet", "train-vit", "train-chargpt", "train-dlrm")


class Subject(NamedTuple):
    """``call``: what is timed. ``outcome``: the tensors whose bits are compared; it starts from the same state each time."""

    call: Callable[[], object]
    outcome: Callable[[], Iterable[Tensor]]


Build = Callable[[str], Subject]
"""From the device a new subject, with nothing shared with others."""


# Operations.


def _forward(function: Callable[..., Tensor], *sizes: tuple[int, ...]) -> Build:
    def build(device: str) -> Subject:
        inputs = floats(device, sizes)
        return Subject(lambda: function(*inputs), lambda: [function(*inputs)])

    return build


def _backward(function: Callable[..., Tensor], *sizes: tuple[int, ...]) -> Build:
    """The gradients of all inputs; the forward pass is done beforehand."""

    def build(device: str) -> Subject:
        inputs = [x.requires_grad_() for x in floats(device, sizes)]
        out = function(*inputs)
        (grad,) = floats(device, [tuple(out.shape)])

        def call() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        return Subject(call, call)

    return build


def floats(device: str, sizes: Iterable[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


def _indices(like: Tensor, shape: tuple[int, ...], below: int, seed: int = 1) -> Tensor:
    """Whole numbers below a limit, the same at every call."""
    key = (str(like.device), shape, below, seed)
    if key not in _drawn:
        generator = torch.Generator().manual_seed(seed)
        _drawn[key] = torch.randint(below, shape, generator=generator).to(like.device)
    return _drawn[key]


_drawn: dict[object, Tensor] = {}
ROWS, WIDTH, PICKED, CELLS = 1000, 64, 2**14, 2**18
"""Of the table that indexing works on, and how many rows or single cells it picks (each row about 16 times, each cell 4)."""


def picked_rows(table: Tensor) -> Tensor:
    return _indices(table, (PICKED,), ROWS)


def _spread(table: Tensor) -> Tensor:
    return picked_rows(table)[:, None].expand(-1, WIDTH)


def _cells(table: Tensor) -> tuple[Tensor, Tensor]:
    return _indices(table, (CELLS,), ROWS), _indices(table, (CELLS,), WIDTH, seed=2)


def _order(table: Tensor) -> Tensor:
    return _indices(table, (ROWS,), 2**40).argsort()


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _unpooled(x: Tensor) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


def operations() -> dict[str, Build]:
    """By name."""
    found: dict[str, Build] = {}
    for k in KERNEL_SIZES:

        def convolved(x: Tensor, weight: Tensor, padding: int = k // 2) -> Tensor:
            return F.conv2d(x, weight, padding=padding)

        for way, make in (("forward", _forward), ("backward", _backward)):
            found[f"convolution {k} x {k}, {way}"] = make(convolved, (16, 32, 32, 32), (32, 32, k, k))
    image, table, picked = (32, 32, 32, 32), (ROWS, WIDTH), (PICKED, WIDTH)
    for way, make in (("forward", _forward), ("backward", _backward)):
        found |= {
            f"matmul 512, {way}": make(torch.matmul, (512, 512), (512, 512)),
            f"batch norm, {way}": make(_normed, image, (32,), (32,)),
            f"max pool 2 x 2, {way}": make(lambda x: F.max_pool2d(x, 2), image),
            f"adaptive average pool, {way}": make(lambda x: F.adaptive_avg_pool2d(x, 4), image),
            f"bilinear upsampling, {way}": make(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image),
            f"cross entropy, {way}": make(lambda x: F.cross_entropy(x, _indices(x, (8192,), 64)), (8192, 64)),
            f"embedding, {way}": make(lambda w: F.embedding(picked_rows(w), w), table),
            f"gather, {way}": make(lambda w: w.gather(0, _spread(w)), table),
            f"index_select, {way}": make(lambda w: w.index_select(0, picked_rows(w)), table),
            f"w[rows], {way}": make(lambda w: w[picked_rows(w)], table),
            f"w[rows, columns], {way}": make(lambda w: w[_cells(w)], table),
        }
    return found | {
        "cumsum": _forward(lambda x: x.cumsum(0), picked),
        "index_put(accumulate)": _forward(
            lambda w, v: w.index_put((picked_rows(w),), v, accumulate=True), table, picked
        ),
        "put(accumulate)": _forward(
            lambda w, v: w.put(_indices(w, (CELLS,), ROWS), v, accumulate=True), table, (CELLS,)
        ),
        "index_add": _forward(lambda w, v: w.index_add(0, picked_rows(w), v), table, picked),
        "index_copy": _forward(lambda w, v: w.index_copy(0, _order(w), v), table, table),
        "scatter_add": _forward(lambda w, v: w.scatter_add(0, _spread(w), v), table, picked),
        "scatter_reduce(sum)": _forward(lambda w, v: w.scatter_reduce(0, _spread(w), v, "sum"), table, picked),
        "max unpool": _forward(_unpooled, image),
        "empty, 4 MiB, then zero_": _forward(lambda x: torch.empty(2**20, device=x.device).zero_(), (1,)),
    }


# Models.


def six_layers(size: int) -> Build:
    """A training step of the published network with Adam; 128 images as published on a GPU, 32 on a CPU."""

    def build(device: str) -> Subject:
        (images,) = floats(device, [(32 if device == "cpu" else 128, 3, 32, 32)])
        labels = _indices(images, (len(images),), 1000)

        def start() -> Callable[[], nn.Module]:
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for i, (a, b) in enumerate(((3, 16), (16, 32), (32, 64), (64, 128), (128, 256), (256, 512))):
                layers += [nn.Conv2d(a, b, size, padding=size // 2), nn.BatchNorm2d(b), nn.ReLU()]
                layers += [nn.MaxPool2d(2)] if i < 5 else []
            model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).to(device)
            optimizer = torch.optim.Adam(model.parameters())

            def step() -> nn.Module:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                return model

            return step

        return _trained(start)

    return build


def training(name: str) -> Build:
    """A step of a built-in training."""

    def build(device: str) -> Subject:
        workload = load_training(name, {"device": device})

        def start() -> Callable[[], nn.Module]:
            state = workload.start(0)

            def step() -> nn.Module:
                workload.step(state)
                return state.model

            return step

        return _trained(start)

    return build


def _trained(start: Callable[[], Callable[[], nn.Module]]) -> Subject:
    """``start`` begins a training and gives its step; the outcome is the weights after three steps."""

    def outcome() -> list[Tensor]:
        step = start()
        return list([step() for _ in range(3)][-1].parameters())

    return Subject(start(), outcome)


def models() -> dict[str, Build]:
    """By name."""
    found = {name: training(name) for name in TRAININGS}
    return found | {f"six layers, {k} x {k}": six_layers(k) for k in KERNEL_SIZES}
