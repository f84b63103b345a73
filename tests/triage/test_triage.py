"""``unsilent triage``: the order of queries with reasons, the search, its page, and one query alone."""

from __future__ import annotations

import json
import math

import pytest

from conftest import in_process
from events import made_events
from triage import made_triage as made
from unsilent.detectors.series import Recording, load_recording
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.triage import parts
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.findings import Blanks, Finding, Outcome, Query
from unsilent.triage.investigation import EXPLAINING, Executed, in_order, investigate, is_implied
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.runbook import ScoredQuery, scored_queries, signals_of


def first(path, count=1):
    bundle = Bundle(path)
    return [one.query.template for one in scored_queries(signals_of(bundle, candidates_of(bundle)))][:count]


# -- candidates ---------------------------------------------------------------------------------------------------------


def test_the_unusual_rank_comes_first_and_is_described_by_features(tmp_path):
    series = {2: made.spoiled(2, 88, 0, 1e6)}
    found = candidates_of(Bundle(made.folder(tmp_path, 4, series, alarms={2: (made.alarm(90, 2),)})))
    assert found.ranks[0].value == 2
    features = found.ranks[0].features
    assert (features.alarms, features.onset, features.position, features.nonfinite) == (1, -2, 1.0, 0.0)
    assert features.peer_score > 100
    assert features.past_ratio == pytest.approx(1e6, rel=0.1)
    assert found.ranks[-1].features.position == 0
    assert found.tensors[0].value == "fc.weight"
    assert [one.value for one in found.windows] == [(86, 90), (82, 96)]


@pytest.mark.parametrize("value", [0.0, 5e-324, 1.7e308, -1.7e308, math.nan, math.inf])
def test_no_number_is_too_large_or_small_for_features(tmp_path, value):
    for step in (61, 90):  # in the past, and in the window
        path = made.folder(tmp_path / str(step), 2, {1: made.spoiled(1, step, 0, value)})
        assert all(one.features.past_ratio >= 1 for one in candidates_of(Bundle(path)).ranks)
        assert investigate(path, is_run=True).executed


def test_numbers_of_ranks_play_no_part(tmp_path):
    """The same incident in another rank has the same features and the same queries, but for the number."""
    found = []
    for rank in (0, 3):
        series = {n: made.values(0) for n in range(4)} | {rank: made.spoiled(0, 90, 0, math.inf)}
        bundle = Bundle(made.folder(tmp_path / str(rank), 4, series, alarms={rank: (made.alarm(90, rank),)}))
        candidates = candidates_of(bundle)
        assert candidates.ranks[0].value == rank
        scored = scored_queries(signals_of(bundle, candidates))
        found.append((candidates.ranks[0].features, [(one.query.template, one.score, one.reason) for one in scored]))
    assert found[0] == found[1]


# -- the runbook --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"fault_verdict": FaultVerdict(kind="device", step=90, rank=0)}, "read-verdict"),
        ({"reason": "fingerprint"}, "compare-parameters"),
        ({"alarms": {0: (made_events.replicas_alarm(90, 0),)}}, "compare-parameters"),
        ({"alarms": {1: (made.alarm(90, 1, value=math.nan),)}}, "scan-nonfinite"),
        ({"series": {1: made.spoiled(1, 90, 0, 1e6)}}, "compare-gradients"),
        ({"series": {n: made.spoiled(n, 90 + n, 0, 1e6) for n in (0, 1)}}, "compare-gradients"),  # one is first
        ({"alarms": {n: (made.alarm(90, n),) for n in (0, 1)}}, "inspect-state"),
        ({"alarms": {0: (made.alarm(90, 0, feature="loss", tensor=""),)}}, "inspect-batch"),
        ({"series": {n: made.spoiled(n, 86, 2, 1e3) for n in (0, 1)}}, "find-onset"),
        ({"ranks": 1}, "inspect-batch"),
        ({}, "find-onset"),
    ],
)
def test_a_signal_puts_its_queries_first(tmp_path, more, expected):
    assert first(made.folder(tmp_path, **more)) == [expected]


def report(text):
    return lambda path: (path / parts.REPORT_FILE).write_text(text)


