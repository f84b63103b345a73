"""Exchange among the ranks in each step: every rank receives one row of integers from each rank.

The rows are exchanged between CPUs, beside the training.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.detectors.rules import recorded_text
from unsilent.events.host import SLOT
from unsilent.recovery.rank_link import RankLink

TIMEOUT = datetime.timedelta(minutes=30)
"""Time after which a rank that sends nothing is an error; torch's default timeout."""
RANK_SETTINGS = frozenset({"events", "record", "metrics_port", "tensorboard", "save_to"})
"""Settings that may differ from rank to rank."""
LEAVING_SECONDS = 2.0
"""Seconds that a rank waits at its end for the rows of the others."""
MEETING_SECONDS = 30.0
"""Seconds that a rank waits at its beginning for the others."""
NOT_COMPARED = -1
"""Value sent instead of a fingerprint of replicas if a rank has none that others may compare."""
_log = logging.getLogger("unsilent.monitor")
_meetings: Counter[tuple[int, ...]] = Counter()
"""Meetings of these ranks so far."""
_missed: Counter[tuple[int, ...]] = Counter()
"""Meetings that some of these ranks missed; each makes the next wait half as long."""


class RanksApart(Exception):
    """Raised when the ranks are at different steps, so that they cannot agree."""


class RankRow(NamedTuple):
    """The numbers that a rank sends for one step.

    Attributes:
        step: Step of the monitor.
        level: Highest level of any rule, see `unsilent.detectors.rule`.
        score: Largest score of any rule.
        series: Number of the series with this score; -1 if there is none.
        is_shared: Whether that series depends on all ranks (updates, which follow from gradients of all ranks).
        is_new: Whether a rule found something in a series in which it found nothing before, or less.
        changed: Number of tensors whose bits differ from those after the step before.
        replicas: Hash of the fingerprints of the tensors that should be equal in all ranks after the step before; or
            `NOT_COMPARED`.
        gradients, values, state, rows: Sampling intervals that the rank needs.
        failed: Whether its monitor has failed.
        ended: Whether its monitor ends: this row is its last.
        has_shared: Whether any finding is in a shared series, not only the worst one.
    """

    step: int
    level: int = 0
    score: float = 0.0
    series: int = -1
    is_shared: int = 0
    is_new: int = 0
    changed: int = 0
    replicas: int = NOT_COMPARED
    gradients: int = 1
    values: int = 1
    state: int = 1
    rows: int = 1
    failed: int = 0
    ended: int = 0
    has_shared: int = 0

    def to_words(self) -> list[int]:
        """The row as integers."""
        return [*self[:2], struct.unpack("q", struct.pack("d", self.score))[0], *self[3:]]

    @classmethod
    def from_words(cls, words: list[int]) -> RankRow:
        """Restore a row from the integers of `to_words`."""
        return cls(words[0], words[1], struct.unpack("d", struct.pack("q", words[2]))[0], *words[3:])


class RankInfo(NamedTuple):
    """Identity of a rank, and the series that it monitors.

    ``run``: the rank's name for the run; the name that rank 0 sends is used.
    """

    rank: int
    host: str
    device: str
    settings: Mapping[str, Any]
    series: tuple[str, ...]
    run: str = ""


