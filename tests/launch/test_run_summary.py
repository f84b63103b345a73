"""The last line of ``unsilent run``, made of events."""

from __future__ import annotations

from pathlib import Path

from events import made_events as made
from unsilent.launch.run_summary import RunSummary


def line(*events, path=None):
    summary = RunSummary(path)
    for event in events:
        summary(event)
    return summary.text


def test_ranks_that_differ_are_an_alarm():
    said = line(made.replicas_alarm(3), made.verdict(3, suspect=-1, ranks=(0, 1)), made.ended(9), path=Path("e.jsonl"))
    assert said.startswith("1 alarm in 9 steps; first in step 3: parameters differ between ranks 0, 1; each tensor")
    assert said.endswith("; see unsilent watch e.jsonl")


def test_an_alarm_of_ranks_that_differ_names_no_rank_where_none_is_known_to_be_wrong():
    alarm = made.replicas_alarm(3)
    assert str(alarm) == alarm.summary
    assert alarm.summary.endswith("; this comparison does not tell which of them is wrong")
    assert str(made.replicas_alarm(3, rank=2, ranks=(2,), of=4)).endswith(", in rank 2 (node-7, cuda:2)")


def test_monitors_one_after_the_other_are_summed_up():
    ends = [made.ended(10, cost=0.5, seconds=1.0, longest_wait=9, unjudged=2), made.ended(90, cost=0.0, seconds=99.0)]
    assert line(*ends) == (
        "no alarm in 100 steps; each tensor was read at least once every 9 steps, 2 series had too few values to be judged; "
        "the monitor took 0.5 % of the time"
    )


def test_series_that_were_never_read_are_no_part_of_what_was_read():
    said = line(made.ended(50, longest_wait=1, unseen=("gradient fc.bias max",), unseen_count=3))
    assert "; each tensor was read in every step except 3 series, which were never read; " in said
    assert "; no step was read; " in line(made.ended(50, longest_wait=0, unseen_count=3))
    both = line(made.ended(50, longest_wait=0), made.ended(50, longest_wait=1))
    assert "; each tensor was read at least once every 51 steps; " in both


def test_a_run_that_continues_a_training_says_of_which_steps_it_speaks():
    said = line(made.started(first_step=60), made.ended(40))
    assert said.startswith("no alarm in 40 steps from step 60 of the training on; each tensor")
    assert line(made.started(first_step=0), made.ended(40)).startswith("no alarm in 40 steps; each tensor")


def test_a_verdict_on_a_warning_says_nothing_of_other_ranks():
    said = line(made.verdict(3, suspect=0, reason="one rank", ranks=(0,)), made.ended(9))
    assert said.startswith("no alarm in 9 steps of rank 0; verdict in step 3: ")
    assert "another rank" not in said


def test_the_record_of_the_first_alarm_is_named():
    summary = RunSummary(Path("e.jsonl"))
    for event in (made.alarm(4), made.verdict(4), made.incident(4), made.ended(10, alarms=1)):
        summary(event)
    assert summary.text.endswith("; see unsilent watch e.jsonl and unsilent incident show runs/incidents/4-0a1b2c3d")
