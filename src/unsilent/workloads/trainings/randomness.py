"""Random numbers that depend only on the seed, the stream and the step or epoch.

The caller's generators are left unchanged. The user's code may draw from the global generators of torch, numpy or
Python. All three are seeded before each part of a step: building the model from ``init``, a batch from ``order`` and
``augment``, the forward pass from ``dropout``.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unsilent.basics.errors import UsageError
from unsilent.workloads.process_side_effects import contain_user_process
from unsilent.workloads.trainings.base import STREAMS, Seeds

DATA = "data"
"""Stream for making the data: its random numbers are the same for all seeds, so data are not a source of randomness."""
_ALL = (*STREAMS, DATA)


GLOBALS, FETCHED = 1, 2
"""Numbers of the generators of a stream with several at one step: global generators, generators of a data set."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SMALL = 2**32
"""Smaller seeds take one word of entropy; larger seeds would collide with the words after them."""


def stream_seed(seeds: Seeds, stream: str, *at: int) -> int:
    """The 63-bit seed of a stream.

    ``at``: the step or epoch, and the number of a generator if the stream has several.
    """
    seed = 0 if stream == DATA else getattr(seeds, stream)
    if seed >= _SMALL:
        text = repr((seed, stream, *at)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
    return int(np.random.SeedSequence([seed, _ALL.index(stream), *at]).generate_state(1, np.uint64)[0] >> 1)


def seed_globals(seed: int) -> None:
    """Seed the global generators of torch (with CUDA if it is in use), numpy and Python."""
    # Not torch.manual_seed: it would initialise unused accelerators.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def global_generators() -> list[Any]:
    """The global generators of torch, numpy, Python and the current CUDA device."""
    devices = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
    return [torch.default_generator, *devices, np.random.mtrand._rand, random._inst]


def save_generator_states(others: Sequence[Any] = ()) -> Callable[[], None]:
    """Save the states of all global generators and of ``others``; the returned function restores them.

    Raises:
        UsageError: a generator whose state cannot be read.
    """
    everywhere = (torch.default_generator, np.random.mtrand._rand, random._inst)
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    states = [(generator, generator_state(generator)) for generator in (*everywhere, *devices, *others)]

    def put_back() -> None:
        for generator, state in states:
            set_generator_state(generator, state)

    return put_back


def generator_state(generator: Any) -> Any:
    """The state of a generator of torch, numpy or Python.

    `set_generator_state` restores it.

    Raises:
        UsageError: the state of the generator cannot be restored, for example of ``random.SystemRandom``.
    """
    try:
        if isinstance(generator, np.random.Generator):
            return copy.deepcopy(generator.bit_generator.state)
        if isinstance(generator, random.Random):
            return generator.getstate()
        return generator.get_state()
    except (NotImplementedError, AttributeError):
        raise UsageError(
            f"the state of the random generator {type(generator).__module__}.{type(generator).__name__} cannot be saved and "
            "restored; use one of torch.Generator, numpy.random.Generator or random.Random"
        ) from None


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state that `generator_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def isolated_randomness() -> Iterator[None]:
    """Context with gradients that restores the global generators, thread count and gradient mode."""
    put_back = save_generator_states()
    try:
        with torch.inference_mode(False), torch.enable_grad(), contain_user_process():
            yield
    finally:
        put_back()