def shorter_series(path):
    """Rank 1 records fewer steps than rank 0."""
    file = path / "rank1" / "series.npz"
    recording = load_recording(file)
    Recording(recording.series, recording.values[:-4], recording.seen[:-4], recording.seconds[:-4]).save(file)
    values = json.loads((path / "rank1" / "rank.json").read_text())
    change = {**values, "series_steps": values["series_steps"][:-4]}
    (path / "rank1" / "rank.json").write_text(json.dumps(change))


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (shorter_series, "read-log"),
        (report("The job HANGS since noon."), "read-flight-record"),
        (report("no progress, stuck at step 90"), "read-flight-record"),
        (report("Training got slower by half"), "find-straggler"),
        (report("disk quota exceeded?"), "read-log"),
        (report("loss is NaN"), "scan-nonfinite"),
        (report("the loss spiked after restart"), "inspect-batch"),
        (report("replicas diverge"), "compare-parameters"),
        (report("please help"), "find-onset"),
        (lambda path: made.log(path, 1, "ValueError: x"), "read-log"),
        (lambda path: made.configurations(path, {"lr": 1}, {"lr": 2}), "compare-settings"),
    ],
)
def test_a_signal_of_an_optional_part_puts_its_queries_first(tmp_path, add, expected):
    path = made.folder(tmp_path)
    add(path)
    assert first(path) == [expected]


def test_without_an_alarm_and_series_what_the_job_printed_comes_first(tmp_path):
    assert first(made.folder(tmp_path, 0, world_size=2)) == ["read-log"]


def test_every_template_that_fits_has_a_query_and_a_reason(tmp_path):
    bundle = Bundle(made.folder(tmp_path, 2))
    scored = scored_queries(signals_of(bundle, candidates_of(bundle)))
    assert {one.query.template for one in scored} == set(TEMPLATES)
    assert len({one.query for one in scored}) == len(scored)
    assert all(0 < one.score <= 1 and one.reason for one in scored)
    alone = Bundle(made.folder(tmp_path / "alone", 1))
    asked = {one.query.template for one in scored_queries(signals_of(alone, candidates_of(alone)))}
    assert set(TEMPLATES) - asked == {"compare-gradients", "read-flight-record", "find-straggler"}


# -- the search ---------------------------------------------------------------------------------------------------------


def executed(template, outcome, ranks=(), step=None, **blanks):
    finding = Finding(outcome=outcome, text="", ranks=ranks, step=step)
    return Executed(ScoredQuery(Query(template, Blanks(**blanks)), 1.0, "why"), finding, 0.0)


def test_what_a_finding_implies_comes_last():
    wide, narrow = Query("find-onset", Blanks(steps=(80, 99))), Query("find-onset", Blanks(steps=(88, 92)))
    nothing = executed("find-onset", Outcome.NOTHING, steps=(80, 99))
    assert is_implied(narrow, [nothing])
    differs = executed("find-onset", Outcome.DIFFERS, (1,), 90, steps=(80, 99))
    assert is_implied(narrow, [differs])  # the first step of all is the first one there
    assert is_implied(Query("find-onset", Blanks(rank=1, steps=(85, 99))), [differs])
    assert not is_implied(Query("find-onset", Blanks(rank=0, steps=(85, 99))), [differs])
    assert not is_implied(Query("find-onset", Blanks(steps=(91, 99))), [differs])
    assert not is_implied(wide, [executed("find-onset", Outcome.NOTHING, steps=(88, 92))])
    assert not is_implied(Query("scan-nonfinite"), [nothing])
    assert not is_implied(Query("find-onset", Blanks(rank=1)), [executed("find-onset", Outcome.NOTHING, rank=0)])
    weak = ScoredQuery(Query("compare-settings"), 0.01, "")
    assert in_order([ScoredQuery(narrow, 1.0, ""), weak], [nothing]) == [weak, ScoredQuery(narrow, 1.0, "")]


def test_a_rank_that_a_finding_names_comes_sooner_and_cost_counts():
    queries = [ScoredQuery(Query("inspect-batch", Blanks(rank=rank)), 0.5, "") for rank in (0, 1)]
    assert in_order(queries, [executed("find-onset", Outcome.DIFFERS, ranks=(1,))]) == queries[::-1]
    costly, cheap = ScoredQuery(Query("test-device"), 1.0, ""), ScoredQuery(Query("find-onset"), 0.1, "")
    assert in_order([costly, cheap], []) == [cheap, costly]


