"""One pass along a tape for one trial or several, which runs the affected operations until no value differs.

Values that differ from golden are held in two forms: whole values, by trial, and `CorruptedRows`, the corrupted samples
of a value for all trials together. An operation that cannot run on rows gets the whole value. A trial whose real run
may take another path than the tape ends as `Diverged`; the others go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.sample_rows import LINE, CorruptedRows, RowPlan, Tag
from unsilent.engine.tape import (
    Diverged,
    FaultEntryPoint,
    Holders,
    Node,
    private_copy,
    restore_shared_arguments,
    tensor_at_window,
)
from unsilent.faults import Fault
from unsilent.sites.corrupting import corrupt, misfit
from unsilent.sites.memory import TensorMemory

if TYPE_CHECKING:
    from unsilent.engine.tape_replay import Replayer

LONGEST_GAP = 16
"""Largest number of operations between two comparisons with golden, on a device."""


@dataclass
class TrialEntry:
    """The values and operations on a tape at which the faults of a trial take effect.

    ``corrupted``: operations that read corrupted memory of the model. ``offsets``: positions of the corrupted bytes in
    the storage, by value. ``dirty``: values that differ from the beginning, private to the trial. ``value_faults``:
    faults in a value, which act from an operation on. ``operand_faults``: faults in operands of one operation: the
    index of the tensor, and the fault.
    """

    corrupted: set[int] = field(default_factory=set)
    offsets: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    dirty: Holders = field(default_factory=dict)
    value_faults: list[tuple[FaultEntryPoint, Fault]] = field(default_factory=list)
    operand_faults: dict[int, list[tuple[int, Fault]]] = field(default_factory=dict)


class Walk:
    """One pass over the tape of ``replayer`` for the trials ``starts``.

    ``plan``: the operations that can run on single samples (None: no operation).
    """

    def __init__(self, replayer: Replayer, starts: Sequence[TrialEntry], plan: RowPlan | None) -> None:
        self._replayer, self._tape, self._plan = replayer, replayer.tape, plan
        self._starts = starts
        self._full: list[Holders] = [dict(s.dirty) for s in starts]
        self._rows: dict[int, CorruptedRows] = {}
        self._lost: dict[int, Diverged] = {}
        self._gap, self._wait = 1, 1
        self._entering = sorted(  # the next fault is last; faults of one place are applied in the given order
            ((e.position, t, e, fault) for t, s in enumerate(starts) for e, fault in s.value_faults),
            key=lambda x: x[0],
        )[::-1]
        self._forced: dict[int, set[int]] = {}
        for trial, start in enumerate(starts):
            for index in start.corrupted | start.operand_faults.keys():
                self._forced.setdefault(index, set()).add(trial)
        self._heap = list(self._forced)
        for start in starts:
            for value in start.dirty:
                self._heap += self._tape.values[value].readers
            for entry, _ in start.value_faults:
                self._heap += [r for r in self._tape.values[entry.window.value].readers if r >= entry.position]
        heapq.heapify(self._heap)

    def run(self) -> list[Holders | Diverged]:
        """For each trial, the output values that may differ from golden, or the reason why it must be run plainly."""
        self._visit_all()
        self._enter_until(len(self._tape.nodes))  # faults after the last reader: only the output can show them
        for value in [v for v in self._rows if self._tape.values[v].output]:
            for trial in {t for t, _ in self._rows[value].tags}:
                self._whole(trial, value)
        return [
            self._lost.get(trial) or {v: h for v, h in dirty.items() if self._tape.values[v].output}
            for trial, dirty in enumerate(self._full)
        ]

    def _visit_all(self) -> None:
        previous = -1
        while self._heap:
            index = heapq.heappop(self._heap)
            if index == previous:
                continue
            previous = index
            self._enter_until(index)
            self._visit(self._tape.nodes[index])

    # -- one operation -----------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        if not self._rows and len(self._starts) == 1:  # nothing to pack: a short path for the usual case
            dirty = self._full[0]
            if not self._lost and (node.index in self._forced or any(v in dirty for v in node.values)):
                results = self._run_alone(node, 0)
                self._forget_spent(node.values, node.index)
                self._take(0, results, node)
            return
        read = node.values
        alone = {t for t, dirty in enumerate(self._full) if any(v in dirty for v in read)}
        alone |= self._forced.get(node.index, set())
        tags = [tag for v in read if v in self._rows for tag in self._rows[v].tags]
        packed = {trial for trial, _ in tags} - alone
        calls = None
        if packed and self._plan is not None:
            tags = sorted({tag for tag in tags if tag[0] in packed})
            calls = self._plan.call_sizes(node.index, len(tags))
            if calls is None:
                alone |= packed
        made_rows = self._run_rows(node, tags, calls) if calls else {}
        whole = {trial: self._run_alone(node, trial) for trial in sorted(alone - self._lost.keys())}
        self._forget_spent(read, node.index)
        self._take_rows(made_rows, node)
        for trial, values in whole.items():
            self._take(trial, values, node)

    def _run_alone(self, node: Node, trial: int) -> Holders:
        """Run an operation on whole values for one trial."""
        replayer, start, dirty = self._replayer, self._starts[trial], self._full[trial]
        for value in node.values:
            if value in self._rows:
                self._whole(trial, value)
        try:
            if node.index in start.corrupted and node.index not in start.operand_faults:
                changed = replayer.blockwise(node, dirty, start.offsets)
                return replayer.step(node, dirty) if changed is None else changed
            faults = start.operand_faults.get(node.index, ())
            for k, fault in faults:  # written memory is corrupted in place
                if k in node.written:
                    self._corrupt_whole(trial, FaultEntryPoint(node.index, node.reads[k]), fault)
            return replayer.step(node, dirty, [(k, f) for k, f in faults if k not in node.written])
        except Diverged as why:
            self._lose(trial, why)
            return {}

    def _take(self, trial: int, results: Holders, node: Node) -> None:
        """Store the results of an operation for one trial as corrupted values, unless they are golden."""
        live = {v: h for v, h in results.items() if not self._spent(v, node.index)}
        if not live or trial in self._lost:
            return
        dirty = self._full[trial]
        if not dirty and not self._has_rows_of_trial(trial) and self._looks() and self._replayer.is_all_golden(live):
            return
        shrink = len(self._starts) > 1 or node.index in self._starts[trial].operand_faults
        for value, holder in live.items():
            if not (shrink and self._shrink(trial, value, holder)):
                dirty[value] = holder
            self._push(value)

    def _looks(self) -> bool:
        """Whether to compare with golden now.

        Each comparison waits for a device, so comparisons on a device become rarer while they find differences.
        """
        if self._tape.device.type == "cpu":
            return True
        self._wait -= 1
        if self._wait > 0:
            return False
        self._gap = self._wait = min(2 * self._gap, LONGEST_GAP)
        return True

    def _take_rows(self, results: Mapping[int, CorruptedRows], node: Node) -> None:
        live = {v: rows for v, rows in results.items() if not self._spent(v, node.index)}
        frontier = not self._rows  # no other packed value is alive
        for value, rows in live.items():
            if frontier and len(live) == 1:
                rows = self._differing(value, rows)
            if rows.tags:
                self._rows[value] = rows
                self._push(value)

    def _push(self, value: int) -> None:
        for reader in self._tape.values[value].readers:
            heapq.heappush(self._heap, reader)

    def _spent(self, value: int, index: int) -> bool:
        entry = self._tape.values[value]
        return entry.last <= index and not entry.output

    def _forget_spent(self, values: frozenset[int], index: int) -> None:
        self._replayer.drop_unread(values, index)
        for value in values:
            if self._spent(value, index):
                self._rows.pop(value, None)
                for dirty in self._full:
                    dirty.pop(value, None)

    def _lose(self, trial: int, why: Diverged) -> None:
        self._lost[trial] = why
        self._full[trial] = {}
        for value in list(self._rows):
            self._drop_rows(trial, value)

    def _drop_rows(self, trial: int, value: int) -> None:
        left = self._rows[value].without({trial})
        if left.tags:
            self._rows[value] = left
        else:
            del self._rows[value]

    # -- rows --------------------------------------------------------------------------------------------------

    def _run_rows(self, node: Node, tags: list[Tag], calls: Sequence[int]) -> dict[int, CorruptedRows]:
        """Run an operation on single samples, in calls of the given sizes."""
        plan = self._plan
        assert plan is not None
        parts = {v: self._gather(v, tags) for v in node.values if plan.carries(v)}
        outputs: dict[int, list[Tensor]] = {}
        first = 0
        for size in calls:
            count = min(size, len(tags) - first)
            mine = {v: self._padded(v, words, first, count, size, bool(node.writes)) for v, words in parts.items()}
            results = self._call_on_rows(node, mine, size)
            results.update({w.new: mine[w.old] for w in node.writes})
            for value, words in results.items():
                outputs.setdefault(value, []).append(words[:count])
            first += count
        return {
            v: CorruptedRows(list(tags), parts[0] if len(parts) == 1 else torch.cat(parts))
            for v, parts in outputs.items()
        }

    def _call_on_rows(self, node: Node, rows: Mapping[int, Tensor], size: int) -> dict[int, Tensor]:
        """The results of an operation for ``size`` samples, as memory words by value.

        Its other operands are golden.
        """
        plan, replayer = self._plan, self._replayer
        assert plan is not None
        tensors = [
            plan.window(rows[w.value], w) if w.value in rows else plan.shared(replayer.golden_operand(node, k), size)
            for k, w in enumerate(node.reads)
        ]
        restore_shared_arguments(node, tensors)
        results = plan.results(node, replayer.apply(node, tensors), size)
        if results is None:
            raise Diverged(f"{node.name} returns a different shape for single rows")
        return results

    def _gather(self, value: int, tags: list[Tag]) -> Tensor:
        """The memory words of a value for some samples of trials, golden if they are not corrupted."""
        plan, rows = self._plan, self._rows.get(value)
        assert plan is not None
        if rows is not None and rows.tags == tags[: len(rows.tags)]:
            rest = [s for _, s in tags[len(rows.tags) :]]
            more = [plan.golden_rows(self._replayer.golden(value), rest)] if rest else []
            return torch.cat([rows.words, *more]) if more else rows.words
        words = plan.golden_rows(self._replayer.golden(value), [s for _, s in tags])
        if rows is not None:
            place = {tag: i for i, tag in enumerate(tags)}
            mine = [(place[tag], i) for i, tag in enumerate(rows.tags) if tag in place]
            words[[to for to, _ in mine]] = rows.words[[i for _, i in mine]]
        return words

    def _padded(self, value: int, words: Tensor, first: int, count: int, size: int, is_own: bool) -> Tensor:
        """The samples of one call, filled up to its size with golden samples.

        ``is_own``: whether they must be in separate memory.
        """
        assert self._plan is not None
        mine = words[first : first + count]
        if count == size:
            aligned = mine.storage_offset() * mine.element_size() % LINE == 0
            return mine.clone() if not aligned or (is_own and size < words.shape[0]) else mine
        return torch.cat([mine, self._plan.golden_rows(self._replayer.golden(value), [0] * (size - count))])

    def _differing(self, value: int, rows: CorruptedRows) -> CorruptedRows:
        """The corrupted samples that differ from golden."""
        assert self._plan is not None
        if not self._replayer.at_hand(value):
            return rows
        golden = self._plan.golden_rows(self._replayer.golden(value), [s for _, s in rows.tags])
        differs = (rows.words != golden).any(1).tolist()
        return rows if all(differs) else rows.select_rows(i for i, d in enumerate(differs) if d)

    def _has_rows_of_trial(self, trial: int) -> bool:
        return any(t == trial for rows in self._rows.values() for t, _ in rows.tags)

    def _whole(self, trial: int, value: int) -> None:
        """Convert the corrupted samples of a trial to a whole value."""
        rows = self._rows[value]
        mine = [i for i, (t, _) in enumerate(rows.tags) if t == trial]
        if not mine:
            return
        assert self._plan is not None
        holder = private_copy(self._replayer.golden(value))
        self._plan.words(holder)[[rows.tags[i][1] for i in mine]] = rows.words[mine]
        self._full[trial][value] = holder
        self._drop_rows(trial, value)

    def _shrink(self, trial: int, value: int, holder: Tensor) -> bool:
        """Convert a whole value to its differing samples if that is useful, and return whether it was done.

        The conversion is useful if other trials can share calls, or if few samples differ.
        """
        plan = self._plan
        if plan is None or not plan.carries(value) or not self._replayer.at_hand(value):
            return False
        words, golden = plan.words(holder), plan.words(self._replayer.golden(value))
        samples = (words != golden).any(1).nonzero().flatten().tolist()
        if len(samples) * 2 > plan.batch and len(self._starts) == 1:
            return False
        if samples:
            self._add_rows(value, [(trial, s) for s in samples], words[samples])
        return True

    def _add_rows(self, value: int, tags: list[Tag], words: Tensor) -> None:
        if (rows := self._rows.get(value)) is not None:
            tags, words = rows.tags + tags, torch.cat([rows.words, words])
        self._rows[value] = CorruptedRows(tags, words)

    # -- faults that enter on the way --------------------------------------------------------------------------

    def _enter_until(self, index: int) -> None:
        while self._entering and self._entering[-1][0] <= index:
            _, trial, entry, fault = self._entering.pop()
            if trial not in self._lost and not self._corrupt_rows(trial, entry, fault):
                self._corrupt_whole(trial, entry, fault)

    def _corrupt_whole(self, trial: int, entry: FaultEntryPoint, fault: Fault) -> None:
        """Inject a fault into a whole value."""
        dirty, value = self._full[trial], entry.window.value
        if value in self._rows:
            self._whole(trial, value)
        if value not in dirty:
            dirty[value] = private_copy(self._replayer.golden(value))
        corrupt(tensor_at_window(dirty[value], entry.window), fault)

    def _corrupt_rows(self, trial: int, entry: FaultEntryPoint, fault: Fault) -> bool:
        """Inject a fault into the affected samples of a value and hold only these samples.

        Returns False if that is not possible.
        """
        plan, window = self._plan, entry.window
        value = window.value
        if plan is None or not plan.carries(value) or value in self._full[trial] or fault.operation == "copy_from":
            return False
        golden = self._replayer.golden(value)
        if misfit(tensor_at_window(golden, window), fault):
            return False
        samples, places = plan.places(window, fault.elements)
        tags = [(trial, s) for s in sorted(set(samples.tolist()))]
        if 2 * len(tags) > plan.batch:
            return False
        known = self._rows.get(value)
        have = set(known.tags) if known is not None else set()
        fresh = [tag for tag in tags if tag not in have]
        if fresh:
            self._add_rows(value, fresh, plan.golden_rows(golden, [s for _, s in fresh]))
        rows = self._rows[value]
        row_of = {tag: i for i, tag in enumerate(rows.tags)}
        memory = TensorMemory(plan.elements(rows.words, window.dtype))
        chunk = memory.shape[1]
        where = np.array([row_of[trial, s] for s in samples.tolist()], np.int64) * chunk + places
        memory.write(where, fault.apply(memory.read(where)))
        return True
