"""Evaluation of single samples, called rows, in which samples from many trials share one call of an operation.

Most operations of a batched model treat samples equally and independently. If the memory of a value is ordered by
sample, only the corrupted samples are gathered, each tagged with its trial, and an operation runs on these *rows*: any
samples of any trials together. The independence of samples is tested: some samples are replaced by others
(`switch_probe_runs`), which must not change the results of the rest, nor depend on them. Another number of rows is
another shape for a kernel and may give other bits. Therefore each operation is tried at a few sizes, with shuffled
samples, compared bit for bit and timed. Only sizes that agreed are used, the cheapest first, and free places of a call
are filled with golden samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.device_or_cpu_clock import clock
from unsilent.engine.tape import Node, StorageWindow, Tape, Value, flatten, kind_of_operation, restore_shared_arguments
from unsilent.sites.memory import WORDS

if TYPE_CHECKING:
    from unsilent.engine.tape_replay import Replayer

Ints = NDArray[np.int64]
Words = dict[int, Tensor]
Tag = tuple[int, int]
"""Trial and sample."""
SIZES = (1, 4, 16, 64)
"""Numbers of rows of one call that are tried, up to four batches, besides the batch itself."""
PROBES = 2
"""Number of rounds with samples that are not golden; every second round includes infinities and NaN with payloads."""
FEW = 50_000
"""Number of words of an operation's results below which rounds are doubled, for the same chance of detection."""
COMPARED = 100_000
"""Number of words that are compared in each of these rounds before a size is accepted."""
CALLS = 16
"""Number of calls of one size in each round with samples that are not golden."""
POOL = 131_101
"""Number of random numbers that are drawn, a prime number; longer sequences repeat them."""
CALL_SECONDS = 50e-6
"""Seconds for gathering the rows of a call and separating its results."""
SPECIAL = (float("inf"), float("-inf"), -0.0, 1e-42, 3e38, -3e38)
SPECIAL_SHARE = 0.02
LINE = 64
"""Alignment in bytes that samples keep when they are moved, because kernels depend on the address of elements."""
STRIDE = 128
"""Bytes that elementwise kernels process at a time; they process the remainder differently."""


@dataclass(slots=True)
class CorruptedRows:
    """The corrupted samples of one value.

    ``words[i]`` is the memory of sample ``tags[i][1]`` in trial ``tags[i][0]``.
    """

    tags: list[Tag]
    words: Tensor

    def select_rows(self, wanted: Iterable[int]) -> CorruptedRows:
        """The corrupted samples at the wanted positions."""
        places = list(wanted)
        return CorruptedRows([self.tags[i] for i in places], self.words[places])

    def without(self, trials: set[int]) -> CorruptedRows:
        """The corrupted samples of all trials but some."""
        return self.select_rows(i for i, (trial, _) in enumerate(self.tags) if trial not in trials)


class RowTestCase(NamedTuple):
    """A test of an operation on samples: the memory words of its operands and of its expected results, by value."""

    tried_inputs: dict[int, Tensor]
    expected_outputs: dict[int, Tensor]


