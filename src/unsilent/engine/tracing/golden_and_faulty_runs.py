"""Golden and faulty runs, repeated until every output that differs was compared within the memory limit.

A golden run keeps copies of as many outputs as fit in memory, and the digest of each output. A faulty run compares its
outputs with the copies, and finds by digest which of the others differ. The next golden run keeps copies of these, and
so on. Outputs that are equal in both runs need no copy. Every repetition must give the digests of the first run of its
kind.

Tensors are compared bit for bit: `change` computes the numbers for a difference (see `unsilent.basics.fault_trace`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.fault_trace import OutputDifference
from unsilent.engine.digests import digest
from unsilent.engine.tracing.tracer import OutputKey, Tracer
from unsilent.outcomes.tensors import words_of
from unsilent.sites.memory import dtype_name
from unsilent.workloads.model_fitting import Progress

CHUNK = 1 << 22
"""Number of elements that are compared at a time, so that the float64 copies stay below 100 MB."""
_NARROW = tuple(d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d).startswith("torch.float8_e"))
_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_NARROW)


def change(golden: Tensor, faulty: Tensor) -> OutputDifference:
    """The difference between two tensors of the same dtype and shape, on the CPU."""
    if golden.dtype.is_complex:  # values are compared by real and imaginary part, elements as a whole
        parts = change(torch.view_as_real(golden), torch.view_as_real(faulty))
        return replace(parts, changed=int((words_of(golden) != words_of(faulty)).any(-1).sum()))
    numeric, result = golden.dtype in _NUMBERS, OutputDifference()
    ones, twos = golden.reshape(-1), faulty.reshape(-1)
    for start in range(0, len(ones), CHUNK):
        left, right = ones[start : start + CHUNK], twos[start : start + CHUNK]
        unequal = words_of(left) != words_of(right)
        if unequal.any():
            result = _largest_difference(
                result, _change(left[unequal], right[unequal]) if numeric else OutputDifference(int(unequal.sum()))
            )
    return result


def _change(golden: Tensor, faulty: Tensor) -> OutputDifference:
    """The difference between the changed elements of two tensors."""
    before, after = golden.double(), faulty.double()
    known = before.isfinite() & after.isfinite()
    apart = (after - before).abs()
    rated = known & (before != 0)
    return OutputDifference(
        len(before),
        _largest((apart / before.abs())[rated]),
        _largest(apart[known]),
        int((known & (before == 0) & (after != 0)).sum()),
        int((before.isfinite() & ~after.isfinite()).sum()),
    )


def _largest(values: Tensor) -> float | None:
    return min(float(values.max()), sys.float_info.max) if values.numel() else None


def _largest_difference(a: OutputDifference, b: OutputDifference) -> OutputDifference:
    def most(x: float | None, y: float | None) -> float | None:
        return max((v for v in (x, y) if v is not None), default=None)

    return OutputDifference(
        a.changed + b.changed,
        most(a.relative, b.relative),
        most(a.absolute, b.absolute),
        a.from_zero + b.from_zero,
        a.nonfinite + b.nonfinite,
    )


Run = Callable[[bool, Tracer], Any]
"""Function that runs once from the same state, faulty (True) or golden (False), with the tracer innermost."""


class TracedOutput(NamedTuple):
    """One output of an operation: its name, dtype, shape, hash and size."""

    key: OutputKey
    dtype: str
    shape: tuple[int, ...]
    digest: int
    bytes: int

    @property
    def text(self) -> str:
        """The name of the output for a message."""
        kernel = f" > {self.key.kernel}" if self.key.kernel else ""
        return f"{self.key.name}{kernel}" + (f"/out.{self.key.output}" if self.key.output else "")


class GoldenPass:
    """One golden run: records of all outputs, and copies of some of them.

    Args:
        memory: Largest number of bytes of copies; one output is always kept, even if it is larger.
        wanted: Numbers of the outputs to keep; None for all.
    """

    def __init__(self, memory: int, wanted: Collection[int] | None = None) -> None:
        self._bytes_left, self._wanted = memory, wanted
        self.seen: list[TracedOutput] = []
        self.kept: dict[int, Tensor] = {}

    def see(self, key: OutputKey, tensor: Tensor) -> None:
        """Record an output; called with every output of the run."""
        number, size = len(self.seen), tensor.numel() * tensor.element_size()
        self.seen.append(TracedOutput(key, dtype_name(tensor.dtype), tuple(tensor.shape), digest([tensor]), size))
        if self._wanted is None or number in self._wanted:
            if size <= self._bytes_left or not self.kept:
                self.kept[number] = tensor.cpu().clone()
            self._bytes_left -= size  # also if it was not kept: the next run begins there


class FaultyPass:
    """One faulty run, compared with the records and copies of a golden run.

    Attributes:
        seen: The golden run's outputs.
        changes: Changes of the outputs that were compared, by number.
    """

    def __init__(self, golden: Sequence[TracedOutput], golden_outputs: Mapping[int, Tensor]) -> None:
        self._golden, self._golden_outputs = golden, golden_outputs
        self._together = True
        self.seen: list[TracedOutput] = []
        self.changes: dict[int, OutputDifference] = {}

    def see(self, key: OutputKey, tensor: Tensor) -> None:
        """Compare an output; called with every output of the run."""
        number, size = len(self.seen), tensor.numel() * tensor.element_size()
        seen = TracedOutput(key, dtype_name(tensor.dtype), tuple(tensor.shape), digest([tensor]), size)
        self.seen.append(seen)
        self._together = self._together and number < len(self._golden) and self._golden[number].key == key
        if not self._together:
            return
        golden = self._golden[number]
        if golden == seen:
            self.changes[number] = OutputDifference()
        elif (golden.dtype, golden.shape) != (seen.dtype, seen.shape):
            self.changes[number] = OutputDifference(tensor.numel() or 1)
        elif number in self._golden_outputs:
            self.changes[number] = change(self._golden_outputs[number], tensor.cpu())


class PassComparison(NamedTuple):
    """The comparison of golden and faulty runs.

    It has the outputs of both runs, differences, outputs to leave out, the error of the faulty run, and the number of
    runs.
    """

    golden: list[TracedOutput]
    faulty: list[TracedOutput]
    changes: dict[int, OutputDifference]
    scratch: set[int]
    error: str
    runs: int


def compare(model: nn.Module, run: Run, training: bool, memory: int, progress: Progress) -> PassComparison:
    """Repeat golden and faulty runs until all outputs are compared.

    Raises ``UsageError`` if a run does not give the same outputs twice.
    """
    runs, expected = 0, 3

    def once(faulty: bool, seer: GoldenPass | FaultyPass) -> str:
        nonlocal runs, expected
        progress("tracing", runs, expected := max(expected, runs + 1))
        runs += 1
        return _once(model, run, training, faulty, seer)

    first = GoldenPass(memory)
    once(False, first)
    seen = FaultyPass(first.seen, first.kept)
    error = once(True, seen)
    first.kept.clear()
    changes, scratch = dict(seen.changes), set[int]()
    left = [i for i in range(common_prefix_length(first.seen, seen.seen)) if i not in changes]
    while True:
        again = GoldenPass(memory, set(left))
        once(False, again)  # at least once, to prove that the first run can be repeated
        scratch |= _scratch(first.seen, again.seen)
        left = [i for i in left if i not in scratch]
        if not left:
            break
        expected = runs + 1 + 2 * (sum(first.seen[i].bytes for i in left) // max(memory, 1))
        more = FaultyPass(first.seen, again.kept)
        once(True, more)
        _check_faulty(seen.seen, more.seen, scratch)
        changes |= more.changes
        left = [i for i in left if i not in changes]
        if not left:
            break
    progress("tracing", runs, runs)
    return PassComparison(first.seen, seen.seen, changes, scratch, error, runs)


def _once(model: nn.Module, run: Run, training: bool, faulty: bool, seer: GoldenPass | FaultyPass) -> str:
    """Run once and return the error of a faulty run as text, or "".

    An error is a result of a faulty run, so it is not raised.
    """
    tracer, error = Tracer(model, seer.see, training), ""
    try:
        run(faulty, tracer)
    except UnsilentError:
        raise
    except (Exception, SystemExit) as raised:
        if not faulty:
            raise
        error = " ".join(f"{type(raised).__name__}: {raised}".split())[:300]
    if not tracer.entered:
        raise UsageError("the run did not enter its tracer; put all operations to be traced inside `with tracer:`")
    return error


def common_prefix_length(first: Sequence[TracedOutput], second: Sequence[TracedOutput]) -> int:
    """The number of outputs with which both sequences begin in common."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a.key != b.key), min(len(first), len(second)))


