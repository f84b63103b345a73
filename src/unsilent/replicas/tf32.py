"""Whether CUDA's matrix products and convolutions may use TF32, set and put back.

By ``allow_tf32``, which programs read; where a program has used the newer ``fp32_precision``, reading it raises, and the newer
name is used here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAMES = {True: "tf32", False: "ieee"}


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
    cudnn: Any = torch.backends.cudnn
    before = [(part, part.fp32_precision) for part in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]
    for part, _ in before:
        part.fp32_precision = _NAMES[allowed]
    try:
        yield
    finally:
        for part, precision in before:
            part.fp32_precision = precision
