"""Operation tables of made-up jobs with data and pipeline parallelism: who computes when, step by step, without any gap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as arrow
import pyarrow.parquet as parquet

SEND, GATHER, REDUCE, CLIP, UPDATE = 1 / 128, 1 / 32, 1 / 16, 1 / 64, 1 / 8
"""Seconds, which are added without rounding."""


def usual(data_rank, stage, direction, micro_batch, step):
    """Seconds of a computation: backward takes twice as long."""
    return 1.0 if direction == "forward" else 2.0


@dataclass
class Pipeline:
    """A job whose table is made."""

    data_ranks: int = 2
    stages: int = 2
    chunks: int = 1
    micro_batches: int = 4
    steps: int = 3
    seconds: Callable = usual
    overlapped: bool = False
    has_data_parallel: bool = True
    lists_unsent: bool = False

    def rows(self):
        """Rows as dicts."""
        rows = []
        for step in range(self.steps):
            ends = [self._computed(rows, step, d) for d in range(self.data_ranks)]
            last = self._scatter(rows, step, ends) if self.overlapped else [clock for clock, _ in ends]
            self._finish(rows, step, last)
        counts = Counter()
        for row in sorted(rows, key=lambda one: one["start_ts"]):
            key = row["step"], row["rank"], row["optype"]
            row["seq_id"] = counts[key]
            counts[key] += 1
        return rows

    def write(self, path, change=lambda rows: rows, drop=()):
        """Write the table, with ``change`` applied to its rows, and without the columns ``drop``."""
        table = arrow.Table.from_pylist(change(self.rows()))
        parquet.write_table(table.drop(list(drop)), path)
        return path

    def _order(self, stage):
        """Computations of a stage: (direction, chunk, micro-batch); one forward, one backward where there are no chunks."""
        forward = [("forward", c, m) for c in range(self.chunks) for m in range(self.micro_batches)]
        backward = [("backward", c, m) for c in reversed(range(self.chunks)) for m in range(self.micro_batches)]
        if self.chunks > 1:
            return forward + backward
        warm = min(self.stages - stage - 1, self.micro_batches)
        order, forward = forward[:warm], forward[warm:]
        for at in range(self.micro_batches):
            order += [*forward[at : at + 1], backward[at]]
        return order

    def _add(self, rows, step, data_rank, stage, optype, start, end, chunk=-1, model_chunk=-1):
        rows.append({
            "dp_rank": data_rank, "stage": stage, "rank": stage * self.data_ranks + data_rank, "step": step, "optype": optype,
            "start_ts": start, "duration": end - start, "mc": chunk, "gmc": model_chunk, "mb_id": -1,
        })  # fmt: skip

    def _computed(self, rows, step, data_rank):
        """Adds all computations and messages of a data-parallel rank; when each stage ended, and each part of its model."""
        add = lambda *more: self._add(rows, step, data_rank, *more)  # noqa: E731
        last = self.stages * self.chunks - 1
        orders = [self._order(stage) for stage in range(self.stages)]
        clock, ended, free = [0.0] * self.stages, {}, defaultdict(float)
        for stage in range(self.stages) if self.has_data_parallel else ():
            for chunk in range(self.chunks):
                add(stage, "params-all-gather", chunk * GATHER, (chunk + 1) * GATHER, chunk)
        while any(orders):
            for stage, order in enumerate(orders):
                while order:
                    direction, chunk, batch = order[0]
                    model_chunk = chunk * self.stages + stage
                    outer = 0 if direction == "forward" else last
                    before = model_chunk + (-1 if direction == "forward" else 1)
                    start, posted = clock[stage], clock[stage]
                    if model_chunk != outer:
                        sent = ended.get((direction, before, batch))
                        if sent is None:
                            break
                        to, peer = (stage, f"{direction}-recv"), (before % self.stages, f"{direction}-send")
                        posted, sent = max(posted, free[to]), max(sent, free[peer])
                        free[to] = free[peer] = start = max(posted, sent) + SEND
                        add(*to, posted, start)
                        add(*peer, sent, start)
                    elif self.lists_unsent:
                        add(stage, f"{direction}-recv", posted, posted)
                    order.pop(0)
                    if direction == "forward" and self.has_data_parallel:
                        start = max(start, (chunk + 1) * GATHER)
                    clock[stage] = start + self.seconds(data_rank, stage, direction, batch, step)
                    ended[direction, model_chunk, batch] = clock[stage]
                    add(stage, f"{direction}-compute", start, clock[stage], chunk, model_chunk)
                    if self.lists_unsent and model_chunk == last - outer:
                        add(stage, f"{direction}-send", clock[stage], clock[stage])
        chunk_ends = defaultdict(float)
        for (_, model_chunk, _), end in ended.items():
            at = model_chunk % self.stages, model_chunk // self.stages
            chunk_ends[at] = max(chunk_ends[at], end)
        return clock, chunk_ends

    def _scatter(self, rows, step, ends):
        """Adds the reductions that begin when a part of a model has its gradients; when each stage is ready for the others."""
        ready = [list(clock) for clock, _ in ends]
        for stage in range(self.stages):
            free = [0.0] * self.data_ranks
            for chunk in reversed(range(self.chunks)):
                starts = [max(of[stage, chunk], free[d]) for d, (_, of) in enumerate(ends)]
                free = [max(starts) + REDUCE] * self.data_ranks
                for d, start in enumerate(starts):
                    self._add(rows, step, d, stage, "grads-reduce-scatter", start, free[d], chunk)
            for d in range(self.data_ranks):
                ready[d][stage] = max(ready[d][stage], free[d])
        return ready

    def _finish(self, rows, step, last):
        """Adds what follows when each stage is ready, ``last``."""
        clock = [list(of_stage) for of_stage in last]
        edge = {0, self.stages - 1}
        for d in range(self.data_ranks):
            for stage in edge:
                end = max(clock[d][other] for other in edge) + REDUCE
                self._add(rows, step, d, stage, "embedding-grads-all-reduce", last[d][stage], end)
            for stage in edge:
                clock[d][stage] = max(last[d][other] for other in edge) + REDUCE
        kinds = []
        if self.has_data_parallel:
            kinds = ["separate-grads-all-reduce" if self.overlapped else "grads-reduce-scatter"]
        for kind in kinds:
            for stage in range(self.stages):
                end = max(of[stage] for of in clock) + REDUCE
                for d in range(self.data_ranks):
                    self._add(rows, step, d, stage, kind, clock[d][stage], end, 0)
                    clock[d][stage] = end
        end = max(map(max, clock)) + CLIP
        for d in range(self.data_ranks):
            for stage in range(self.stages):
                self._add(rows, step, d, stage, "optimizer-clip-main-grad", clock[d][stage], end)
                self._add(rows, step, d, stage, "optimizer", end, end + UPDATE)
