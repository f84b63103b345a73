"""What can make two runs of one program differ: each source by name, how it is pinned for a trial, and what to do about it.

A source is found by intervention: it is pinned, and if runs that differed now agree (or part later), it was one. How each
is pinned is in `pinning`; this table has no need of torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """``title``: what differs from run to run; ``pin``: what was done to pin it; ``advice``: what a program can do."""

    key: str
    title: str
    pin: str
    advice: str


_ALL = (
    Source(
        "hash",
        "the order of sets, from Python's hash of text",
        "PYTHONHASHSEED=0",
        "sort what comes out of a set (or of hash()), or start Python with PYTHONHASHSEED=0",
    ),
    Source(
        "listing",
        "the order in which a folder is listed",
        "os.listdir, os.scandir, glob sorted",
        "sort the names: sorted(os.listdir(…)), sorted(glob(…))",
    ),
    Source(
        "numpy",
        "numpy's random numbers, unseeded",
        "np.random.seed(0); default_rng() given a seed",
        "call np.random.seed(SEED) at the start, or pass a seed to np.random.default_rng(SEED)",
    ),
    Source(
        "random",
        "Python's random module, unseeded",
        "random.seed(0); random.Random() given a seed",
        "call random.seed(SEED) at the start, or pass a seed to random.Random(SEED)",
    ),
    Source(
        "torch",
        "torch's global generator, unseeded",
        "torch.manual_seed(0)",
        "call torch.manual_seed(SEED) at the start, before the model is made",
    ),
    Source(
        "generator",
        "a torch.Generator of its own that was given a random seed",
        "torch.Generator().seed() replaced by a fixed seed",
        "give the generator a fixed seed: generator.manual_seed(SEED) instead of generator.seed()",
    ),
    Source(
        "clock",
        "the clock",
        "clocks replaced by one that counts how often it is read",
        "take no value, seed or decision from time.time(), datetime.now() and the like",
    ),
    Source(
        "entropy",
        "random numbers of the operating system (os.urandom, secrets, uuid)",
        "os.urandom replaced by a fixed stream",
        "use a generator with a fixed seed instead of os.urandom, secrets, uuid or a generator that was given no seed",
    ),
    Source("process", "the number of the process", "os.getpid() fixed", "take no seed or name from os.getpid()"),
    Source(
        "memory",
        "memory that was never written",
        "new memory set to zero",
        "write a tensor before reading it: torch.zeros instead of torch.empty",
    ),
    Source(
        "addresses",
        "addresses of objects (id(), the order of a set of objects)",
        "addresses not randomised (as far as the system can), PYTHONHASHSEED=0",
        "do not order or hash by id(): give objects a number or a name of their own",
    ),
    Source(
        "kernels",
        "an operation whose kernel is not deterministic",
        "torch.use_deterministic_algorithms(True)",
        "call torch.use_deterministic_algorithms(True) at the start",
    ),
    Source(
        "threads",
        "several threads in one operation",
        "one thread",
        "call torch.set_num_threads(1) at the start, or set OMP_NUM_THREADS=1",
    ),
)
SOURCES = {source.key: source for source in _ALL}

KERNEL, RANDOM, DATA, PATH = "kernel", "random", "data", "path"
"""How runs diverge: an operation returns different bits for the same inputs; it draws random numbers; it receives other data
from outside; the runs do different operations."""
_UNSEEN = ("hash", "generator", "addresses", "memory")
"""Likely sources whose use leaves no trace that could be looked for beforehand; memory that a library makes is one."""


_READ = ("listing", "clock", "numpy", "random", "entropy", "process", "memory")
"""Sources that values come from and that can be noticed."""


def candidates(kind: str, generator: str, touched: Collection[str]) -> list[str]:
    """Which sources to pin for a parting of that kind, the likely ones first; what the runs did not touch is left out.

    Unlikely ones that cannot be noticed are left to the search for sources that only help together. ``generator``: of random
    numbers: ``global``, ``own``, or empty.
    """
    if kind == KERNEL:
        return ["kernels", "threads", "memory"]
    seeded = ["clock", "random", "numpy", "entropy", "process", "hash", "addresses"]
    if kind == RANDOM and generator == "own":
        order = ["generator", *seeded, "torch"]
    elif kind == RANDOM:
        order = ["torch", *seeded]
    else:
        # What was seen to be read comes first, the rest could help by chance. Generators that are given no seed ask the system
        # for one: they come before it. Of torch's generator the draws themselves are seen, so it is hardly what differs.
        order = [*(key for key in _READ if key in touched), "hash", "addresses", "torch", "memory"]
    return [key for key in dict.fromkeys(order) if key in touched or key in _UNSEEN]
