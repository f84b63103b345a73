"""Sources that can make two runs of a program differ, with the way to pin each and advice.

A source is found by intervention: if runs that differed agree (or differ later) once it is pinned, it was a source. The module
`pinning` pins each source; this table does not need torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NondeterminismSource:
    """A source that can make runs differ.

    ``title``: what differs from run to run; ``pin``: how it was pinned; ``advice``: what a program can do.
    """

    key: str
    title: str
    pin: str
    advice: str


_ALL = (
    NondeterminismSource(
        "hash",
        "the order of sets (Python's randomised string hash)",
        "PYTHONHASHSEED=0",
        "sort the elements of a set (and anything ordered by hash()), or start Python with PYTHONHASHSEED=0",
    ),
    NondeterminismSource(
        "listing",
        "the order of folder listings",
        "results of os.listdir, os.scandir and glob sorted",
        "sort the names: sorted(os.listdir(…)), sorted(glob(…))",
    ),
    NondeterminismSource(
        "numpy",
        "numpy's random numbers, unseeded",
        "np.random.seed(0); default_rng() given a seed",
        "call np.random.seed(SEED) at the start, or pass a seed to np.random.default_rng(SEED)",
    ),
    NondeterminismSource(
        "random",
        "Python's random module, unseeded",
        "random.seed(0); random.Random() given a seed",
        "call random.seed(SEED) at the start, or pass a seed to random.Random(SEED)",
    ),
    NondeterminismSource(
        "torch",
        "torch's global generator, unseeded",
        "torch.manual_seed(0)",
        "call torch.manual_seed(SEED) at the start, before the model is made",
    ),
    NondeterminismSource(
        "generator",
        "a torch.Generator with a random seed",
        "torch.Generator().seed() replaced by a fixed seed",
        "give the generator a fixed seed: generator.manual_seed(SEED) instead of generator.seed()",
    ),
    NondeterminismSource(
        "clock",
        "the clock",
        "clocks replaced by a count of how often the clock was read",
        "derive no value, seed or decision from time.time(), datetime.now() and the like",
    ),
    NondeterminismSource(
        "entropy",
        "random numbers of the operating system (os.urandom, secrets, uuid)",
        "os.urandom replaced by a fixed stream",
        "use a generator with a fixed seed instead of os.urandom, secrets, uuid or an unseeded generator",
    ),
    NondeterminismSource("process", "the process id", "os.getpid() fixed", "derive no seed or name from os.getpid()"),
    NondeterminismSource(
        "memory",
        "memory that was never written",
        "new memory set to zero",
        "write a tensor before reading it: torch.zeros instead of torch.empty",
    ),
    NondeterminismSource(
        "addresses",
        "addresses of objects (id(), the order of a set of objects)",
        "address randomisation off where the system allows it, PYTHONHASHSEED=0",
        "do not order or hash objects by id(): give each object its own number or name",
    ),
    NondeterminismSource(
        "kernels",
        "an operation whose kernel is not deterministic",
        "torch.use_deterministic_algorithms(True)",
        "call torch.use_deterministic_algorithms(True) at the start",
    ),
    NondeterminismSource(
        "threads",
        "several threads in one operation",
        "one thread",
        "call torch.set_num_threads(1) at the start, or set OMP_NUM_THREADS=1",
    ),
)
SOURCES = {source.key: source for source in _ALL}

KERNEL, RANDOM, DATA, PATH = "kernel", "random", "data", "path"
"""Kinds of divergence: an operation returns different bits for the same inputs; it draws random numbers; it receives different
data from outside; the runs execute different operations."""
_UNSEEN = ("hash", "generator", "addresses", "memory")
"""Likely sources whose use cannot be detected beforehand, for example memory that a library allocates."""


_READ = ("listing", "clock", "numpy", "random", "entropy", "process", "memory")
"""Sources of values whose use can be detected."""


def candidates(kind: str, generator: str, sources_read: Collection[str]) -> list[str]:
    """Sources to pin for one kind of difference, the likely ones first.

    Sources that the runs did not read are left out.

    Unlikely sources whose use cannot be detected are left to the search for sources that only help together. ``generator``:
    generator of random numbers, ``global``, ``own``, or empty.
    """
    if kind == KERNEL:
        return ["kernels", "threads", "memory"]
    seeded = ["clock", "random", "numpy", "entropy", "process", "hash", "addresses"]
    if kind == RANDOM and generator == "own":
        order = ["generator", *seeded, "torch"]
    elif kind == RANDOM:
        order = ["torch", *seeded]
    else:
        # Sources that were read come first, as the others could help by chance. Generators without a seed get one from the
        # system, so they come before it. Draws of torch's generator are observed themselves, so it is an unlikely source.
        order = [*(key for key in _READ if key in sources_read), "hash", "addresses", "torch", "memory"]
    return [key for key in dict.fromkeys(order) if key in sources_read or key in _UNSEEN]
