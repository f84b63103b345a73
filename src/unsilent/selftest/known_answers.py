"""Operations on whole numbers whose exact results do not depend on the dtype or the order of a sum.

The expected results are computed in 64-bit integers by numpy, which uses none of the arithmetic that is tested. No sum or
partial sum has more bits than the dtype's significand:

    gemm         a row of A times a column of B: of `depth` products of numbers up to m, depth * m^2 <= 2^p
    convolution  the same; its stride is 2, for which no library transforms the input (Winograd, FFT), which would round
    attention    queries have the score 0 with four keys and -2048 with all others, with weight exactly 0: the mean of four rows
    reduction    the sum of each row
    optimizer    one step of AdamW with moments of 1/2 and 1/4 of powers that cancel: p/2 - sign(g), g/2 and g^2/4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from unsilent.engine.device_placement import DTYPES
from unsilent.selftest.mismatch import Mismatch, mismatch

Ints = NDArray[np.int64]
Place = Callable[[Ints], Tensor]
"""Function that copies integers to the device, in the tested dtype."""
PRECISION = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Bits of the significand of each dtype."""
GROUP = 4
"""Number of keys that a query attends to."""


@dataclass(frozen=True)
class KnownAnswer:
    """An operation in one dtype with its expected result.

    Results are compared on the CPU.
    """

    operation: str
    dtype: str
    run: Callable[[], Tensor]
    expected: Tensor

    def execute(self) -> Mismatch | None:
        """Execute the operation and compare its result; None if every element is right."""
        got = self.run().cpu()
        wrong = torch.ne(got, self.expected)
        return mismatch(self.operation, got, self.expected, wrong) if bool(wrong.any()) else None


def known_answers(device: str) -> tuple[list[KnownAnswer], list[str]]:
    """All operations in all dtypes of a device, and the names of those that torch does not implement on it."""
    tests, missing = [], []
    side = 256 if torch.device(device).type == "cpu" else 2048  # enough for every multiprocessor of a GPU
    for name, dtype in DTYPES.items():
        for operation, make in OPERATIONS.items():
            run, answer = make(_placer(device, dtype), PRECISION[name], side, np.random.default_rng(0))
            try:
                run()
            except RuntimeError as error:
                if "not implemented" not in str(error) and not isinstance(error, NotImplementedError):
                    raise
                missing.append(f"{operation} in {name}")
                continue
            tests.append(KnownAnswer(operation, name, run, torch.from_numpy(answer).to(dtype)))
    return tests, missing


def _placer(device: str, dtype: torch.dtype) -> Place:
    return lambda numbers: torch.from_numpy(numbers).to(device, dtype)


def _draw(rng: np.random.Generator, most: int, *shape: int) -> Ints:
    return rng.integers(-most, most, shape, endpoint=True)


def _gemm(place: Place, p: int, side: int, rng: np.random.Generator) -> tuple[Callable[[], Tensor], Ints]:
    depth = min(256, 2 ** (p // 2))
    most = int((2**p / depth) ** 0.5)
    first, second = _draw(rng, most, side, depth), _draw(rng, most, depth, side)
    a, b = place(first), place(second)
    return lambda: a @ b, first @ second


def _convolution(place: Place, p: int, side: int, rng: np.random.Generator) -> tuple[Callable[[], Tensor], Ints]:
    channels, kernel = 8, 3
    most = int((2**p / (channels * kernel**2)) ** 0.5)
    images, weights = _draw(rng, most, side // 64, channels, 33, 33), _draw(rng, most, 16, channels, kernel, kernel)
    x, w = place(images), place(weights)
    windows = np.lib.stride_tricks.sliding_window_view(images, (kernel, kernel), (2, 3))[:, :, ::2, ::2]
    return lambda: functional.conv2d(x, w, stride=2), np.einsum("nchwij,kcij->nkhw", windows, weights)


def _attention(place: Place, p: int, side: int, rng: np.random.Generator) -> tuple[Callable[[], Tensor], Ints]:
    length, width = 64, 64
    groups = length // GROUP
    # For each query and for each key.
    query_groups, key_groups = (rng.permutation(length) // GROUP, rng.permutation(length) // GROUP)
    query, key = np.zeros((2, length, width), np.int64)
    query[:, :groups] = -128 * (query_groups[:, None] != np.arange(groups))
    key[:, :groups] = 128 * (key_groups[:, None] == np.arange(groups))
    values = _draw(rng, 2 ** (p - 2), side // 64, length, width)  # a sum of at most four
    q, k, v = (place(np.broadcast_to(numbers, values.shape).copy()) for numbers in (query, key, GROUP * values))
    chosen = (query_groups[:, None] == key_groups).astype(np.int64)
    return lambda: functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0], chosen @ values


def _reduction(place: Place, p: int, side: int, rng: np.random.Generator) -> tuple[Callable[[], Tensor], Ints]:
    length = min(4096, 2 ** (p - 1))
    numbers = _draw(rng, 2**p // length, side, length)
    x = place(numbers)
    return lambda: x.sum(-1), numbers.sum(-1)


def _optimizer(place: Place, p: int, side: int, rng: np.random.Generator) -> tuple[Callable[[], Tensor], Ints]:
    before, gradient = 2 * _draw(rng, 2 ** (p - 1) - 1, side**2), 2 * _draw(rng, 2 ** (p // 2 - 2), side**2) + 1
    x, g = place(before), place(2 * gradient)

    def step() -> Tensor:
        parameter = torch.nn.Parameter(x.clone())
        parameter.grad = g
        optimizer = torch.optim.AdamW([parameter], lr=1.0, betas=(0.5, 0.75), eps=0.0, weight_decay=0.5)
        optimizer.step()
        state = optimizer.state[parameter]
        return torch.stack([parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])

    return step, np.stack([before // 2 - np.sign(gradient), gradient, gradient**2])


OPERATIONS = {
    "gemm": _gemm,
    "convolution": _convolution,
    "attention": _attention,
    "reduction": _reduction,
    "optimizer": _optimizer,
}
