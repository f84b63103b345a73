"""One pass over a tape for many trials of faults in parameters, each evaluated on a few samples of the batch.

Only the rows of a trial's own samples are computed (`sample_rows`). The operations that read corrupted memory run for
each trial alone, while its faults are in memory. All later operations run on the rows of all trials together. A trial
with one sample therefore costs about that sample's share of the batch's evaluation.

For these samples, the result equals that of the whole batch under the fault, because every operation used here was
tested to treat samples independently and to give the same bits. A trial has to be run on the whole batch if another
operation follows its fault, or if the output has no row for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unsilent.basics.errors import UnsilentError
from unsilent.engine.sample_rows import CorruptedRows, Tag
from unsilent.engine.tape import Diverged, Holders, Node, private_copy
from unsilent.engine.walk import TrialEntry, Walk

if TYPE_CHECKING:
    from unsilent.engine.tape_replay import Replayer


@dataclass
class SampledEntry(TrialEntry):
    """A trial with faults in parameters that is evaluated on ``samples``.

    ``inject``: a function that puts the trial's faults in memory.
    """

    samples: Sequence[int] = ()
    inject: Callable[[], AbstractContextManager[object]] = nullcontext


class SampledWalk(Walk):
    """Evaluates several trials together, each on some of its samples."""

    def __init__(self, replayer: Replayer, entries: Sequence[SampledEntry]) -> None:
        super().__init__(replayer, entries, replayer.row_plan)
        self._entries, self._places = entries, replayer.in_place_plan
        for trial, entry in enumerate(entries):
            if entry.dirty:
                self._lose(trial, Diverged("the output is a parameter itself"))
            elif not entry.corrupted <= replayer.separate_operations:
                self._lose(trial, Diverged("an operation after the fault needs the whole batch"))

    @property
    def lost(self) -> dict[int, Diverged]:
        """For each trial that has to be run on the whole batch, the reason."""
        return self._lost

    def outputs(self) -> Iterator[tuple[list[Tag], Holders]]:
        """Outputs that contain the results of some trials and samples.

        Each comes with its trials and samples, and with tensors that hold the output's values. In one output, no sample
        belongs to two trials. A trial with a golden output is in none of them.
        """
        self._visit_all()
        tags = {tag for value, rows in self._rows.items() if self._tape.values[value].output for tag in rows.tags}
        for apart in without_shared_samples(sorted(tags)):
            yield apart, {v: self._batch_with(v, apart) for v in self._rows if self._tape.values[v].output}

    def _visit(self, node: Node) -> None:
        trials_entering = [t for t in sorted(self._forced.get(node.index, ())) if t not in self._lost]
        read = [self._rows[v].tags for v in node.values if v in self._rows]
        tags = max(read, key=len, default=[])  # in the order of the operand with most rows
        if any(tags_of_value is not tags and tags_of_value != tags for tags_of_value in read):
            tags = list(dict.fromkeys([*tags, *(tag for tags_of_value in read for tag in tags_of_value)]))
        if trials_entering:
            excepted = {(t, s) for t in trials_entering for s in self._entries[t].samples}
            tags = [tag for tag in tags if tag not in excepted]
        results = [self._run_together(node, tags)] if tags else []
        results += [self._run_own(node, trial) for trial in trials_entering]
        self._forget_spent(node.values, node.index)
        for value in {v for rows in results for v in rows if not self._spent(v, node.index)}:
            parts = [rows[value] for rows in results if value in rows and rows[value].tags]
            if parts:
                self._rows[value] = joined(parts)
                self._push(value)

    def _run_together(self, node: Node, tags: list[Tag]) -> dict[int, CorruptedRows]:
        try:
            return self._run_on(node, tags)
        except Diverged as why:
            for trial in {t for t, _ in tags}:
                self._lose(trial, why)
            return {}

    def _run_own(self, node: Node, trial: int) -> dict[int, CorruptedRows]:
        """Run an operation that reads corrupted memory of one trial.

        Samples with golden results are dropped.
        """
        entry = self._entries[trial]
        for value in node.values:
            self._replayer.golden(value)  # computed again if necessary, before parameters are corrupted
        try:
            with entry.inject():
                results = self._run_beside_golden(node, (trial, entry.samples[0])) if len(entry.samples) == 1 else None
                if results is None:
                    results = self._run_on(node, [(trial, s) for s in entry.samples])
            return {v: self._differing(v, rows) for v, rows in results.items()}
        except (UnsilentError, KeyboardInterrupt):
            raise
        except Diverged as why:
            self._lose(trial, why)
        except Exception as error:  # the run of the whole batch decides the outcome
            self._lose(trial, Diverged(f"{node.name} raised {type(error).__name__}"))
        return {}

    def _run_on(self, node: Node, tags: list[Tag]) -> dict[int, CorruptedRows]:
        """Run an operation on some samples.

        It runs in separate calls if possible, else in whole batches with each sample at its own position.
        """
        assert self._plan is not None
        carried = [v for v in node.values if self._places.carries(v)]
        calls = self._plan.call_sizes(node.index, len(tags)) if all(map(self._plan.carries, carried)) else None
        if calls is not None:
            return self._run_rows(node, tags, calls)
        if not self._places.sizes.get(node.index):
            raise Diverged(f"{node.name} needs the whole batch")
        parts = [self._run_in_place(node, apart, carried) for apart in without_shared_samples(tags)]
        return {v: joined([part[v] for part in parts]) for v in parts[0]}

    def _run_beside_golden(self, node: Node, tag: Tag) -> dict[int, CorruptedRows] | None:
        """Run an operation on one sample with golden operands, in one call with its golden neighbours.

        No copies are needed for this. None if this is not possible.
        """
        plan, replayer = self._plan, self._replayer
        assert plan is not None
        if node.writes or any(tag in self._rows[v].tags for v in node.values if v in self._rows):
            return None
        if any(self._places.carries(v) and not plan.carries(v) for v in node.values):
            return None
        calls = plan.call_sizes(node.index, 1)
        size = calls[0] if calls is not None else 0
        first = tag[1] // max(size, 1) * size  # a multiple, so that samples have the same places as in separate calls
        if not size or first + size > plan.batch:
            return None
        beside = {v: plan.words(replayer.golden(v))[first : first + size] for v in node.values if plan.carries(v)}
        results = self._call_on_rows(node, beside, size)
        place = tag[1] - first
        return {v: CorruptedRows([tag], words[place : place + 1]) for v, words in results.items()}

    def _run_in_place(self, node: Node, tags: list[Tag], carried: Iterable[int]) -> dict[int, CorruptedRows]:
        """Run an operation on the golden batch with some samples replaced by those of the trials."""
        results = self._replayer.step(node, {v: self._batch_with(v, tags) for v in carried})
        samples = torch.tensor([s for _, s in tags], device=self._tape.device)
        return {
            v: CorruptedRows(list(tags), self._places.words(holder).index_select(0, samples))
            for v, holder in results.items()
            if self._places.carries(v)
        }

    def _batch_with(self, value: int, tags: Sequence[Tag]) -> torch.Tensor:
        """The golden value of the whole batch with some samples replaced by those of the trials."""
        holder = private_copy(self._replayer.golden(value))
        rows = self._rows.get(value)
        if rows is not None:
            wanted = set(tags)
            mine = [i for i, tag in enumerate(rows.tags) if tag in wanted]
            self._places.words(holder)[[rows.tags[i][1] for i in mine]] = rows.words[mine]
        return holder


def joined(parts: Sequence[CorruptedRows]) -> CorruptedRows:
    """Several sets of corrupted samples of one value as one set."""
    if len(parts) == 1:
        return parts[0]
    return CorruptedRows([tag for part in parts for tag in part.tags], torch.cat([part.words for part in parts]))


def without_shared_samples(tags: Iterable[Tag]) -> list[list[Tag]]:
    """Split (trial, sample) pairs into as few lists as possible, with no sample twice in a list."""
    lists: list[list[Tag]] = []
    seen: dict[int, int] = {}
    for tag in tags:
        place = seen.get(tag[1], 0)
        seen[tag[1]] = place + 1
        if place == len(lists):
            lists.append([])
        lists[place].append(tag)
    return lists
