"""Measures collectives of a running job on every grouping of its ranks, and fits a machine to the times.

A sweep runs each collective over each grouping of a hierarchy of ranks (the groupings that reduction programs are made of,
so also with several groups on one link at the same time) at several sizes. It gives two predictions: `fitted_system` gives
latency and bandwidth of each level, and `MeasuredTable` predicts a collective from the measurements of its own grouping, if there
are any.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.lazy_numpy import np
from unsilent.basics.plainfiles import parse_json, read_plain
from unsilent.placement.cost import ROOTED, AlphaBeta, StepCost, Traffic, traffic
from unsilent.placement.programs import COLLECTIVES
from unsilent.placement.synthesis import MOST_LEVELS, groupings
from unsilent.placement.system import MOST_DEVICES, Level, System
from unsilent.report.text import count_text

if TYPE_CHECKING:
    from unsilent.placement.execution import ProcessGroups

SIZES = (2**14, 2**17, 2**20, 2**22)
"""Payloads of one group in bytes."""
MOST_BYTES = 2**24
"""Largest file size in bytes of a sweep that is read."""
MOST_LOCAL = 64
"""Largest number of processes started on one computer."""
_FIELDS = itemgetter("collective", "groups", "payload", "seconds")


@dataclass(frozen=True)
class Measurement:
    """Measured time of one collective, run by all groups of a grouping at the same time.

    Attributes:
        collective: One of `unsilent.placement.programs.COLLECTIVES`.
        groups: The ranks of each group.
        payload: Bytes of the whole input of each rank (for an all-gather, of the whole result).
        seconds: Median over repeats of the slowest rank's time, in seconds.
    """

    collective: str
    groups: tuple[tuple[int, ...], ...]
    payload: int
    seconds: float


@dataclass(frozen=True)
class Sweep:
    """All measurements of a job, for each collective, grouping and size.

    Attributes:
        levels: Names of the levels, outermost first.
        counts: Number of components per level; their product is the number of ranks.
        backend: ``gloo`` or ``nccl``.
        rows: The measurements.
    """

    levels: tuple[str, ...]
    counts: tuple[int, ...]
    backend: str
    rows: tuple[Measurement, ...]

    def save(self, path: str | Path) -> None:
        """Write the sweep as JSON."""
        Path(path).write_text(json.dumps({"schema": "unsilent.placement.sweep/1", **asdict(self)}), "utf-8")


def load_sweep(path: str) -> Sweep:
    """Read a sweep from a file that `Sweep.save` wrote.

    Raises:
        UsageError: The file is not a sweep.
    """
    content = read_plain(path, MOST_BYTES, f"the sweep {path!r}")
    try:
        record = parse_json(content)
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != "unsilent.placement.sweep/1":
            raise ValueError(f"its schema is {schema!r}")
        rows = tuple(
            Measurement(
                str(collective), tuple(tuple(map(int, group)) for group in groups), int(payload), float(seconds)
            )
            for collective, groups, payload, seconds in map(_FIELDS, record["rows"])
        )
        sweep = Sweep(
            tuple(map(str, record["levels"])), tuple(map(int, record["counts"])), str(record["backend"]), rows
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is not a file of unsilent placement measure -o: {first_line(error)}") from None
    if len(sweep.counts) > MOST_LEVELS or max(sweep.counts, default=0) > MOST_DEVICES:  # their product may be huge
        raise UsageError(
            f"{path} has {len(sweep.counts):,} levels, or one of more than {MOST_DEVICES:,} components; expected what "
            "unsilent placement measure writes"
        )
    ranks = prod(sweep.counts)
    for row in rows:
        inside = all(0 <= rank < ranks for group in row.groups for rank in group)
        whole = row.groups and len({len(group) for group in row.groups}) == 1 and len(row.groups[0]) > 1
        if row.collective not in COLLECTIVES or not (inside and whole and row.payload > 0 and 0 < row.seconds < 1e9):
            raise UsageError(f"{path} has an impossible row: {row.collective} of {row.groups} in {row.seconds} s")
    if len(sweep.levels) != len(sweep.counts) or min(sweep.counts, default=0) < 1 or not rows:
        raise UsageError(
            f"{path} has levels {sweep.levels} with counts {sweep.counts} and {count_text(len(rows), 'row')}; expected a "
            "count of 1 or more for each level, and 1 row or more"
        )
    return sweep


def measure(counts: Sequence[int], levels: Sequence[str] = (), sizes: Sequence[int] = SIZES, repeats: int = 5) -> Sweep:
    """Measure this job, and return the sweep in every rank.

    Every rank calls this after ``torch.distributed.init_process_group``.

    Args:
        counts: Number of components per level of the machine, outermost first; ranks are numbered in this order.
        levels: Names of the levels; by default ``level0``, ``level1`` …
        sizes: Payloads in bytes.
        repeats: Number of repetitions of each measurement, spread over the whole sweep.

    Raises:
        UsageError: The product of the counts is not the number of ranks.
    """
    from torch import distributed

    from unsilent.placement.execution import ProcessGroups

    groups = ProcessGroups()
    ranks = distributed.get_world_size()
    if min(counts, default=0) < 1 or prod(counts) != ranks:
        raise UsageError(f"the levels {list(counts)} have {prod(counts)} devices, but the job has {ranks} ranks")
    names = tuple(levels) or tuple(f"level{number}" for number in range(len(counts)))
    if len(names) != len(counts):
        raise UsageError(f"{len(counts)} levels have {len(names)} names: {', '.join(names)}; expected one each")
    keys = [
        (collective, grouping.groups(counts), size)
        for grouping in groupings(counts)
        for collective in COLLECTIVES
        for size in sizes
    ]
    samples: dict[tuple[str, tuple[tuple[int, ...], ...], int], list[float]] = {key: [] for key in keys}
    for repeat in range(repeats + 1):
        for key in keys:
            seconds = _time(*key, groups)
            if repeat:  # the first call makes connections and allocates buffers
                samples[key].append(seconds)
    rows = tuple(Measurement(*key, sorted(times)[len(times) // 2]) for key, times in samples.items())
    return Sweep(names, tuple(counts), str(distributed.get_backend()), rows)


def measure_here(
    counts: Sequence[int], levels: Sequence[str] = (), sizes: Sequence[int] = SIZES, repeats: int = 5
) -> Sweep | None:
    """Measure the job of this process, or a job of new processes on this computer.

    See `measure`.

    Under torchrun every rank calls this; NCCL is used if there is a GPU, otherwise gloo. Rank 0 gets the sweep, and the others
    get ``None``. Without torchrun, one process for each device in ``counts`` is started on this computer, and gloo is used.

    Raises:
        UsageError: See `measure`; without torchrun also for a number of devices below 2 or above `MOST_LOCAL`.
    """
    from torch import cuda, distributed

    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        backend = "nccl" if cuda.is_available() and distributed.is_nccl_available() else "gloo"
        if backend == "nccl":
            cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group(backend)
        try:
            sweep = measure(counts, levels, sizes, repeats)
            return sweep if distributed.get_rank() == 0 else None
        finally:
            distributed.destroy_process_group()
    devices = prod(counts)
    if min(counts, default=0) < 1 or not 2 <= devices <= MOST_LOCAL:
        raise UsageError(
            f"the levels {list(counts)} have {count_text(devices, 'device')}; expected 2 to {MOST_LOCAL} on one computer; "
            "start larger jobs with torchrun"
        )
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(_local_rank, (folder, tuple(counts), tuple(levels), tuple(sizes), repeats), devices)
        return load_sweep(os.path.join(folder, "sweep.json"))


def _local_rank(
    rank: int, folder: str, counts: tuple[int, ...], levels: tuple[str, ...], sizes: tuple[int, ...], repeats: int
) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    meeting = f"file://{os.path.join(folder, 'meeting')}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=prod(counts))
    sweep = measure(counts, levels, sizes, repeats)
    if rank == 0:
        sweep.save(os.path.join(folder, "sweep.json"))
    distributed.barrier()
    os._exit(0)  # gloo's threads occasionally abort the process during an orderly shutdown


def _time(collective: str, groups: tuple[tuple[int, ...], ...], payload: int, pool: ProcessGroups) -> float:
    """Seconds from a barrier until the slowest rank has finished the collective."""
    import torch
    from torch import distributed

    from unsilent.placement.execution import Call, perform

    device = torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else None
    rank, mine = distributed.get_rank(), None
    for group in groups:
        handle = pool.of(group)
        if rank in group:
            whole, own_place = tuple(range(len(group))), (group.index(rank),)
            chunks_in = own_place if collective == "all-gather" else whole
            chunks_out = own_place if collective == "reduce-scatter" else whole
            mine = Call(collective, handle, len(group), group[0], chunks_in, chunks_out)
    rows = torch.zeros(len(groups[0]), max(1, payload // 4 // len(groups[0])), device=device)
    elapsed = torch.zeros(1, dtype=torch.float64, device=device)
    distributed.barrier()
    start = time.perf_counter()
    if mine is not None:
        perform(mine, rows)
    if device is not None:
        torch.cuda.synchronize(device)
    elapsed += time.perf_counter() - start
    distributed.all_reduce(elapsed, distributed.ReduceOp.MAX)
    return float(elapsed)


def fitted_system(sweep: Sweep, name: str = "measured") -> System:
    """The machine whose latencies and bandwidths fit the ring collectives of a sweep best.

    Each level is fitted to the all-reduces, reduce-scatters and all-gathers of the groups that extend over that level
    alone: by non-negative least squares of relative errors on hops times latency plus flows times bytes over bandwidth.
    Flows are counted as in `unsilent.placement.cost`, so a link that several groups share is fitted as one link.

    If transfer takes less than a tenth of the latency in every measurement of a level, the level is too fast for the sizes of the
    sweep. Its bandwidth is then the largest measured number of bytes per second, a lower bound, and ``source`` notes this.

    Raises:
        UsageError: A level has no measurement.
    """
    levels = tuple(Level(level, count, 1.0, 0.0) for level, count in zip(sweep.levels, sweep.counts, strict=True))
    unknown = System(name, levels, f"fitted to a sweep of {len(sweep.rows)} measurements over {sweep.backend}")
    fits = tuple(_fit(unknown, at, sweep) for at in range(len(levels)))
    bounds = [level.name for level, bounded in fits if bounded]
    note = f"; the bandwidth of {', '.join(bounds)} is a lower bound, as times hardly grow with the payload"
    source = unknown.source + (note if bounds else "")
    return replace(unknown, levels=tuple(level for level, _ in fits), source=source)


def _fit(system: System, at: int, sweep: Sweep) -> tuple[Level, bool]:
    """A level with fitted latency and bandwidth, and whether the bandwidth is a lower bound."""
    from scipy.optimize import nnls

    level = system.levels[at]
    if level.count == 1:
        return replace(level, bandwidth=1e12), False
    terms = []
    for row in sweep.rows:
        load = _traffic(system, row.groups)
        if row.collective in ROOTED or [n for n, size in enumerate(load.members) if size > 1] != [at]:
            continue
        rounds = 2 if row.collective == "all-reduce" else 1
        hops = rounds * (load.size - 1)
        terms.append((hops / row.seconds, load.ring[at] * hops / load.size * row.payload / row.seconds))
    if not terms:
        raise UsageError(f"the sweep has no group that extends over level {level.name} alone; measure it again")
    solution, _ = nnls(np.array(terms) * (1, 1e-9), np.ones(len(terms)))
    latency, per_gigabyte = map(float, solution)
    if all(rate * per_gigabyte * 1e-9 < hops * latency / 10 for hops, rate in terms):
        return replace(level, latency=latency, bandwidth=max(rate for _, rate in terms)), True
    return replace(level, latency=latency, bandwidth=1e9 / per_gigabyte), False


def _traffic(system: System, groups: Sequence[Sequence[int]]) -> Traffic:
    return traffic(system, np.array(groups))


Key = tuple[str, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class MeasuredTable:
    """Cost model that uses measured times: latency plus payload over bandwidth, fitted for each grouping.

    A grouping that was not measured (with another number of devices, levels or groups per link) is predicted by the fitted
    system's `AlphaBeta`.
    """

    system: System
    sweep: Sweep
    name: str = "measured table"

    def measured(self, collective: str, traffic: Traffic) -> list[Measurement]:
        """Measurements of a collective over such a grouping, or none if it was not measured."""
        return self._rows.get(_cache_key(collective, traffic), [])

    @cached_property
    def _rows(self) -> dict[Key, list[Measurement]]:
        rows: dict[Key, list[Measurement]] = {}
        for row in self.sweep.rows:
            rows.setdefault(_cache_key(row.collective, _traffic(self.system, row.groups)), []).append(row)
        return rows

    @cached_property
    def _lines(self) -> dict[Key, tuple[float, float]]:
        """Fitted seconds, and seconds per byte, for each collective and grouping."""
        from scipy.optimize import nnls

        lines = {}
        for key, rows in self._rows.items():
            terms = np.array([(1 / row.seconds, 1e-9 * row.payload / row.seconds) for row in rows])
            seconds, per_gigabyte = map(float, nnls(terms, np.ones(len(terms)))[0])
            lines[key] = (seconds, per_gigabyte * 1e-9)
        return lines

    def cost(self, collective: str, traffic: Traffic, payload: float) -> StepCost:
        """Predicted time of a collective, see `unsilent.placement.cost.CostModel.cost`."""
        modelled = AlphaBeta(self.system).cost(collective, traffic, payload)
        line = self._lines.get(_cache_key(collective, traffic))
        return (
            modelled if line is None else replace(modelled, seconds=line[0] + line[1] * payload, algorithm="measured")
        )


def _cache_key(collective: str, traffic: Traffic) -> Key:
    return (collective, traffic.size, traffic.members, traffic.ring)
