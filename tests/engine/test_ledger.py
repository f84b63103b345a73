"""What the planner makes of costs; times are made up here, so that nothing hangs on the machine."""

from __future__ import annotations

from unsilent.engine.trial_costs import COMPARED, ENOUGH, TrialCosts

KEY = ("param:a", 0)


def ledger(shortcut: float, plain: float = 1.0, guess: float = 1.0, trials: int = 400) -> tuple[TrialCosts, list[bool]]:
    """A ledger after trials of one class whose ways cost so much, and which of them ran plainly."""
    found, plainly = TrialCosts([guess]), []
    for _ in range(trials):
        plainly.append(found.is_plain_run_due(KEY))
        if plainly[-1]:
            found.add_plain(KEY, plain)
        else:
            found.add(KEY, shortcut)
    return found, plainly


def test_a_cheap_shortcut_is_never_left() -> None:
    assert not any(ledger(0.3)[1])


def test_a_dear_shortcut_is_left_and_tried_ever_more_seldom() -> None:
    found, plainly = ledger(1.5)
    assert found.prefers_plain(KEY)
    assert [i for i, p in enumerate(plainly) if not p][ENOUGH + 1 :] == [ENOUGH + 64, ENOUGH + 128, ENOUGH + 256]


def test_a_near_shortcut_is_compared_with_plain_runs_made_among_the_trials() -> None:
    """A plain run is dearer at set-up, when caches are cold."""
    found, plainly = ledger(1.2, plain=1.0, guess=2.0)
    assert found.prefers_plain(KEY)
    assert sum(not p for p in plainly) < 10
    assert ledger(0.97)[0].prefers_plain(KEY)
    found, plainly = ledger(0.9, plain=1.0, guess=1.2)
    assert not found.prefers_plain(KEY)
    assert COMPARED <= sum(plainly) <= COMPARED + 3


def test_the_first_trial_of_a_class_is_no_measure() -> None:
    found = TrialCosts([1.0])
    found.add(KEY, 100.0)
    for _ in range(ENOUGH):
        found.add(KEY, 0.4)
    assert not found.prefers_plain(KEY)


def test_trials_that_fail_on_the_tape_are_held_against_their_own_plain_runs() -> None:
    """A trial that raises early is cheap plainly, and only its own plain run says so."""
    found = TrialCosts([1.0])
    for _ in range(ENOUGH + 1):
        found.add(KEY, 0.6, plain=0.1)
    assert found.prefers_plain(KEY)


def test_a_class_that_has_become_cheaper_is_taken_up_again() -> None:
    found, _ = ledger(1.1, trials=100)
    assert found.prefers_plain(KEY)
    for _ in range(40):
        found.add(KEY, 0.2)
    assert not found.prefers_plain(KEY)


def test_a_shortcut_that_is_well_below_is_not_compared_class_by_class() -> None:
    found, plainly = ledger(0.6)
    assert sum(plainly) <= COMPARED + 3
    for key in (("param:b", 0), ("param:c", 0)):
        for _ in range(20):
            assert not found.is_plain_run_due(key)
            found.add(key, 0.6)
