"""Watches, varies or pins the sources of difference between runs, before the user's file is read.

Every function that reads a source is replaced by a `CallerProbe`, which notes the user's line that called it. If the source is
not pinned, the probe returns the real value, with two exceptions in which two real runs may also differ: folders are listed in
another order, and the clock of each further run is more than a day later.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import xxhash

from unsilent.basics.error_origin import calls_user_code
from unsilent.explain.clocks import replace_clocks
from unsilent.explain.user_frames import UserFrameFinder

SEED = 0
_PROCESS = 4242


class CallerProbe:
    """Replacement of a function that records its callers.

    It is an object, because a function would become a method as an attribute of a class.
    """

    def __init__(self, note: Callable[[], None], call: Callable[..., Any]) -> None:
        self._note, self._call = note, call

    @calls_user_code
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class SourceInterceptor:
    """Replaces the functions that read sources of difference, and records their callers.

    Args:
        pinned: Sources to pin.
        number: Number of this run among several; the order of folders and the clock depend on it.
        frames: Finder of the user's lines.
        threads: Number of torch's threads, whatever the program sets; ``None`` to keep the program's setting.

    Attributes:
        reads: Tuples (source, function, line, whether the line itself called it), in order of first occurrence.
    """

    def __init__(
        self, pinned: Collection[str], number: int, frames: UserFrameFinder, threads: int | None = None
    ) -> None:
        self.reads: dict[tuple[str, str, tuple[str, int, str], bool], None] = {}
        self._pinned, self._number, self._frames = frozenset(pinned), number, frames
        self._replace_generators()
        self._replace_system()
        replace_clocks(self._replace, "clock" in pinned, number)
        self._set_torch(threads)
        self._before = _generator_states()

    def sources_read(self) -> set[str]:
        """The sources that were read so far, as far as that can be detected."""
        moved = {key for key, state in _generator_states().items() if state != self._before[key]}
        return moved | {source for source, *_ in self.reads}

    def _replace(self, source: str, holder: Any, name: str, call: Callable[..., Any] | None = None) -> None:
        """Replace a function by a probe.

        ``call``: function that the probe calls instead.
        """
        label = f"{getattr(holder, '__name__', type(holder).__name__)}.{name}"
        setattr(holder, name, CallerProbe(lambda: self._note(source, label), call or getattr(holder, name)))

    def _note(self, source: str, label: str) -> None:
        caller = sys._getframe(2)
        while caller.f_back is not None and caller.f_code.co_filename == __file__:
            caller = caller.f_back
        line = self._frames.current_user_line(caller, imports=False)
        if line[1]:
            self.reads[source, label, line, self._frames.is_user_frame(caller)] = None

    def _replace_generators(self) -> None:
        """Replace functions that make random numbers without a seed."""
        fixed = itertools.count(SEED)
        numpy_pinned, random_pinned = "numpy" in self._pinned, "random" in self._pinned
        make, own_seed, numpy_seed = np.random.default_rng, random.Random.seed, np.random.seed

        @calls_user_code
        def default_rng(seed: Any = None) -> Any:
            if seed is None:
                self._note("numpy", "numpy.random.default_rng")
            return make(next(fixed) if seed is None and numpy_pinned else seed)

        @calls_user_code
        def seed_numpy(seed: Any = None) -> None:
            if seed is None:
                self._note("numpy", "numpy.random.seed")
            numpy_seed(SEED if seed is None and numpy_pinned else seed)

        @calls_user_code
        def seed_random(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None:
                self._note("random", "random.Random")
            own_seed(generator, next(fixed) if a is None and random_pinned else a, version)

        np.random.default_rng, np.random.seed = default_rng, seed_numpy
        random.Random.seed = seed_random  # type: ignore[assignment,method-assign]
        random.seed = random._inst.seed
        if numpy_pinned:
            np.random.seed(SEED)
        if random_pinned:
            random.seed(SEED)

    def _replace_system(self) -> None:
        """Replace functions of the operating system: random bytes, process number, folder listings."""
        stream = _Stream() if "entropy" in self._pinned else None
        self._replace("entropy", os, "urandom", stream)
        self._replace("entropy", random, "_urandom", stream)  # of random.SystemRandom, secrets, numpy's generators
        self._replace("entropy", uuid, "uuid1", (lambda *a, **k: uuid.UUID(bytes=stream(16))) if stream else None)
        self._replace("process", os, "getpid", (lambda: _PROCESS) if "process" in self._pinned else None)
        listed, scanned = os.listdir, os.scandir
        order = self._sorted_entries if "listing" in self._pinned else self._shuffled_entries
        self._replace("listing", os, "listdir", lambda *args: order(listed(*args), None))
        self._replace("listing", os, "scandir", lambda *args: _Scanned(scanned(*args), order))

    def _sorted_entries(self, entries: list[Any], key: Any) -> list[Any]:
        return sorted(entries, key=key)

    def _shuffled_entries(self, entries: list[Any], key: Any) -> list[Any]:
        """Folder entries in an order that depends on the run.

        They are sorted in the first run, reversed in the second, and shuffled in further runs.
        """
        entries = sorted(entries, key=key, reverse=self._number == 1)
        if self._number > 1:
            mixed = np.random.Generator(np.random.PCG64(self._number)).permutation(len(entries))
            return [entries[i] for i in mixed]
        return entries

    def _set_torch(self, threads: int | None) -> None:
        if "torch" in self._pinned:

            def fixed() -> int:
                torch.manual_seed(SEED)
                return SEED

            fixed()
            torch.seed = torch.random.seed = fixed
        if "generator" in self._pinned:
            torch.Generator = _Generator  # type: ignore[misc]
        if "kernels" in self._pinned:
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings: Any = torch.utils.deterministic
            settings.fill_uninitialized_memory = False  # another source
            torch.backends.cudnn.benchmark = False
        threads = 1 if "threads" in self._pinned else threads
        if threads is not None:
            torch.set_num_threads(threads)
            torch.set_num_threads = lambda number: None  # type: ignore[assignment]


class _Stream:
    """Replacement of os.urandom that returns the same bytes in each run."""

    def __init__(self) -> None:
        self._calls = itertools.count()

    def __call__(self, size: int) -> bytes:
        call = next(self._calls)
        parts = (xxhash.xxh3_128_digest(f"{call}.{i}".encode()) for i in range(size // 16 + 1))
        return b"".join(parts)[:size]


class _Scanned(AbstractContextManager["_Scanned"]):
    """Replacement of the iterator of os.scandir, with the entries in a given order."""

    def __init__(self, entries: Any, order: Callable[[list[Any], Any], list[Any]]) -> None:
        with entries:
            self._entries = iter(order(list(entries), lambda entry: entry.name))

    def __iter__(self) -> _Scanned:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, because all entries were read at once."""


class _Stands(type(torch._C.Generator)):  # type: ignore[misc]
    """Metaclass that makes instances of torch's generator class count as instances of the replacement."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_Stands):
    """A torch generator whose ``seed`` method always uses the same seed."""

    def seed(self) -> int:
        self.manual_seed(SEED)
        return SEED


def _generator_states() -> dict[str, bytes]:
    """The states of the global random generators."""
    numpys: Any = np.random.get_state()
    cuda = b"".join(bytes(s.tolist()) for s in torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else b""
    return {
        "torch": torch.random.get_rng_state().numpy().tobytes() + cuda,
        "numpy": repr(numpys[2:]).encode() + numpys[1].tobytes(),
        "random": repr(random.getstate()).encode(),
    }
