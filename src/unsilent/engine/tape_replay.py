"""Re-execution of the operations on a tape that depend on corrupted values.

The re-execution ends as soon as no value that is still used differs from golden.

All values that an operation reads are golden unless they are dirty. Golden values are held, or are computed again from
held values. `Diverged` is raised if the real run might take another path (a number that Python reads, a shape that
depends on data, an exception); that trial is run in full.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.partial import BlockwiseOperation, candidates, equal_bits
from unsilent.engine.sample_paths import separate_operations
from unsilent.engine.sample_rows import RowPlan
from unsilent.engine.tape import (
    Diverged,
    Holders,
    Node,
    StorageWindow,
    Tape,
    default_generator_of,
    fits,
    flatten,
    private_copy,
    restore_shared_arguments,
    same_bits,
    structure_of,
    tensor_at_window,
    view_window,
)
from unsilent.engine.walk import TrialEntry, Walk
from unsilent.faults import Fault
from unsilent.sites.corrupting import corrupted_copy


class Replayer:
    """Runs parts of a tape.

    ``kept``: golden values that are held; other golden values are computed again when they are needed.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.kept: Holders = {}
        self.blocks: dict[int, BlockwiseOperation] = {}
        """Operations that are computed in blocks of outputs."""
        self.planned: frozenset[int] = frozenset()
        """Golden values that will be held."""
        self.passes = 0
        """Number of passes over the tape so far."""
        self._golden_windows: dict[tuple[int, int], Tensor] = {}
        self._remade: Holders = {}

    @cached_property
    def structure(self) -> str:
        """The hash of the structure of the tape; see `structure_of`."""
        return structure_of(self.tape)

    @cached_property
    def largest(self) -> int:
        """Number of bytes of the largest value that an operation makes."""
        return max((v.nbytes for v in self.tape.values if v.producer is not None), default=0)

    # -- golden ------------------------------------------------------------------------------------------------

    def run_golden(self, keep: Callable[[int], bool], observe: Callable[[Node | None], Any] | None = None) -> Holders:
        """Execute the whole tape from its external values and return the values of the output.

        Values for which ``keep`` returns true are held. ``observe`` is called before every operation, with it, and
        once more with None at the end.
        """
        live: Holders = {}
        outputs: Holders = {}
        for node in self.tape.nodes:
            if observe is not None:
                observe(node)
            for value, holder in self._execute(node, live, self._source(live)).items():
                held = keep(value)
                if held:
                    self.kept[value] = private_copy(holder) if self._overwritten(value) else holder
                if self.tape.values[value].output:
                    outputs[value] = self.kept[value] if held else holder
                live[value] = holder
            for value in [v for v in live if self.tape.values[v].last <= node.index]:
                del live[value]
        if observe is not None:
            observe(None)
        return outputs

    def _overwritten(self, value: int) -> bool:
        """Whether a later operation writes into the memory of this value.

        To keep the value, it must then be copied.
        """
        return any(w.old == value for r in self.tape.values[value].readers for w in self.tape.nodes[r].writes)

    def _source(self, live: Holders) -> Callable[[int], Tensor]:
        def source(value: int) -> Tensor:
            holder = live.get(value)
            return self.tape.externals[value] if holder is None else holder

        return source

    def golden(self, value: int) -> Tensor:
        """A tensor on the golden memory of a value, which must not be written to."""
        holder = self.tape.externals.get(value)
        if holder is None:
            holder = self.kept.get(value)
        if holder is None:
            holder = self._remade.get(value)
        return self._make_again(value) if holder is None else holder

    def _make_again(self, value: int) -> Tensor:
        """Recompute a golden value from held values.

        Values without later readers are dropped on the way, so memory use is no higher than in a plain run. The others
        stay until the walk has passed their last reader, or until `forget`.
        """
        needed: set[int] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            producer = self.tape.values[current].producer
            if producer is None or current in self.kept or current in self._remade or producer in needed:
                continue
            needed.add(producer)
            stack += self.tape.nodes[producer].values
        for index in sorted(needed):
            node = self.tape.nodes[index]
            self._remade |= self._execute(node, {}, self.golden)
            self.drop_unread((v for v in (*node.values, *node.new_values) if v != value), index)
        return self._remade[value]

    def drop_unread(self, values: Iterable[int], index: int) -> None:
        """Drop recomputed golden values that no operation after ``index`` reads."""
        for value in values if self._remade else ():
            if self.tape.values[value].last <= index:
                self._remade.pop(value, None)

    def plan_to_hold(self, values: frozenset[int]) -> None:
        """Choose the golden values that `hold` will hold, and delete all test results."""
        self.planned = values
        for value in self.kept.keys() - values:
            del self.kept[value]
        for result in (self._golden_windows, self._remade, self.blocks):
            result.clear()
        for plan in ("row_plan", "in_place_plan", "separate_operations"):
            self.__dict__.pop(plan, None)

    def hold(self) -> None:
        """Compute the golden values that are planned to be held, unless all of them are held already."""
        if not self.planned <= self.kept.keys():
            self.run_golden(self.planned.__contains__)

    @cached_property
    def needs_golden_values(self) -> bool:
        """Whether a pass without held golden values ends in a plain run.

        This is true if Python reads a value back, which must be compared with golden.
        """
        return any(node.func is None for node in self.tape.nodes)

    def adopt(self, replayer: Replayer) -> None:
        """Copy the test results for blocks and single samples from a tape of the same structure."""
        self.blocks = dict(replayer.blocks)
        self.row_plan.adopt(replayer.row_plan)
        self.in_place_plan.adopt(replayer.in_place_plan)

    def drop_recomputed(self) -> None:
        """Drop all recomputed golden values, at the end of a pass."""
        self.passes += 1
        self._remade.clear()

    def golden_operand(self, node: Node, k: int) -> Tensor:
        window = self._golden_windows.get((node.index, k))
        if window is None:
            place = node.reads[k]
            window = view_window(self.golden(place.value), place)
            if place.value in self.kept or place.value in self.tape.externals:
                self._golden_windows[node.index, k] = window
        return window

    def at_hand(self, value: int) -> bool:
        """Whether a golden value is available without recomputing it."""
        return value in self.kept or value in self.tape.externals

    def is_all_golden(self, values: Holders) -> bool:
        """Whether all values are bit-identical to available golden values."""
        return all(v in self.kept and same_bits(h, self.kept[v]) for v, h in values.items())

    # -- trials ------------------------------------------------------------------------------------------------

    def run(self, starts: Sequence[TrialEntry], packed: bool = True) -> list[Holders | Diverged]:
        """Execute the operations that depend on the faults of some trials.

        A trial that corrupts parameters must be the only one. ``packed``: on rows, if corruption stays within samples
        or there are several trials.

        Returns:
            for each trial, holders of the output's values that differ from golden, or the reason why it must be run in
                full.
        """
        rows = packed and (len(starts) > 1 or any(s.value_faults or s.operand_faults for s in starts))
        if rows:
            self.row_plan.try_row_counts(self)
        return Walk(self, starts, self.row_plan if rows else None).run()

    @cached_property
    def row_plan(self) -> RowPlan:
        """The operations that can run on single samples; they must be tested before use."""
        return RowPlan(self.tape)

    @cached_property
    def in_place_plan(self) -> RowPlan:
        """The operations that can run on whole batches whose samples belong to different trials.

        They must be tested before use.
        """
        return RowPlan(self.tape, keeps_places=True)

    @cached_property
    def separate_operations(self) -> frozenset[int]:
        """The operations after which each sample can be evaluated separately.

        Only valid once the plans were tested.
        """
        return separate_operations(self)

    def step(self, node: Node, dirty: Holders, faults: Sequence[tuple[int, Fault]] = ()) -> Holders:
        """Run one operation on whole values and return the values that it writes.

        ``faults`` act on copies of its operands.
        """
        if node.func is None:
            self._check_readback(node, dirty)
            return {}
        for old, _ in node.writes:
            if old not in dirty:
                dirty[old] = private_copy(self.golden(old))
        tensors = [
            self.golden_operand(node, k) if (holder := dirty.get(w.value)) is None else tensor_at_window(holder, w)
            for k, w in enumerate(node.reads)
        ]
        restore_shared_arguments(node, tensors)
        for k, fault in faults:
            tensors[k] = corrupted_copy(tensors[k], fault)
        return self._call(node, tensors, dirty)

    def _check_readback(self, node: Node, dirty: Holders) -> None:
        (window,) = node.reads
        holder = dirty.get(window.value)
        if holder is None or window.value not in self.kept or not same_bits(holder, self.kept[window.value]):
            raise Diverged(f"{node.name} reads a value that differs")

    def blockwise(self, node: Node, dirty: Holders, offsets: Mapping[int, NDArray[np.int64]]) -> Holders | None:
        """Compute the blocks of outputs that corrupted weights affect.

        None if the whole operation must run.
        """
        blocks, reached = self.blocks.get(node.index), set[int]()
        golden = self.kept.get(blocks.out.value) if blocks is not None else None
        if blocks is None or golden is None or any(w.value in dirty for w in node.reads):
            return None
        for value in node.values:
            if value not in offsets:
                continue
            result = blocks.corrupted_blocks(value, offsets[value])
            if result is None:
                return None
            reached |= result
        if len(reached) * blocks.seconds > node.seconds:
            return None
        tensors = [self.golden_operand(node, k) for k in range(len(node.reads))]
        corrupted: Holders = {}
        for block in sorted(reached):
            part = blocks.compute(self.apply, tensors, block)
            if not equal_bits(part, blocks.golden_part(tensor_at_window(golden, blocks.out), block)):
                if not corrupted:
                    corrupted[blocks.out.value] = private_copy(golden)
                blocks.golden_part(tensor_at_window(corrupted[blocks.out.value], blocks.out), block).copy_(part)
        return corrupted

    def try_blocks(self) -> None:
        """Test which operations can be computed in blocks, if their golden values are available."""
        for node in candidates(self.tape):
            blocks = BlockwiseOperation(node)
            if not self.at_hand(blocks.out.value) or not all(map(self.at_hand, node.values)):
                continue
            tensors = [self.golden_operand(node, k) for k in range(len(node.reads))]
            golden = tensor_at_window(self.golden(blocks.out.value), blocks.out)
            if blocks.agrees(self.apply, tensors, golden) and blocks.seconds < node.seconds:
                self.blocks[node.index] = blocks

    # -- one operation -----------------------------------------------------------------------------------------

    def _execute(self, node: Node, live: Holders, source: Callable[[int], Tensor]) -> Holders:
        """Run one operation on golden values and return the values that it writes.

        ``live``: values that may be overwritten in place.
        """
        if node.func is None:
            return {}
        private = {old: live[old] if old in live else private_copy(source(old)) for old, _ in node.writes}
        tensors = [tensor_at_window(private[w.value] if w.value in private else source(w.value), w) for w in node.reads]
        restore_shared_arguments(node, tensors)
        return self._call(node, tensors, private)

    def _call(self, node: Node, tensors: list[Tensor], private: Mapping[int, Tensor]) -> Holders:
        """Run one operation on ``tensors`` and return the values that it writes.

        ``private``: memory that it may write into.
        """
        written: Holders = {new: private[old] for old, new in node.writes}
        result = self.apply(node, tensors)
        for part, expected in zip(flatten(result), node.results, strict=True):
            if isinstance(expected, StorageWindow):
                if not fits(part, expected):
                    raise Diverged(f"{node.name} returns a different shape")
                if expected.value in node.new_values and expected.value not in written:
                    written[expected.value] = part
            elif not _equal_values(part, expected):
                raise Diverged(f"{node.name} returns a different value to Python")
        return written

    def apply(self, node: Node, tensors: list[Tensor]) -> Any:
        args, kwargs = list(node.args), dict(node.kwargs)
        for (key, inner), tensor in zip(node.slots, tensors, strict=True):
            place: Any = args if isinstance(key, int) else kwargs
            if inner < 0:
                place[key] = tensor
            else:
                place[key] = list(place[key])
                place[key][inner] = tensor
        if node.generator is None:
            return node.func(*args, **kwargs)
        return self._apply_random(node, args, kwargs)

    def _apply_random(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation that draws random numbers, with the recorded state of the generator.

        The current state is restored afterwards.
        """
        assert node.generator is not None
        generator = default_generator_of(self.tape.device)
        now = generator.get_state()
        try:
            generator.set_state(node.generator[0])
            result = node.func(*args, **kwargs)
            if not torch.equal(generator.get_state(), node.generator[1]):
                raise Diverged(f"{node.name} draws a different number of random values")
            return result
        finally:
            generator.set_state(now)


def assemble_output(replayer: Replayer, dirty: Holders) -> Any:
    """The golden output of the run with the differing values replaced."""
    memo: dict[int, Any] = {}
    for leaf, window in replayer.tape.output_tensors:
        holder = dirty.get(window.value)
        memo[id(leaf)] = leaf.clone() if holder is None else view_window(holder, window)  # a judge may write into it
    return copy.deepcopy(replayer.tape.output, memo)


def _equal_values(left: Any, right: Any) -> bool:
    """Whether two Python values are equal; floats are compared by their bits."""
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex) and isinstance(right, complex):
        return _equal_values(left.real, right.real) and _equal_values(left.imag, right.imag)
    return type(left) is type(right) and bool(left == right)
