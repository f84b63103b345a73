"""Whether CUDA's matrix products and convolutions may use TF32, set and put back.

By ``allow_tf32``, which programs read; where a program has used the newer ``fp32_precision``, reading it raises, and the newer
name is used here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PRECISIONS = {True: "tf32", False: "ieee"}
"""Values of ``fp32_precision``, by whether TF32 may be used."""


def parts_with_precision() -> tuple[Any, ...]:
    """Return the parts of torch whose ``fp32_precision`` decides on TF32."""
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


@contextmanager
def tf32_set(allowed: bool) -> Iterator[None]:
    """Let matrix products and convolutions use TF32, or not; what was set before is put back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        with _by_precision(allowed):
            yield
        return
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def _by_precision(allowed: bool) -> Iterator[None]:
    before = [(part, part.fp32_precision) for part in parts_with_precision()]
    for part, _ in before:
        part.fp32_precision = PRECISIONS[allowed]
    try:
        yield
    finally:
        for part, precision in before:
            part.fp32_precision = precision