class Exchange:
    """Gathers the rows of all ranks, or only of this process without torch.distributed.

    Args:
        ranks: ``all``, ``alone`` or a process group.

    Attributes:
        link: Link between the same ranks, for other data that they exchange.
        rank, world_size: Rank of this process in the group, and size of the group.
        sent: Rows that not all ranks have answered, or whose answers have not been taken yet.
    """

    def __init__(self, ranks: Any = "all") -> None:
        self._group = _processor_group(ranks)
        self.link = RankLink(self._group)
        self.rank, self.world_size = self.link.rank, self.link.world_size
        self.sent: deque[_Sent] = deque()

    def introduce(self, info: RankInfo) -> list[RankInfo]:
        """Exchange the identities of all ranks.

        Raises ``UsageError`` in every rank if settings differ, except those in `RANK_SETTINGS`.
        """
        result = self.link.gather(info)
        for name in info.settings:
            values = [str(rank_info.settings.get(name)) for rank_info in result]
            if name not in RANK_SETTINGS and len(set(values)) > 1:
                values_text = ", ".join(f"{value} in rank {number}" for number, value in enumerate(values))
                raise UsageError(
                    f"the ranks have different settings of the monitor: {name} is {values_text}; give all ranks the same"
                )
        return result

    @property
    def outstanding(self) -> int:
        """Number of rows that were sent and whose answers were not received with `end` so far."""
        return len(self.sent)

    def begin(self, row: RankRow) -> None:
        """Start sending the row of a step, without waiting."""
        words = torch.tensor(row.to_words(), dtype=torch.int64)
        if self._group is None:
            self.sent.append(_Sent(None, [words]))
            return
        rows = [torch.empty_like(words) for _ in range(self.world_size)]
        self.sent.append(_Sent(dist.all_gather(rows, words, group=self._group, async_op=True), rows))

    def end(self, seconds: float = 0.0) -> list[RankRow] | None:
        """The rows of all ranks in the oldest step that is outstanding, or None.

        The rows are no longer outstanding afterwards.

        ``None`` if there is no such step, or a rank has not answered within the given seconds.
        """
        if not self.sent or not _wait(self.sent[0].is_complete, seconds):
            return None
        return self.sent.popleft().read()

    def drop(self) -> None:
        """Forget all rows that are outstanding.

        All ranks must do so together.
        """
        self.sent.clear()

    def is_open(self) -> bool:
        """Whether the other ranks can be reached.

        A program may end torch.distributed before the monitor.
        """
        try:
            return self._group is None or dist.get_rank(self._group) >= 0
        except (ValueError, RuntimeError):
            return False

    def close(self, last: RankRow | None = None) -> None:
        """Leave the process group of the ranks.

        ``last`` is the row that ranks get which make further steps. ``None`` if this rank ends by an error; ranks that wait for
        its row then get an error as well.
        """
        if last is not None:
            self.begin(last)
        is_done = _wait(lambda: all(sent.is_complete() for sent in self.sent), LEAVING_SECONDS)
        # A group that another thread waits for cannot be left: the process would hang until all ranks have answered.
        if self._group is not None and is_done and self.is_open():
            dist.destroy_process_group(self._group)
            self._group = None
            self.sent.clear()


class _Sent(NamedTuple):
    """Rows that are being exchanged; ``work`` is None if this process is alone."""

    work: Any
    rows: list[Tensor]

    def is_complete(self) -> bool:
        """Whether all rows have arrived, or the exchange has failed."""
        return self.work is None or self.work.is_completed()

    def read(self) -> list[RankRow]:
        """The rows of all ranks.

        Raises the error of an exchange that has failed.
        """
        if self.work is not None:
            self.work.wait()
        return [RankRow.from_words(row.tolist()) for row in self.rows]


def _wait(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, at most this many seconds; return whether it holds."""
    pause, deadline = 1e-5, time.monotonic() + seconds
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def _processor_group(ranks: Any) -> Any:
    """A new process group for messages between CPUs, or None if this process is alone."""
    if isinstance(ranks, str) and ranks not in ("all", "alone"):
        raise UsageError(f"ranks is {ranks!r}; expected 'all', 'alone' or a process group")
    if ranks == "alone" or not (dist.is_available() and dist.is_initialized()):
        return None
    members = list(range(dist.get_world_size())) if ranks == "all" else dist.get_process_group_ranks(ranks)
    if len(members) < 2:
        return None
    if not _all_meet(members):
        _log.warning(
            "not all ranks train a model now: some of %d ranks have not begun; this rank is monitored alone", len(members)
        )  # fmt: skip
        return None
    return dist.new_group(None if ranks == "all" else members, backend="gloo", timeout=TIMEOUT)


def _all_meet(members: Sequence[int]) -> bool:
    """Whether all these ranks call this function within a time limit; all get the same answer.

    All ranks are needed to create a group. Without this check, a rank that trains alone would wait for the others, and they
    perhaps for it.
    """
    store, who = dist.distributed_c10d._get_default_store(), tuple(members)
    answer = ""
    while not answer or store.check([answer]):  # a meeting that was given up before this rank came
        _meetings[who] += 1
        answer = f"unsilent/{'-'.join(map(str, who))}/{_meetings[who]}"
    if store.add(f"{answer}/came", 1) == len(who):
        store.compare_set(answer, "", "yes")
    _wait(lambda: store.check([answer]), MEETING_SECONDS / 2 ** _missed[who])
    has_met = bool(store.compare_set(answer, "", "no") == b"yes")
    _missed[who] += not has_met
    return has_met


def settings_by_name(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass by name as JSON values.

    Tuples stay tuples; a `Rule` object becomes its recorded text.
    """
    return {field.name: _json_value(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(item if isinstance(item, (int, float, str)) else recorded_text(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def device_name(device: torch.device) -> str:
    """The name of a device, with the model and the UUID of a CUDA device.

    Device numbers differ from job to job.

    Any other device is named with its slot if a launcher has assigned one.
    """
    if device.type != "cuda":
        return f"{device} slot {slot}" if (slot := os.environ.get(SLOT)) else str(device)
    return f"{device} {torch.cuda.get_device_name(device)} GPU-{torch.cuda.get_device_properties(device).uuid}"
