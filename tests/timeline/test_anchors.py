"""Messages that compare clocks: between two threads with one clock, and where a rank does not come."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from unsilent.timeline import anchors
from unsilent.timeline.anchors import best_exchange, measure_offset


def test_the_fastest_exchange_counts():
    """What this rank's clock shows less what that of rank 0 shows, in the middle of the round trip; half of that is the bound."""
    exchanges = [(0, 1000, 9000), (20_000, 20_700, 21_000), (30_000, 39_000, 40_000)]
    assert best_exchange(exchanges) == pytest.approx((20_500e-9, -200e-9, 500e-9))


def test_three_ranks_with_one_clock(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    store, before = HashStore(), time.time()
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(measure_offset, store, "begin", rank, 3) for rank in range(3)]
        rows = [rank.result() for rank in ranks]
    assert rows[0][1:] == (0.0, 0.0)
    for seconds, offset, bound in rows:
        assert before <= seconds <= time.time()
        assert abs(offset) <= bound < 1


def test_a_rank_that_does_not_come_costs_a_wait(monkeypatch):
    monkeypatch.setattr(anchors, "WAIT_SECONDS", 0.05)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(OSError, match="timed out"):
        measure_offset(HashStore(), "begin", 0, 2)
    with pytest.raises(RuntimeError):  # rank 0 does not come
        measure_offset(HashStore(), "begin", 1, 2)