class RowPlan:
    """The operations of a tape that can run on single samples, and the numbers of samples per call.

    ``keeps_places``: operations run only on the whole batch, each sample at its own place, which is possible for more
    operations.

    Attributes:
        batch: Number of samples in the batch; 0 if its inputs do not show it.
        sizes: Allowed numbers of rows for each operation, with the CPU time of a call.
    """

    def __init__(self, tape: Tape, keeps_places: bool = False) -> None:
        self.tape, self.keeps_places = tape, keeps_places
        self.batch = _batch(tape)
        self.sizes: dict[int, dict[int, float]] = {}
        self.measured = False
        self._carrying: set[int] = set()
        self._calls: dict[tuple[int, int], list[int] | None] = {}
        if self.batch > 1:
            self._carrying = {e.window.value for e in tape.inputs.values() if e.window.shape[:1] == (self.batch,)}
            self._carrying = {
                v for v in self._carrying if self._apart(tape.values[v].storage_window, tape.values[v].nbytes)
            }
            for node in tape.nodes:
                if self._possible(node):
                    self.sizes[node.index] = {}
                    self._carrying.update(v for v in node.new_values if self._is_value_read(v))
                elif node.func is not None and not node.reads:  # made without inputs, maybe in the size of the batch
                    self._carrying.update(
                        v for v in node.new_values if self._apart(tape.values[v].storage_window, tape.values[v].nbytes)
                    )

    def carries(self, value: int) -> bool:
        """Whether the memory of a value consists of one equal part per sample."""
        return value in self._carrying

    def _possible(self, node: Node) -> bool:
        values, tape = self._carrying, self.tape
        if node.func is None or node.generator is not None or not any(w.value in values for w in node.reads):
            return False
        outs = [w for w in node.results if isinstance(w, StorageWindow) and self._is_value_read(w.value)]
        windows = [*outs, *(w for w in node.reads if w.value in values)]
        if not all(self._has_equal_instructions(node, tape.values[w.value], self.batch) for w in windows):
            return False
        return (
            all(isinstance(w, StorageWindow) or w is None for w in node.results)
            and {w.value for w in outs} >= {v for v in node.new_values if self._is_value_read(v)}
            and all(w.old in values for w in node.writes)
            and all(self._apart(w, tape.values[w.value].nbytes) for w in windows)
        )

    def _has_equal_instructions(self, node: Node, value: Value, rows: int) -> bool:
        """Whether all elements of a value are computed by the same instructions in a call on ``rows`` samples."""
        if self.keeps_places:
            return True
        if torch.Tag.pointwise in node.func.tags:
            return not value.storage_window.dtype.is_floating_point or value.nbytes // self.batch * rows % STRIDE == 0
        return value.nbytes % (self.batch * LINE) == 0

    def _is_value_read(self, value: int) -> bool:
        """Whether a value is read by an operation or belongs to the output."""
        return bool(self.tape.values[value].readers) or self.tape.values[value].output

    def lies_apart(self, window: StorageWindow) -> bool:
        """Whether a strided view covers the same elements of every sample in a batch."""
        return self._apart(window, self.tape.values[window.value].nbytes)

    def _apart(self, window: StorageWindow, nbytes: int) -> bool:
        """Whether a strided view covers the same elements of every sample in ``nbytes`` bytes of memory."""
        size = window.dtype.itemsize
        if not window.shape or window.shape[0] % self.batch or nbytes % (self.batch * size) or not prod(window.shape):
            return False
        chunk, each = nbytes // self.batch // size, window.shape[0] // self.batch
        inner = sum((n - 1) * s for n, s in zip(window.shape[1:], window.stride[1:], strict=True))
        return window.stride[0] * each == chunk and window.offset + inner + (each - 1) * window.stride[0] < chunk

    # -- rows as tensors ---------------------------------------------------------------------------------------

    def words(self, holder: Tensor) -> Tensor:
        """The memory of a value as words, [samples, words of a sample]."""
        return _words_by_row(holder.untyped_storage(), holder, self.batch)

    def window(self, words: Tensor, window: StorageWindow) -> Tensor:
        """The given view of a batch, applied to some samples only.

        ``words``: contiguous, [rows, words of a sample].
        """
        rows = words.shape[0]
        shape = (window.shape[0] // self.batch * rows, *window.shape[1:])
        empty = torch.empty(0, dtype=window.dtype, device=words.device)
        start = int(words.storage_offset()) * words.element_size() // window.dtype.itemsize
        return empty.set_(words.untyped_storage(), start + window.offset, shape, window.stride)

    def shared(self, tensor: Tensor, rows: int) -> Tensor:
        """A tensor that all samples share, in the shape for ``rows`` samples."""
        if tensor.ndim and tensor.shape[0] == self.batch and tensor.stride(0) == 0:
            return tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride())
        return tensor

    def golden_rows(self, holder: Tensor, samples: Sequence[int]) -> Tensor:
        """A copy of the memory words of some samples of a value."""
        return self.words(holder).index_select(0, torch.tensor(samples, device=holder.device))

    def elements(self, words: Tensor, dtype: torch.dtype) -> Tensor:
        """Samples as elements of a dtype instead of words: [rows, elements of a sample]."""
        return words.view(dtype)

    def places(self, window: StorageWindow, elements: Ints) -> tuple[Ints, Ints]:
        """The sample of each element of a window, and its place in the sample's part of the memory.

        ``elements``: flat indices in C order. Places count elements.
        """
        offsets = np.full(elements.shape, window.offset, np.int64)
        for index, stride in zip(np.unravel_index(elements, window.shape), window.stride, strict=True):
            offsets += index * stride
        chunk = self.tape.values[window.value].nbytes // self.batch // window.dtype.itemsize
        return offsets // chunk, offsets % chunk

    def results(self, node: Node, result: Any, rows: int) -> dict[int, Tensor] | None:
        """The memory words of the values that a call on some samples computed.

        None if the shapes of its results do not fit that number of samples.
        """
        words_of_value: dict[int, Tensor] = {}
        for part, window in zip(flatten(result), node.results, strict=True):
            if not isinstance(window, StorageWindow) or not self.carries(window.value):
                continue
            shape = (window.shape[0] // self.batch * rows, *window.shape[1:])
            if not isinstance(part, Tensor) or part.shape != shape or part.stride() != window.stride:
                return None
            if window.value in node.new_values and window.value not in words_of_value:
                storage = part.untyped_storage()
                if storage.nbytes() != self.tape.values[window.value].nbytes // self.batch * rows:
                    return None
                words_of_value[window.value] = _words_by_row(storage, part, rows)
        return words_of_value

    # -- trying ------------------------------------------------------------------------------------------------

    def try_row_counts(self, replayer: Replayer, except_for: Collection[int] = ()) -> None:
        """Test with how many samples per call each operation gives the same bits.

        Done once. Operations in ``except_for``, or without available golden values, are left out. Operations of one
        kind are tried once, on an operation whose samples are not all alike.
        """
        if self.measured:
            return
        self.measured = True
        seconds: dict[object, dict[int, float]] = {}
        for index, allowed in self.sizes.items():
            node = self.tape.nodes[index]
            used = (v for v in (*node.values, *node.new_values) if self._is_value_read(v))
            if index in except_for or not all(map(replayer.at_hand, used)):
                continue
            sizes = sorted({*(s for s in SIZES if s <= 4 * self.batch and not self.keeps_places), self.batch})
            if torch.Tag.pointwise not in node.func.tags and any(self._alike(v, replayer) for v in node.values):
                continue
            kind = kind_of_operation(self.tape, node, lambda v: (v in self._carrying, self._is_value_read(v)))
            if kind not in seconds:
                seconds[kind] = self._agreeing(node, sizes, replayer)
            allowed.update(seconds[kind])

    def adopt(self, plan: RowPlan) -> None:
        """Copy the test results from a tape of the same structure."""
        self.sizes, self.measured = {index: dict(sizes) for index, sizes in plan.sizes.items()}, plan.measured

    def _agreeing(self, node: Node, sizes: Sequence[int], replayer: Replayer) -> dict[int, float]:
        """The time of a call for each number of samples at which the call gives the same bits."""
        values = [self.tape.values[v] for v in (*node.values, *node.new_values) if v in self._carrying]
        spent: dict[int, list[float]] = {
            n: [] for n in sizes if all(self._has_equal_instructions(node, v, n) for v in values)
        }
        for seed, case in enumerate(self._cases(node, replayer)) if spent else ():
            if case is None:
                return {}
            for rows in list(spent):
                times = self._times(node, rows, replayer, case, seed)
                if times is None:
                    del spent[rows]
                else:
                    spent[rows] += times
        return {rows: sum(times) / len(times) for rows, times in spent.items()}

    def _alike(self, value: int, replayer: Replayer) -> bool:
        """Whether a value consists of integers that are equal for all samples.

        In that case exchanging its samples would test nothing.
        """
        dtype = self.tape.values[value].storage_window.dtype
        if dtype.is_floating_point or dtype == torch.bool or value not in self._carrying:
            return False
        words = self.words(replayer.golden(value))
        return bool((words == words[:1]).all())

    def _cases(self, node: Node, replayer: Replayer) -> Iterator[RowTestCase | None]:
        """Test cases for an operation, with golden samples and with random samples.

        None if samples affect each other.
        """
        golden = {v: self.words(replayer.golden(v)) for v in node.values if v in self._carrying}
        outputs = {v: self.words(replayer.golden(v)) for v in node.new_values if v in self._carrying}
        yield RowTestCase(golden, outputs)
        few = sum(words.numel() for words in outputs.values()) < FEW
        for seed in range(2 * PROBES if few else PROBES):
            chance = torch.Generator().manual_seed(seed)
            operands = {
                v: probe_samples(w, self.tape.values[v].storage_window.dtype, seed % 2 > 0, chance)
                for v, w in golden.items()
            }
            whole = self._try(node, operands, torch.arange(self.batch), replayer)
            if whole is not None:
                are_apart = self._apart_on(node, golden, outputs, operands, whole[0], replayer)
                yield RowTestCase(operands, whole[0]) if are_apart else None
            elif seed % 2 == 0:
                yield None  # the operation may raise for special values, also in a trial

    def _apart_on(
        self, node: Node, golden: Words, outputs: Words, operands: Words, expected: Words, replayer: Replayer
    ) -> bool:
        """Whether the results of samples stay the same when other samples in the batch are replaced."""
        where = (torch.arange(self.batch) % 2 == 0)[:, None].to(self.tape.device)
        mixed = {v: torch.where(where, operands[v], w) for v, w in golden.items()}
        result = self._try(node, mixed, torch.arange(self.batch), replayer)
        return result is not None and all(
            torch.equal(words, torch.where(where, expected[v], outputs[v])) for v, words in result[0].items()
        )

    def _times(self, node: Node, rows: int, replayer: Replayer, case: RowTestCase, seed: int) -> list[float] | None:
        """Times of calls on ``rows`` samples, or None if one fails or gives different bits."""
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(seed))
        order = torch.arange(self.batch) if self.keeps_places else order
        times: list[float] = []
        compared = 0
        for first in range(0, self.batch, rows):
            samples = order[torch.arange(first, first + rows) % self.batch]
            result = self._try(node, case.tried_inputs, samples, replayer)
            if result is None or any(
                not torch.equal(words, case.expected_outputs[v].index_select(0, samples.to(words.device)))
                for v, words in result[0].items()
            ):
                return None
            times.append(result[1])
            compared += sum(words.numel() for words in result[0].values())
            if compared >= COMPARED or (seed and len(times) >= CALLS):
                break
        return times

    def _try(
        self, node: Node, operands: dict[int, Tensor], samples: Tensor, replayer: Replayer
    ) -> tuple[dict[int, Tensor], float] | None:
        """An operation's results for some samples and the time that it took, or None if it cannot run on them."""
        rows, now = len(samples), clock(self.tape.device)
        parts = {v: words.index_select(0, samples.to(words.device)) for v, words in operands.items()}
        tensors = [
            self.window(parts[w.value], w) if w.value in parts else self.shared(replayer.golden_operand(node, k), rows)
            for k, w in enumerate(node.reads)
        ]
        restore_shared_arguments(node, tensors)
        start = now()
        try:
            result = replayer.apply(node, tensors)
        except (RuntimeError, IndexError, ValueError):
            return None  # its arguments contain the size of the batch
        seconds = now() - start
        results = self.results(node, result, rows)
        return None if results is None else ({**results, **{w.new: parts[w.old] for w in node.writes}}, seconds)

    def call_sizes(self, node: int, rows: int) -> list[int] | None:
        """The sizes of calls that evaluate ``rows`` samples at the least measured cost.

        None if the operation can run in no size.
        """
        if (node, rows) not in self._calls:
            self._calls[node, rows] = self._cheapest(self.sizes.get(node) or {}, rows)
        return self._calls[node, rows]

    def _cheapest(self, allowed: dict[int, float], rows: int) -> list[int] | None:
        if not allowed:
            return None
        allowed = {size: seconds + CALL_SECONDS for size, seconds in allowed.items()}
        best = min(allowed, key=lambda size: allowed[size] * -(-rows // size))
        plan = [best] * (rows // best)
        if (rest := rows % best) > 0:
            last = min(allowed, key=lambda size: (allowed[size] * -(-rest // size), size))
            plan += [last] * -(-rest // last)
        return plan


def _words_by_row(storage: torch.UntypedStorage, like: Tensor, rows: int) -> Tensor:
    """The memory of a storage as words, [rows, words of a row].

    Words are as wide as the size of a row allows.
    """
    chunk = storage.nbytes() // rows
    width = next(w for w in (8, 4, 2, 1) if chunk % w == 0)
    empty = torch.empty(0, dtype=WORDS[width], device=like.device)
    return empty.set_(storage, 0, (rows, chunk // width), (chunk // width, 1))


def _batch(tape: Tape) -> int:
    """The number of samples in a batch: the first dimension that its inputs share, or 0 if they share none."""
    sizes = {e.window.shape[0] if e.window.shape else 0 for e in tape.inputs.values()}
    return sizes.pop() if len(sizes) == 1 else 0


def probe_samples(words: Tensor, dtype: torch.dtype, special: bool, chance: torch.Generator) -> Tensor:
    """Random test samples in the form of ``words``.

    Random numbers for floats and bools; for other dtypes the samples are exchanged with each other.
    """
    if dtype == torch.bool:
        shape = (words.shape[0], words.shape[1] * words.element_size())
        return torch.randint(2, shape, generator=chance, dtype=torch.uint8).to(words.device).view(words.dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return words.roll(1 + int(torch.randint(words.shape[0] - 1, (), generator=chance)), 0)
    golden = words.view(dtype)
    scale = float(golden[0].nan_to_num(0, 0, 0).abs().mean(dtype=torch.float32).clamp(1e-3, 1e3))
    size = min(golden.numel(), POOL)
    pool = (torch.randn(size, generator=chance, dtype=torch.float64) * scale).to(dtype)
    if special:
        bits, width = pool.view(WORDS[dtype.itemsize]), 8 * dtype.itemsize
        infinity = torch.tensor(float("inf"), dtype=dtype).view(bits.dtype)
        kinds = torch.tensor(SPECIAL, dtype=dtype).view(bits.dtype)
        which = torch.randint(round(len(SPECIAL) / SPECIAL_SHARE), (size,), generator=chance)
        bits.copy_(torch.where(which < len(SPECIAL), kinds[which.clamp(max=len(SPECIAL) - 1)], bits))
        payload = torch.randint(
            -(1 << (width - 1)), (1 << (width - 1)) - 1, (size,), generator=chance, dtype=bits.dtype
        )
        which = torch.randint(round(1 / SPECIAL_SHARE), (size,), generator=chance)
        bits.copy_(torch.where(which == 0, payload | infinity, bits))
    result = pool.to(words.device).repeat(-(-golden.numel() // size))[: golden.numel()]
    return result.view(golden.shape).view(words.dtype)
