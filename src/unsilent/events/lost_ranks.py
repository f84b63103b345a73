"""Detection of ranks that were killed or have been silent for long, without a last event."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unsilent.events.event_kinds import DONE, Started
from unsilent.events.host import host_name, pid_namespace, process_exists
from unsilent.events.run_history import RankHistory, RunHistory
from unsilent.report.text import duration_text

LEAST_SILENCE = 600.0
"""Seconds without an event before a rank counts as silent: an evaluation or a checkpoint may take long between two steps."""
MOST_GAPS = 10
"""Longest silence, as a multiple of the longest time between two events of the rank so far, before it counts as silent."""


def gone_processes(history: RunHistory) -> set[int]:
    """Ranks without a last event whose process has ended, as far as this host can tell.

    Read the events once more after this: a process writes its last event before it ends.
    """
    starts = [rank.started for rank in history.ranks if rank.started and not rank.ended]
    near = [started for started in starts if _is_near(started)]
    return {started.rank for started in near if not process_exists(started.process, started.time)}


def find_lost(
    history: RunHistory, written: Mapping[int, float], gone: Collection[int], now: float
) -> tuple[dict[int, str], bool]:
    """Sentences by rank on why ranks are lost, and whether no rank writes events any more.

    Args:
        history: History of the job.
        written: Time of the last write to each rank's file, in seconds since 1970.
        gone: Result of `gone_processes`.
        now: Current time in seconds since 1970.
    """
    running = [rank for rank in history.ranks if rank.ended is None]
    silent = {rank.rank: s for rank in running if (s := now - written[rank.rank]) > _patience(rank)}
    lost: dict[int, str] = {}
    for rank in running:
        last = f"; the last is of step {rank.last_step:,}" if rank.last_step >= 0 else ""
        host = rank.started.host if rank.started else "unknown host"
        if rank.rank in gone and rank.started:
            lost[rank.rank] = (
                f"rank {rank.rank}: its process {rank.started.process} on {host} does not exist any more, and wrote no last "
                f"event{last}"
            )
        elif rank.rank in silent and not (rank.started and _is_near(rank.started)):
            lost[rank.rank] = (
                f"rank {rank.rank} ({host}) has written no event for {duration_text(silent[rank.rank])}, before one at least "
                f"every {duration_text(rank.longest_gap)}{last}"
            )
    missing = history.missing_ranks
    stands_still = all(rank.rank in lost or rank.rank in silent for rank in running)
    if missing and stands_still and not any(rank.ended and rank.ended.how == DONE for rank in history.ranks):
        for number in missing:
            lost[number] = f"there are no events of rank {number}, and the other ranks have not ended well"
    return lost, bool(lost) and stands_still


def _patience(rank: RankHistory) -> float:
    """Seconds without an event until a rank counts as silent."""
    return max(LEAST_SILENCE, MOST_GAPS * rank.longest_gap)


def _is_near(started: Started) -> bool:
    """Whether a rank's process is in this host's and container's process namespace."""
    return (started.host, started.pid_namespace) == (host_name(), pid_namespace())