def _scratch(first: Sequence[TracedOutput], second: Sequence[TracedOutput]) -> set[int]:
    """Numbers of the outputs that hold scratch memory, because they differ between two golden runs.

    Raises ``UsageError`` for any other difference. A kernel may return scratch memory as a further output, which is
    never read. If no first output of any operation differs, the differing outputs are scratch memory.
    """
    both = common_prefix_length(first, second)
    result = [i for i in range(both) if first[i] != second[i]]
    if both < max(len(first), len(second)) or any(first[i].key.output == 0 for i in result):
        raise _unrepeatable("golden", first, result[0] if result else both)
    return set(result)


def _check_faulty(first: Sequence[TracedOutput], second: Sequence[TracedOutput], scratch: Collection[int]) -> None:
    """Raise ``UsageError`` unless two faulty runs gave the same outputs, apart from scratch memory."""
    both = common_prefix_length(first, second)
    result = [i for i in range(both) if first[i] != second[i] and i not in scratch]
    if result or both < max(len(first), len(second)):
        raise _unrepeatable("faulty", first, result[0] if result else both)


def _unrepeatable(kind: str, seen: Sequence[TracedOutput], number: int) -> UsageError:
    where = seen[number].text if number < len(seen) else "the end of the shorter run"
    return UsageError(
        f"two {kind} runs differ, first at {where}, so a fault cannot be distinguished from noise; "
        "make the run deterministic and start it from the same state (seeds, data, counters, deterministic kernels)"
    )