def test_the_search_ends_where_the_fault_is_localised(tmp_path):
    found = investigate(made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, math.nan)}), is_run=True)
    assert found.localised is not None
    assert (found.localised.ranks, found.localised.step) == ((1,), 90)
    after = [one.finding is found.localised for one in found.executed].index(True)
    assert {one.query.query.template for one in found.executed[after + 1 :]} <= {*EXPLAINING}
    assert all(one.finding.outcome is not Outcome.LOCALISED for one in found.executed[:after])


def test_a_quiet_incident_ends_with_what_was_looked_for(tmp_path):
    found = investigate(made.folder(tmp_path, 2), is_run=True)
    names = [one.query.query.template for one in found.executed]
    assert set(names) == {name for name, one in TEMPLATES.items() if not one.command}
    assert len(names) == len(set(names))  # the answer of narrower ones is implied


# -- the command --------------------------------------------------------------------------------------------------------


def test_it_prints_the_first_queries_with_reasons_and_commands(tmp_path):
    path = made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, 1e6)})
    done = in_process("triage", tmp_path, "--order", "runbook", "--top", 2, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [one["template"] for one in shown["results"]] == ["compare-gradients", "find-onset"]
    assert shown["results"][0]["command"] == f"unsilent triage query compare-gradients {path}"
    assert "one rank is far from the others" in shown["results"][0]["reason"]
    assert "Run first: compare-gradients" in shown["headline"]


def test_it_runs_them_and_writes_a_page(tmp_path):
    made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, 1e6)})
    done = in_process("triage", tmp_path, "--run", "-o", tmp_path / "page.html")
    assert done.returncode == 1, done.stderr
    assert "Localised: step 90, rank 1, gradient fc.weight l2: a rank's own gradient" in done.stdout
    page = (tmp_path / "page.html").read_text()
    for text in ("Executed", "To run next", "unsilent triage query"):
        assert text in page


def test_nothing_found_claims_what_was_looked_for_and_no_more(tmp_path):
    made.folder(tmp_path, 2)
    done = in_process("triage", tmp_path, "--order", "runbook", "--run", "--plain")
    assert done.returncode == 0, done.stderr
    assert "Nothing was found by 7 queries" in done.stdout
    assert "healthy" not in done.stdout


def test_without_any_part_it_says_so(tmp_path):
    made.folder(tmp_path, 0, world_size=2, settings={"fingerprint": "off"})
    done = in_process("triage", tmp_path, "--run", "--plain")
    assert done.returncode == 0, done.stderr
    assert "there is no part of 2 of 2 ranks" in done.stdout
    assert "No query could be answered" in done.stdout


def test_names_from_a_folder_are_shown_without_control_characters(tmp_path):
    made.folder(tmp_path, 2, alarms={1: (made.alarm(90, 1, tensor="a\x1b[31mb"),)}, host="h\x1b[2J")
    done = in_process("triage", tmp_path, "--run", "-o", tmp_path / "page.html")
    assert "\x1b[31m" not in done.stdout + (tmp_path / "page.html").read_text()


def test_one_query_is_executed_alone(tmp_path):
    made.folder(tmp_path, 2, {1: made.spoiled(1, 86, 0, 1e6)})
    done = in_process("triage", "query", "find-onset", tmp_path, "--rank", 1, "--steps", "80..90", "--json")
    assert done.returncode == 1, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["step"], shown["ranks"], shown["outcome"]) == (86, [1], "differs")
    assert shown["blanks"] == {"rank": 1, "steps": [80, 90]}
    done = in_process("triage", "query", "replay-step", tmp_path)
    assert done.returncode == 0
    assert "run: unsilent incident replay" in " ".join(done.stdout.split())


def test_tools_prints_the_catalogue_without_an_incident():
    done = in_process("triage", "--tools")
    assert done.returncode == 0, done.stderr
    assert {one["name"] for one in json.loads(done.stdout)} == set(TEMPLATES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("triage",), "no folder was given"),
        (("triage", "nowhere"), "nowhere"),
        (("triage", "."), "if no alarm wrote one, make it with unsilent triage collect"),
        (("triage", ".", "--top", 0), "--top is 0"),
        (("triage", "query", "onset", "."), "unknown query 'onset'"),
        (("triage", "query", "find-onset", ".", "--steps", "9"), "--steps is '9'"),
        (("triage", "query", "find-onset", ".", "--rank", "-1"), "--rank is -1"),
    ],
)
def test_errors_are_one_line(tmp_path, words, message):
    done = in_process(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
