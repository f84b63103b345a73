"""How long a rank waits for others, and which rows it takes, with ranks that answer when a test says so."""

from __future__ import annotations

import pytest

from unsilent.monitor import agreement
from unsilent.monitor.agreement import MOST_AHEAD, Agreement
from unsilent.monitor.exchange import NOT_COMPARED, RankRow, RanksApart
from unsilent.monitor.settings import MonitorSettings


class Ranks:
    """Stands for an exchange; each wait takes the time that it may."""

    def __init__(self, clock):
        self.clock, self.sent, self.taken, self.answered = clock, [], 0, 0

    @property
    def outstanding(self):
        return len(self.sent) - self.taken

    def begin(self, row):
        self.sent.append(row)

    def end(self, seconds):
        if self.taken == self.answered:
            self.clock[0] += seconds
            return None
        self.taken += 1
        return [self.sent[self.taken - 1]] * 2


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(agreement.time, "perf_counter", lambda: now[0])
    return now


def make(clock, **options):
    ranks = Ranks(clock)
    return ranks, Agreement(ranks, MonitorSettings(**options))


def test_waiting_for_a_rank_that_is_behind_takes_no_more_than_a_second(clock):
    ranks, agreed = make(clock)
    for step in range(20):
        agreed.send(RankRow(step), True)
        assert list(agreed.receive()) == []
    assert clock[0] == agreed.seconds_waited == 1
    assert agreed.is_behind
    ranks.answered = 20
    assert [rows[0].step for rows in agreed.receive()] == list(range(20))
    assert not agreed.is_behind


def test_a_long_training_may_wait_as_long_as_its_budget_allows(clock):
    ranks, agreed = make(clock, budget=0.5)
    clock[0] = 1200.0
    for step in range(20):
        agreed.send(RankRow(step), True)
        ranks.answered = step
        list(agreed.receive())
        agreed.is_behind = False
    assert clock[0] - 1200 == pytest.approx(0.005 * 1200, rel=0.01)


def test_where_ranks_act_alike_a_rank_that_does_not_answer_ends_the_agreement(clock):
    _, agreed = make(clock, on_alarm="stop")
    agreed.send(RankRow(0), True)
    with pytest.raises(RanksApart, match="another rank has not made a step after 300 s"):
        list(agreed.receive())


def test_a_rank_does_not_run_ahead_for_ever(clock):
    _, agreed = make(clock)
    for step in range(MOST_AHEAD - 1):
        agreed.send(RankRow(step), True)
        assert list(agreed.receive()) == []
    agreed.send(RankRow(MOST_AHEAD), True)
    with pytest.raises(RanksApart, match=f"this rank is {MOST_AHEAD} steps ahead"):
        list(agreed.receive())


def test_replicas_are_compared_where_all_ranks_have_made_the_step(clock):
    ranks, agreed = make(clock)
    for step, answered in enumerate([1, 2, 2, 2, 5, 6, 7]):  # the other rank makes no steps for a while
        agreed.send(RankRow(step, replicas=10 + step), not agreed.is_behind)
        ranks.answered = answered
        list(agreed.receive())
    none = NOT_COMPARED
    assert [row.replicas for row in ranks.sent] == [none, 10, 11, none, none, none, 15]


def test_replicas_of_steps_that_are_made_again_are_forgotten(clock):
    ranks, agreed = make(clock, on_alarm="rerun")
    ranks.drop = lambda: None
    ranks.answered = 9
    for _ in range(2):
        agreed.send(RankRow(0, replicas=7), True)
        list(agreed.receive())
        agreed.drop()
    assert [row.replicas for row in ranks.sent] == [NOT_COMPARED] * 2
