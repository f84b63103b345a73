"""Ranks of a job that wrote no last event and write none any more: killed, or silent for long."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unsilent.events.event_kinds import DONE, Started
from unsilent.events.host import host_name, pid_namespace, process_exists
from unsilent.events.run_history import RankHistory, RunHistory
from unsilent.report.text import duration_text

LEAST_SILENCE = 600.0
"""Seconds without an event before a rank counts as silent: an evaluation or a checkpoint may take long between two steps."""
MOST_GAPS = 10
"""The same, as a multiple of the longest time between two of its events so far."""


def gone_processes(history: RunHistory) -> set[int]:
    """Ranks without a last event whose process is known not to exist; of other hosts and containers nothing is known.

    Events are to be read once more after this: a process writes its last one before it ends.
    """
    starts = [one.started for one in history.ranks if one.started and not one.ended]
    return {
        started.rank for started in starts if _is_near(started) and not process_exists(started.process, started.time)
    }


def find_lost(
    history: RunHistory, written: Mapping[int, float], gone: Collection[int], now: float
) -> tuple[dict[int, str], bool]:
    """Why ranks are lost, as sentences by rank, and whether no other rank writes any more.

    Args:
        history: Of the job.
        written: When the file of each rank was written last, seconds since 1970.
        gone: As `gone_processes`.
        now: Seconds since 1970.
    """
    running = [one for one in history.ranks if one.ended is None]
    silent = {one.rank: s for one in running if (s := now - written[one.rank]) > _patience(one)}
    lost: dict[int, str] = {}
    for one in running:
        last = f"; the last is of step {one.last_step:,}" if one.last_step >= 0 else ""
        host = one.started.host if one.started else "unknown host"
        if one.rank in gone and one.started:
            lost[one.rank] = (
                f"rank {one.rank}: its process {one.started.process} on {host} does not exist any more, and wrote no last "
                f"event{last}"
            )
        elif one.rank in silent and not (one.started and _is_near(one.started)):
            lost[one.rank] = (
                f"rank {one.rank} ({host}) has written no event for {duration_text(silent[one.rank])}, before one at least every "
                f"{duration_text(one.longest_gap)}{last}"
            )
    missing = history.missing_ranks
    stands_still = all(one.rank in lost or one.rank in silent for one in running)
    if missing and stands_still and not any(one.ended and one.ended.how == DONE for one in history.ranks):
        lost |= {
            rank: f"there are no events of rank {rank}, and the other ranks have not ended well" for rank in missing
        }
    return lost, bool(lost) and stands_still


def _patience(rank: RankHistory) -> float:
    """Seconds without an event until a rank counts as silent."""
    return max(LEAST_SILENCE, MOST_GAPS * rank.longest_gap)


def _is_near(started: Started) -> bool:
    """Whether the number of the process means the same here."""
    return (started.host, started.pid_namespace) == (host_name(), pid_namespace())
