"""Streams of random numbers that follow from (seed, stream, step or epoch) alone, and the caller's generators left as they were.

Code of the user's own may draw from torch's, numpy's or Python's global generators. All three are seeded before each part of
a step: building the model from ``init``, a batch from ``order`` and ``augment``, the forward pass from ``dropout``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from unsilent.workloads.process import watched_process
from unsilent.workloads.trainings.base import STREAMS, Seeds

DATA = "data"
"""Data are no source of randomness: what is drawn while they are made is the same for all seeds."""
_ALL = (*STREAMS, DATA)


GLOBALS, FETCHED = 1, 2
"""Which generator of a stream, where it has several at one step: torch's global ones in augmentation, those of a data set."""
_SMALL = 2**32
"""Seeds below are one word of entropy; larger ones would run into the words behind them."""


def derived(seeds: Seeds, stream: str, *at: int) -> int:
    """The seed (63 bits) of a stream at a step or epoch, and of which of its generators."""
    seed = 0 if stream == DATA else getattr(seeds, stream)
    if seed >= _SMALL:
        text = repr((seed, stream, *at)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
    return int(np.random.SeedSequence([seed, _ALL.index(stream), *at]).generate_state(1, np.uint64)[0] >> 1)


def seed_globals(seed: int) -> None:
    """Seed torch's global generators (those of CUDA if it is in use), numpy's and Python's."""
    # Not torch.manual_seed: it would start up accelerators that nobody uses.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def held_generators() -> Callable[[], None]:
    """The state of all global generators; calling what is given puts it back."""
    own, numpys, pythons = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        torch.random.set_rng_state(own)
        np.random.set_state(numpys)
        random.setstate(pythons)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return put_back


@contextmanager
def apart() -> Iterator[None]:
    """Gradients on inside; the caller's global generators, thread count and gradient mode back afterwards."""
    put_back = held_generators()
    try:
        with torch.inference_mode(False), torch.enable_grad(), watched_process():
            yield
    finally:
        put_back()
