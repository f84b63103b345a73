"""Reads operation tables in the format of StragglerAnalysis as a `Job`.

The tables describe jobs with data and pipeline parallelism.

A row is one operation of one worker, with its type (`TYPES`), step, start and duration. The table has no dependencies;
`unsilent.timeline.pipeline` adds those that hold for such jobs. All steps, and all data-parallel ranks of a step, run the same
operations; a step in which they differ is left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import read_plain
from unsilent.report.text import count_text, listed
from unsilent.timeline.job import Edges, Job, Lane, Operations
from unsilent.timeline.pipeline import ACROSS, ALONE, LANES, STEP, TYPES, Pattern, dependencies
from unsilent.timeline.table_columns import LARGEST_NUMBER, MISSING_EXTRA, Floats, Integers, Rows, read_rows

MOST_WORKERS = 2**14
MOST_METADATA_BYTES = 2**12


def read_operation_table(path: str | Path) -> Job:
    """The job recorded in a Parquet file.

    The number of ranks is read from metadata beside the file (``meta-X.yaml`` for ``trace-X.parquet``).

    Raises:
        UsageError: The file is not such a table, ranks are missing or belong to two workers, or no step is complete.
    """
    path = Path(path)
    rows, names = read_rows(path)
    notes = []
    if (rows.type < 0).any():
        others = listed((name for name in names if name not in {sort.name for sort in TYPES}), 4)
        notes.append(f"{count_text(int((rows.type < 0).sum()), 'operation')} of unknown types left out: {others}")
        rows = rows.of(rows.type >= 0)
    ranks = _worker_ranks(rows, path)
    rows, note = _complete_steps(rows, ranks.shape, path)
    world_size = _world_size(path) or ranks.size
    if world_size > ranks.size:
        notes.append(f"{ranks.size:,} of {world_size:,} ranks were recorded, one of each data-parallel rank and stage")
    return _job(rows, ranks, world_size, [*notes, *note])


# -- which ranks and steps -----------------------------------------------------------------------------------------------


def _worker_ranks(rows: Rows, path: Path) -> Integers:
    """The rank of each data-parallel rank and stage, int64[data-parallel ranks, stages]."""
    workers = np.unique(np.stack([rows.data_rank, rows.stage, rows.rank], axis=1), axis=0)
    shape = tuple(workers[:, :2].max(axis=0) + 1) if len(workers) else (0, 0)
    for noun, seen in (("rank", workers[:, 2:]), ("pair of dp_rank and stage", workers[:, :2])):
        values, counts = np.unique(seen, axis=0, return_counts=True)
        if (counts > 1).any():
            twice = ", ".join(map(str, values[counts > 1][0]))
            raise UsageError(
                f"{path}: {noun} {twice} belongs to two workers; expected one rank for each dp_rank and stage"
            )
    if len(workers) > MOST_WORKERS:
        raise UsageError(f"{path} has operations of {len(workers):,} workers; expected {MOST_WORKERS:,} at most")
    if len(workers) != shape[0] * shape[1] or not len(workers):
        raise UsageError(
            f"{path} has operations of {len(workers):,} workers; expected {shape[0]:,} dp_rank x {shape[1]:,} stage "
            "(by their largest numbers); check that the trace is complete"
        )
    return workers[:, 2].reshape(shape)


def _complete_steps(rows: Rows, shape: tuple[int, ...], path: Path) -> tuple[Rows, list[str]]:
    """Rows of the steps that are equal on all data-parallel ranks, and notes on the other steps.

    Rows are ordered by step, data-parallel rank, stage, type and number, so that all ``(step, dp_rank)`` have the same sequence
    of operations.
    """
    steps, step = np.unique(rows.step, return_inverse=True)
    numbers = int(rows.number.max()) + 1
    if len(steps) * shape[0] > len(step):
        raise UsageError(
            f"{path} has {len(step):,} operations in {count_text(len(steps), 'step')} of {shape[0]:,} dp_rank; expected "
            "operations of each rank in each step"
        )
    unit = step * shape[0] + rows.data_rank
    key = (rows.stage * len(TYPES) + rows.type) * numbers + rows.number
    order = np.lexsort((key, unit))
    unit, key = unit[order], key[order]
    sizes = np.bincount(unit, minlength=len(steps) * shape[0])
    usual = np.bincount(sizes[sizes > 0]).argmax()
    ends = np.cumsum(sizes)
    candidates = np.flatnonzero(sizes == usual)
    keys = key[(ends - sizes)[candidates][:, None] + np.arange(usual)]
    patterns, of, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    most = int(counts.argmax())
    if bool(np.any(np.diff(patterns[most]) == 0)):
        raise UsageError(f"{path} has operations twice; expected one row for each rank, step, optype and seq_id")
    is_usual = np.zeros(len(sizes), bool)
    is_usual[candidates] = of.reshape(-1) == most
    complete: NDArray[np.bool_] = np.all(is_usual.reshape(len(steps), shape[0]), axis=1)
    left_out = steps[~complete]
    note = f"{len(left_out):,} of {count_text(len(steps), 'step')} left out because a rank lacks or repeats operations there"
    if not complete.any():
        raise UsageError(f"{path}: {note}; expected a step in which all data-parallel ranks have the same operations")
    notes = [f"{note}: {listed(map(str, left_out))}"] if len(left_out) else []
    return rows.of(order[complete[unit // shape[0]]]), notes


def _world_size(path: Path) -> int:
    """Number of ranks in the metadata file beside a table, or 0 without such a file."""
    beside = path.with_name(path.stem.replace("trace", "meta", 1) + ".yaml")
    if beside == path or not beside.exists():
        return 0
    try:
        import yaml
    except ImportError:
        raise UsageError(f"the metadata of an operation table {MISSING_EXTRA}") from None
    content = read_plain(beside, MOST_METADATA_BYTES)
    try:
        size = yaml.safe_load(content)["world_size"]
        if type(size) is int and 0 < size <= LARGEST_NUMBER:
            return size
    except (yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UsageError(
        f"{beside} does not say how large the job was; expected a line like world_size: 64, or no such file"
    )


# -- job -----------------------------------------------------------------------------------------------------------------


def _job(rows: Rows, ranks: Integers, world_size: int, notes: list[str]) -> Job:
    """The job of rows that are ordered as in `_complete_steps`."""
    steps, step = np.unique(rows.step, return_inverse=True)
    start, relative, note = _one_clock(rows, step)
    data_ranks, stages = ranks.shape
    units = len(steps) * data_ranks
    first = rows.of(np.arange(len(step) // units))
    pattern = Pattern(
        first.stage, first.type, first.number, first.chunk, first.model_chunk,
        *(np.median(times.reshape(units, -1), axis=0) for times in (relative, relative + rows.duration)),
    )  # fmt: skip
    edges, pairs = dependencies(pattern)
    of_worker = rows.data_rank * stages + rows.stage
    rank = ranks.reshape(-1)[of_worker]
    order = np.lexsort((start, rank))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    source, target, kind = np.array(edges, np.int64).reshape(-1, 3).T
    every_unit = np.arange(units)[:, None] * len(first.step)
    kind_of, phase_of, lane_of = (
        np.array([getattr(sort, name) for sort in TYPES])[rows.type[order]] for name in ("kind", "phase", "lane")
    )
    worker_place = np.argsort(np.argsort(ranks, axis=None))
    operations = Operations(
        rank[order].astype(np.int32), (worker_place[of_worker[order]] * len(LANES) + lane_of).astype(np.int32),
        rows.type[order].astype(np.int32), kind_of.astype(np.int8), phase_of.astype(np.int8), step[order].astype(np.int32),
        start[order], rows.duration[order], _collectives(pattern, pairs, len(steps), data_ranks)[order],
        np.full(len(order), -1, np.int64), np.full(len(order), -1, np.int8), tuple(sort.name for sort in TYPES),
    )  # fmt: skip
    lanes = tuple(Lane(int(rank), name, True) for rank in np.sort(ranks, axis=None) for name in LANES)
    stage_of = {int(rank): stage for stage in range(stages) for rank in ranks[:, stage]}
    sources, targets = (position[(every_unit + ends).reshape(-1)].astype(np.int32) for ends in (source, target))
    job_edges = Edges(sources, targets, np.tile(kind, units).astype(np.int8))
    return Job(operations, job_edges, lanes, tuple(map(int, steps)), stage_of, world_size, (*notes, *note))


def _one_clock(rows: Rows, step: Integers) -> tuple[Floats, Floats, list[str]]:
    """Starts since the begin of the job, starts since the begin of the step, and notes.

    If the clock restarts with each step, steps are placed one after the other.
    """
    count = int(step.max()) + 1
    begins, ends = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(begins, step, rows.start)
    np.maximum.at(ends, step, rows.start + rows.duration)
    relative = rows.start - begins[step]
    if np.all(begins[1:] >= ends[:-1]):
        return rows.start - begins[0], relative, []
    lengths = ends - begins
    laid = np.cumsum(lengths) - lengths
    return (
        laid[step] + relative,
        relative,
        ["the table's clock begins anew with each step; the time between steps is not known"],
    )


def _collectives(pattern: Pattern, pairs: list[list[int]], steps: int, data_ranks: int) -> NDArray[np.int32]:
    """The number of each operation's collective or message, int32[n]; -1 if it waits for no other rank."""
    waits = np.array([sort.waits for sort in TYPES])[pattern.type]
    own_stage = np.where(waits == ACROSS, pattern.stage, 0)
    key = np.stack([np.zeros_like(pattern.type), own_stage, pattern.type, pattern.number])
    for at, pair in enumerate(pairs):
        key[:, pair] = np.array([1, at, 0, 0])[:, None]
    group = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    is_pair = key[0] == 1
    of_step = ((waits == ACROSS) | (waits == STEP)) & ~is_pair
    unit = np.arange(steps * data_ranks)[:, None]
    scope = np.where(of_step, unit // data_ranks, steps + unit)
    numbers = np.unique(scope * (int(group.max()) + 1) + group, return_inverse=True)[1].reshape(scope.shape)
    return np.where((waits == ALONE) & ~is_pair, -1, numbers).reshape(-1).astype(np.int32)
