"""The report of a monitored run: what it says of complete, killed, repeated and hostile jobs, as page, JSON and in a terminal."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from dataclasses import replace

import pytest

from conftest import in_process
from events import made_events as made
from report.conftest import HOSTILE
from report.test_report_html import BROWSER, Page, check_harmless, opened
from unsilent.events import run_history
from unsilent.events.event_kinds import Started
from unsilent.events.run_history import MOST_LATEST, RunHistory
from unsilent.events.run_report import report
from unsilent.events.sinks.json_lines import JsonLinesSink
from unsilent.render.report_page import figures_by_place, report_html, write_report


def events_of(job):
    return list(itertools.chain(*job.values()))


def written(folder, job=None):
    job = made.job(steps=600, alarms=((200, 1), (201, 1))) if job is None else job
    for rank, events in job.items():
        sink = JsonLinesSink(folder / "e.jsonl", rank, len(job))
        for event in events:
            sink(event)
    return folder


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


def test_the_headline_names_alarms_steps_and_suspect():
    assert report(events_of(made.job())).headline == "3 alarms in 12,000 steps of 2 ranks; rank 1 is suspected"
    assert report(events_of(made.job(600, 1, alarms=()))).headline == "no alarm in 600 steps of 1 rank"
    unknown = [made.started(), made.alarm(3), made.verdict(3, suspect=-1, reason="2 ranks")]
    assert report(unknown).headline == "1 alarm in 4 steps of 1 rank; the faulty rank is undetermined"
    alone = [made.started(), made.alarm(3), made.verdict(3, suspect=0, reason="one rank")]
    assert report(alone).headline == "1 alarm in 4 steps of 1 rank"
    early = [made.started(), made.summary(3, score=None)]
    assert report(early).headline == "no alarm in 4 steps of 1 rank; rules have judged no value yet"
    ended = report([*early, made.ended(9, unjudged=14)])
    assert ended.headline == "no alarm in 9 steps of 1 rank; 14 series had too few values to be judged"
    assert any("14 series had too few values" in one for one in ended.findings)
    assert report([]).headline == "no events yet"
    several = [*alone[:2], made.verdict(7, suspect=3), made.verdict(9, suspect=2)]
    assert report(several).headline.endswith("; ranks 2, 3 are suspected")


def test_what_ranks_do_not_share_is_not_said_of_all():
    def headline(steps, unjudged):
        ends = [made.ended(steps[n], n, unjudged=unjudged[n]) for n in range(2)]
        return report([event for n in range(2) for event in (made.started(n, 2), ends[n])]).headline

    assert headline((9, 12), (0, 0)) == "no alarm in 9 to 12 steps of 2 ranks"
    assert (
        headline((9, 9), (3, 7)) == "no alarm in 9 steps of 2 ranks; 7 series of rank 1 had too few values to be judged"
    )
    assert (
        headline((9, 9), (7, 0)) == "no alarm in 9 steps of 2 ranks; 7 series of rank 0 had too few values to be judged"
    )
    assert headline((9, 9), (7, 7)) == "no alarm in 9 steps of 2 ranks; 7 series had too few values to be judged"


def test_ranks_that_differ_are_alarms_everywhere():
    verdict = {"suspect": -1, "reason": "2 versions", "host": "", "device": "", "tensor": "", "action": "log"}
    events = [
        event for n in range(2)
        for event in (made.started(n, 2), made.replicas_alarm(3, n), made.verdict(3, n, **verdict), made.ended(9, n, alarms=1))
    ]  # fmt: skip
    history = RunHistory(events)
    assert history.headline == "2 alarms in 9 steps of 2 ranks; the faulty rank is undetermined"
    assert [one.health for one in history.ranks] == ["warning", "warning"]
    page = Page(report_html(report(events)))
    assert ("ranks 0, 1" in page.text, "2 alarms in 9 steps" in page.text) == (True, True)
    assert "which of them is wrong" in str(made.replicas_alarm(3))
    assert str(made.replicas_alarm(3, 2, ranks=(2,), of=4)).startswith(
        "step 3: parameters of rank 2 differ from those of other ranks, in rank 2"
    )


def test_a_verdict_that_all_ranks_report_is_one():
    history = RunHistory(events_of(made.job()))
    assert len(history.verdicts) == 1
    assert history.alarm_count == 3


def test_a_job_has_ended_when_all_that_wrote_events_have():
    job = made.job(60)
    assert RunHistory(events_of(job)).has_ended
    assert RunHistory(job[1]).has_ended  # rank 0 may write on another host
    assert not RunHistory([*job[0], *job[1][:-1]]).has_ended
    assert not RunHistory().has_ended


def test_a_job_that_was_killed_says_so():
    job = made.job()
    events = [*job[0][:50], *job[1]]
    (finding,) = report(events).findings
    assert finding.startswith("the events do not end for rank 0 (after step ")
    (finding,) = report(job[0]).findings
    assert finding == "1 of 2 ranks have no events"
    failed = report([made.started(), made.failed(3), made.ended(9)])
    assert "the monitor of rank 0 failed, the job goes on without it: ZeroDivisionError" in failed.findings[0]


def test_only_the_last_run_is_shown():
    earlier, later = made.job(600, 3, alarms=((20, 2),)), made.job(400, 2, alarms=())
    later = {rank: [replace(one, time=one.time + 5000) for one in events] for rank, events in later.items()}
    result = report([*events_of(earlier), *events_of(later)])
    assert result.headline == "no alarm in 400 steps of 2 ranks"
    assert result.findings == ("the files also hold 1 earlier run with 1 alarm, not shown here",)
    again = report([*earlier[2], *(replace(one, time=one.time + 5000) for one in earlier[2])])
    assert "1 earlier run with 1 alarm" in again.findings[0]


def continued(first_step, ranks, at=5000, **more):
    """A run without alarms that continues a training from a step."""
    return [
        replace(one, time=one.time + at, **({"first_step": first_step} if isinstance(one, Started) else more))
        for one in events_of(made.job(30, ranks, alarms=()))
    ]


def explained_run(step, ranks, suspect, first_step=0):
    """A run whose incident is explained and stops it; all ranks report both."""
    events = []
    for rank in range(ranks):
        events += [made.started(rank, ranks, first_step=first_step)]
        events += [made.alarm(step, rank)] if rank == suspect else []
        folder = f"/runs/incidents/{step}-0a1b2c3d"
        events += [made.incident(step, rank, suspect=suspect, folder=folder)]
        events += [made.explained(step, rank, suspect=suspect, fault="device", code="UNSILENT-D01", exit_code=17)]
        events += [made.ended(step + 1, rank, how="stopped")]
    return events


@pytest.mark.parametrize("suspect", [1, 3])
def test_alarms_of_the_runs_that_a_job_continued_are_said(suspect):
    events = [*explained_run(35, 4, suspect), *continued(30, 3)]
    result, history = report(events), RunHistory(events)
    assert result.headline == (
        "no alarm in 30 steps of 3 ranks, from step 30 of the training on; 1 alarm in an earlier run; "
        f"step 35: device (UNSILENT-D01), rank {suspect}, see incidents/35-0a1b2c3d"
    )
    assert result.findings[0] == "the run that this one continues had 1 alarm; its steps are not shown here"
    assert history.has_alarm
    assert result.further_json["earlier_alarms"] == 1
    assert result.further_json["earlier_incidents"] == [
        f"step 35: device (UNSILENT-D01), rank {suspect}, see incidents/35-0a1b2c3d"
    ]
    twice = RunHistory([*explained_run(35, 4, suspect), *explained_run(8, 2, 1, first_step=30), *continued(30, 2)])
    assert "; 2 alarms in 2 earlier runs; step 35: device (" in twice.headline
    assert "; step 38: device (" in twice.headline  # the eighth of a run that began with step 30


def test_a_job_that_begins_anew_does_not_have_the_alarms_of_another():
    events = [*explained_run(35, 2, 1), *continued(None, 2)]
    assert RunHistory(events).headline == "no alarm in 30 steps of 2 ranks"
    assert not RunHistory(events).has_alarm
    assert report(events).findings[0] == "the files also hold 1 earlier run with 1 alarm, not shown here"
    again = RunHistory([*events, *continued(10, 2, at=9000)])
    assert "earlier run" not in again.headline
    assert not again.has_alarm


def test_earlier_runs_take_bounded_memory():
    history = RunHistory()
    for number in range(500):
        for event in explained_run(number, 1, 0):
            history.add(event)
    history.add(made.started(first_step=1))
    assert len(history.earlier.incidents) == MOST_LATEST
    assert history.earlier.alarms == 500
    assert len(history.headline) < 500


def test_long_jobs_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(run_history, "MOST_SUMMARIES", 64)
    monkeypatch.setattr(run_history, "MOST_KEPT", 30)
    history = RunHistory([made.started()])
    for step in range(5000):
        history.add(made.summary(step, score=9.0 if step == 1234 else 0.1))
        history.add(made.alarm(step))
    (rank,) = history.ranks
    assert len(rank.summaries) <= 64
    assert max(one.score for one in rank.summaries) == 9.0
    assert [one.step for one in rank.summaries] == sorted(one.step for one in rank.summaries)
    assert rank.summaries[-1].step == 4999
    assert len(rank.alarms) == 30
    assert len(rank.latest_alarms) == MOST_LATEST
    assert history.alarm_count == 5000
    page = Page(report_html(report(itertools.chain(made.job(60)[0], (made.alarm(step) for step in range(5000))))))
    assert "The first 30 of 5,000" in page.text


def test_every_table_and_figure_is_there():
    result = report(events_of(made.job()), "e.jsonl", "unsilent report e.jsonl")
    assert set(figures_by_place(result)) == {"loss", "gradient-norm", "score"}
    page = Page(report_html(result))
    check_harmless(page)
    for words in (
        "Events of e.jsonl", "rank 1 is suspected", "model.layers.3.mlp.down_proj.weight", "the last 2 steps were executed again",
        "0.61 % of a step", "robust-z", "0.43 %", "node-7", "unsilent report e.jsonl", "2.13.0", "78 of gradient",
    ):  # fmt: skip
        assert words in page.text, words


def test_alarms_are_marked_where_they_are():
    figures = figures_by_place(report(events_of(made.job())))
    for name, figure in figures.items():
        (marks,) = [trace for trace in figure["data"] if trace["name"] == "alarm in rank 1"]
        assert marks["x"] == [4000, 4001, 9005], name
        lines = [one["x0"] for one in figure["layout"]["shapes"] if one.get("yref") == "paper"]
        assert lines == [4000, 4001, 9005]
    assert [trace["name"] for trace in figures["loss"]["data"]] == ["rank 0", "rank 1", "alarm in rank 1"]


def test_numbers_that_are_not_finite_are_gaps():
    values = [1.0, math.nan, math.inf, 2.0]
    events = [made.started(), *(made.summary(step, loss=value) for step, value in enumerate(values)), made.alarm(2)]
    loss = figures_by_place(report(events))["loss"]
    assert loss["data"][0]["y"] == [1.0, None, None, 2.0]
    crosses = loss["data"][1]
    assert (crosses["name"], crosses["x"], crosses["y"]) == ("not finite in rank 0", [1, 2], [1.0, 1.0])
    json.dumps(loss, allow_nan=False)
    nothing = [made.started(), made.summary(0, loss=None, gradient_norm=None, score=math.nan)]
    assert figures_by_place(report(nothing)) == {}


def hostile_events():
    names = itertools.cycle(HOSTILE)
    settings = {next(names): next(names), "deep": {"a": [1, {"b": next(names)}]}}
    yield made.started(
        host=next(names), device=next(names), settings=settings, notes=tuple(HOSTILE), series={next(names): 2}
    )
    for step in range(8):
        yield made.summary(step, health=next(names), loss=random.Random(step).choice([math.nan, -1e308, 1e308, 0.0]))
    for step in range(9):
        yield made.alarm(
            step,
            tensor=next(names),
            rule=next(names),
            level=next(names),
            feature=next(names),
            value=math.nan,
            host=next(names),
        )
    yield made.verdict(
        9, tensor=next(names), reason=next(names), outcome=next(names), action=next(names), suspect=2**60
    )
    yield made.sampling(10, reason=next(names))
    yield made.ended(11, unseen=tuple(HOSTILE), cost=math.inf, seconds=math.nan)


def test_hostile_names_are_only_text(tmp_path):
    written(tmp_path, {0: list(hostile_events())})
    page = Page(text := report_html(report(hostile_events(), HOSTILE[0], HOSTILE[1])))
    check_harmless(page)
    assert not [name for name in HOSTILE if "<" in name and name in text]
    for words in (("report", "e.jsonl"), ("report", "e.jsonl", "--plain"), ("watch", "e.jsonl", "--once")):
        done = in_process(*words, cwd=tmp_path)
        assert (done.stderr, "\x1b" in done.stdout, "\u202e" in done.stdout) == ("", False, False)
        assert done.stdout.count("\n") < 400
    json.loads(in_process("report", "e.jsonl", "--json", cwd=tmp_path).stdout, parse_constant=pytest.fail)


@pytest.mark.parametrize("words", ["watch e.jsonl --once", "watch e.jsonl --once --plain", "watch e.jsonl", "report e.jsonl",
                                   "report e.jsonl --plain"])  # fmt: skip
def test_names_of_any_length_and_kind_are_shown_in_no_time(words, tmp_path):
    name = "\x1b[2J" + "long " * 100_000
    job = (made.started(), "host"), (made.alarm(3), "tensor"), (made.verdict(3), "outcome"), (made.ended(9), "how")
    lines = (json.dumps({**event.to_json(), field: name}) for event, field in job)
    (tmp_path / "e.jsonl").write_text("\n".join(lines) + "\n")
    begun = time.process_time()
    done = in_process(*words.split(), cwd=tmp_path)
    assert (done.stderr, "\x1b" in done.stdout) == ("", False)
    assert "\\x1b[2J" in done.stdout or words == "report e.jsonl --plain"  # which has no names
    assert len(done.stdout) < 100_000
    assert time.process_time() - begun < 10


# -- command -------------------------------------------------------------------------------------------------------------


def test_the_report_of_a_run(folder):
    done = in_process("report", "e.jsonl", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 alarms in 600 steps of 2 ranks; rank 1 is suspected\n")
    assert done.stdout.endswith("Report: e.html\n")
    assert "rank 1 is suspected" in (folder / "e.html").read_text("utf-8")
    assert in_process("report", ".", "--plain", cwd=folder).stdout.endswith("# Report: events.html\n")
    values = json.loads(in_process("report", "e.jsonl", "--json", "-o", "x.html", cwd=folder).stdout)
    assert values["schema"] == "unsilent/run-report/1"
    assert [row["alarms"] for row in values["results"]] == [0, 2]
    assert values["settings"]["preset"] == "robust-z"
    assert values["report"] == "x.html"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.jsonl",), "there are no events in no.jsonl"),
        (("e.jsonl", "other.sqlite"), "Got unexpected extra argument"),
        (("e.jsonl", "--confidence", "0.9"), "No such option: --confidence"),
        (("e.jsonl", "-o", "e.jsonl"), "the report would overwrite the store e.jsonl"),
    ],
)
def test_wrong_words(words, said, folder):
    (folder / "e.jsonl").write_bytes((folder / "e.rank0.jsonl").read_bytes())
    done = in_process("report", *words, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("name", ["job", "hostile"])
@pytest.mark.slow
def test_browser_draws_it_without_a_word(name, tmp_path):
    result = report(hostile_events() if name == "hostile" else events_of(made.job()))
    path = write_report(result, tmp_path / "report.html")
    text, console = opened(path, tmp_path / "profile")
    assert console == []
    for figure in figures_by_place(result):
        start = text.index(f'id="figure-{figure}"')
        assert 'class="main-svg"' in text[start : start + 3000], figure


# -- incidents -----------------------------------------------------------------------------------------------------------


def with_incident(**more):
    """A job whose ranks all report the same incident, and what kind of fault it was."""
    job = made.job(steps=600, alarms=((200, 1),))
    for rank, events in job.items():
        events[-1:-1] = [made.incident(201, rank), made.explained(201, rank, **more)]
    return job


def test_the_incident_and_the_kind_of_fault_are_reported_once():
    history = RunHistory(events_of(with_incident()))
    assert history.incident == made.incident(201, 0)
    assert [one.fault for one in history.explained] == ["transient"]
    assert history.headline.endswith("; rank 1 is suspected; kind of fault: transient (UNSILENT-T01, minor)")
    values = history.as_json()
    assert (values["incident"]["folder"], values["incident"]["step"]) == ("runs/incidents/201-0a1b2c3d", 201)
    assert [one["fault"] for one in values["fault_verdicts"]] == ["transient"]
    found = report(events_of(with_incident())).findings
    assert sum("is recorded in runs/incidents/201-0a1b2c3d; see unsilent incident show" in one for one in found) == 1
    assert sum("5 clean replays (p < 0.6); go on" in one for one in found) == 1


def test_a_run_without_an_incident_has_none():
    history = RunHistory(events_of(made.job(steps=100, alarms=())))
    assert (history.incident, history.explained) == (None, [])
    assert history.as_json()["incident"] is None


def test_a_hostile_incident_is_harmless(tmp_path):
    text = " ".join(HOSTILE)
    job = with_incident(reason=text, fault=text)
    job[0].insert(1, made.incident(3, 0, folder=text))
    done = in_process("report", written(tmp_path, job), "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    check_harmless(Page((tmp_path / "page.html").read_text()))
