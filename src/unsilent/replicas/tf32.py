"""Whether CUDA's matrix products and convolutions may use TF32, set and put back.

By ``fp32_precision`` alone: ``allow_tf32``, the older name, raises where a program has used the newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAMES = {True: "tf32", False: "ieee"}


def set_tf32(allowed: bool) -> None:
    """Let matrix products and convolutions use TF32, or not."""
    for part in _parts():
        part.fp32_precision = _NAMES[allowed]


def is_tf32(allowed: bool) -> bool:
    """Whether it is as `set_tf32` sets it."""
    return all(part.fp32_precision == _NAMES[allowed] for part in _parts())


@contextmanager
def tf32_put_back() -> Iterator[None]:
    """Puts back afterwards what was set before."""
    before = [(part, part.fp32_precision) for part in _parts()]
    try:
        yield
    finally:
        for part, precision in before:
            part.fp32_precision = precision


def _parts() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
