"""The learned order: it ranks what it was trained for first, looks at no identity, and its file is checked."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from triage import made_triage as made
from triage.ranking import made_labels as labels
from unsilent.basics.errors import UsageError
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.farm.labelled import GradedQuery
from unsilent.triage.farm.naming import HEALTHY
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, Query
from unsilent.triage.possible_queries import possible_queries
from unsilent.triage.queries.table import TEMPLATES, execute
from unsilent.triage.ranking.examples import Example, without_verdicts
from unsilent.triage.ranking.features import candidate_features, incident_features, is_mentioned
from unsilent.triage.ranking.model import known_incidents, train
from unsilent.triage.ranking.model_file import SHIPPED, read_model, write_model
from unsilent.triage.ranking.trees_order import OF_RUNBOOK, template_rows
from unsilent.triage.runbook import SLOW, has_fault_verdict, signals_of


@pytest.fixture(scope="module")
def model():
    return labels.model()


def test_the_right_template_comes_first_on_other_incidents(model):
    for one in labels.collection(2, 100):
        signals = labels.signals(one)
        scored = model.scored_queries(signals)
        assert {each.query for each in scored} == {
            each.query for each in possible_queries(signals.bundle, signals.candidates)
        }
        if one.planned.family == HEALTHY:
            assert scored[0].score < 0.2
        else:
            assert scored[0].query.template == labels.TEMPLATES[one.planned.family]
            assert scored[0].score > 0.3
            assert next(each for each in one.graded if each.query == scored[0].query).grade == 3
            assert "main reasons of the trained model: " in scored[0].reason


def test_what_templates_share_is_their_score_in_the_runbook_and_the_incident():
    one = next(one for one in labels.collection(2, 100) if one.planned.family == HEALTHY)
    signals = replace(labels.signals(one), symptoms=frozenset({SLOW}))
    rows = template_rows(signals, [7.0])
    assert rows["find-straggler"][1] == 0  # place
    assert len({tuple(row[:2]) for row in rows.values()}) == len(TEMPLATES)
    assert {len(row) for row in rows.values()} == {OF_RUNBOOK + 1}
    assert {row[-1] for row in rows.values()} == {7.0}


def test_a_finding_is_believed_where_such_findings_were_right(model):
    right, healthy = (
        next(one for one in labels.collection(2, 100) if one.planned.family == f) for f in ("NaN", HEALTHY)
    )
    query = Query("scan-nonfinite")
    finding = Finding(outcome=Outcome.LOCALISED, text="", kind=FindingKind.NONFINITE, ranks=(0,), step=90)
    assert model.belief(labels.signals(right), query, finding) > 0.5
    assert model.belief(labels.signals(right), query, Finding(outcome=Outcome.NOTHING, text="")) == 0
    onset = Finding(outcome=Outcome.DIFFERS, text="", kind=FindingKind.ONSET, step=90)
    assert model.belief(labels.signals(healthy), Query("find-onset"), onset) < 0.5


def test_the_same_incident_in_another_rank_has_the_same_scores(model, tmp_path):
    found = []
    for rank in (0, 3):
        series = {n: made.values(0) for n in range(4)} | {rank: made.spoiled(0, 90, 0, math.inf)}
        batches, alarms = {n: made.batch(0) for n in range(4)}, {rank: (made.alarm(90, rank),)}
        bundle = Bundle(made.folder(tmp_path / str(rank), 4, series, batches, alarms=alarms))
        (bundle.folder / "report.txt").write_text(f"NaN on rank {rank} in step 90")
        scored = model.scored_queries(signals_of(bundle, candidates_of(bundle)))
        found.append([(one.query.template, one.score, one.reason) for one in scored])
    assert found[0] == found[1]


def test_equations_count_where_the_incident_is_like_known_ones(model):
    signals = labels.signals(labels.collection()[0])

    def scores(order):
        return {one.query: one.score for one in order.scored_queries(signals)}

    trees, equations = scores(model.trees), scores(model.equations)
    assert trees != equations
    far = replace(model, known=replace(model.known, limit=np.array([-1.0])))
    assert scores(far) == trees
    any_right = min(1, sum(trees.values()))
    expected = {query: (trees[query] + any_right * equations[query]) / 2 for query in trees}
    assert scores(model) == pytest.approx(expected)


def test_nearness_is_that_of_incidents_learned_from_among_each_other():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 6)) * [1, 10, 100, 1, 1, 0]
    known = known_incidents(rows)
    others = rng.normal(size=(400, 6)) * [1, 10, 100, 1, 1, 0]
    share = np.mean([known.is_like(row) for row in others])
    assert 0.85 < share < 1  # NEAR_SHARE, give or take what chance does to 400
    assert not known.is_like(rows.mean(0) + np.array([9, 90, 900, 9, 9, 1]))


def test_one_incident_alone_is_like_itself():
    known = known_incidents(np.ones((1, 3)))
    assert known.is_like(np.ones(3))


def test_a_verdict_of_the_monitor_is_read_first_and_believed(model, tmp_path):
    verdict = FaultVerdict(kind="device", step=90, rank=1, code="UNSILENT-X", reason="because")
    bundle = Bundle(made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, math.nan)}, fault_verdict=verdict))
    signals = signals_of(bundle, candidates_of(bundle))
    first = model.scored_queries(signals)[0]
    assert (first.query, first.score) == (Query("read-verdict"), 1.0)
    assert "executed the step again" in first.reason
    assert model.belief(signals, first.query, execute(bundle, first.query)) == 1


def test_an_incident_with_a_verdict_is_learned_from_again_without_it(tmp_path):
    verdict = FaultVerdict(kind="device", step=90, rank=1, code="UNSILENT-X", reason="because")
    path = made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, math.nan)}, fault_verdict=verdict)
    bundle = Bundle(path)
    signals = signals_of(bundle, candidates_of(bundle))
    possible = possible_queries(bundle, signals.candidates)

    def example(others_differ):
        graded = [GradedQuery(one.query, 2, Outcome.LOCALISED, FindingKind.DEVICE, False, 0.1) for one in possible]
        graded = [
            own if own.query.template == "read-verdict" else replace(own, is_same=not others_differ) for own in graded
        ]
        return Example(signals, "", tuple(zip(possible, graded, strict=True)), is_healthy=False)

    (found,) = without_verdicts([example(others_differ=True)])
    assert not has_fault_verdict(found.signals.bundle)
    assert has_fault_verdict(signals.bundle)
    grades = {possible.query.template: own.grade for possible, own in found.graded}
    assert grades["read-verdict"] == 0
    assert grades["find-onset"] == 2
    assert without_verdicts([example(others_differ=False)]) == []
    assert without_verdicts([found]) == []


def test_a_seed_decides_and_masked_incidents_are_left_out(model):
    incidents = labels.collection()
    signals = labels.signals(incidents[0])  # NaN

    def scores(other):
        return [one.score for one in other.scored_queries(signals)]

    assert scores(train(incidents, 1)) != scores(model)
    first = next(one for one in incidents if one.planned.family == "NaN")
    graded = tuple(replace(one, grade=0, is_same=True) for one in first.graded)
    masked = replace(first, graded=graded, folder=first.folder / "absent")  # is not even read
    assert scores(train([masked, *incidents], 0)) == scores(model)
    with pytest.raises(UsageError, match="nothing to learn"):
        train([masked], 0)


def test_labels_of_other_queries_are_refused():
    first = labels.collection()[0]
    with pytest.raises(UsageError, match="label the collection again"):
        train([type(first)(first.planned, first.folder, "", first.graded[1:])], 0)


def test_every_number_is_finite_and_every_name_is_there_without_any_part(tmp_path):
    path = made.folder(tmp_path, 0, world_size=2)
    bundle = Bundle(path)
    empty = incident_features(signals_of(bundle, candidates_of(bundle)))
    assert [*empty] == [*incident_features(labels.signals(labels.collection()[0]))]
    assert np.isfinite([*empty.values()]).all()


@pytest.mark.parametrize(
    ("report", "blanks", "expected"),
    [
        ("Rank 3 is odd", Blanks(rank=3), True),
        ("rank 31 is odd", Blanks(rank=3), False),
        ("Worker #3 is odd", Blanks(rank=3), True),
        ("since iteration 88", Blanks(steps=(86, 90)), True),
        ("look at body.fc", Blanks(tensor="body.fc.weight"), True),
        ("look at body.fcx", Blanks(tensor="body.fc.weight"), False),
        ("since step 88", Blanks(steps=(86, 90)), True),
        ("since step 8", Blanks(steps=(86, 90)), False),
        ("rank 3", Blanks(), False),
    ],
)
def test_what_a_report_mentions(report, blanks, expected):
    assert is_mentioned(Query("x", blanks), report) is expected


# -- the file -----------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_same_model(model, tmp_path):
    write_model(model, tmp_path / "m.npz")
    signals = labels.signals(labels.collection()[0])
    assert read_model(tmp_path / "m.npz").scored_queries(signals) == model.scored_queries(signals)


def test_a_file_without_pickles(model, tmp_path):
    write_model(model, tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz", allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "fiu" for name in file.files)


def _about(**change):
    def changed(arrays):
        about = json.loads(arrays["about"].tobytes())
        arrays["about"] = np.frombuffer(json.dumps({**about, **change}).encode(), np.uint8)

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_about(schema=1), "train it again"),
        (_about(templates=["find-onset"]), "train it again"),
        (_about(kinds=[]), "train it again"),
        (_about(incident=3), "is not a model"),
        (_about(incident=[]), "is not a model"),
        (lambda a: a.pop("about"), "is not a model"),
        (lambda a: a.update(about=np.frombuffer(b"[" * 100000, np.uint8)), "is not a model"),
        (lambda a: a.update(about=np.frombuffer(b"[1]", np.uint8)), "is not a model"),
        (lambda a: a.pop("blanks/value"), "is not a model"),
        (lambda a: a.update(weights=np.zeros(3)), "is not a model"),
        (lambda a: a.update(directions=np.full((16, 2**11), np.nan)), "is not a model"),
        (lambda a: a.update({"beliefs/left": a["beliefs/left"] * 0}), "is not a model"),
        (lambda a: a.update({"blanks/column": a["blanks/column"] + 1000}), "is not a model"),
        (_about(incident=["x"] * 100_000), "is not a model"),
        (lambda a: a.update({"known/rows": a["known/rows"][:, 1:]}), "is not a model"),
        (lambda a: a.update({"known/rows": a["known/rows"][:0]}), "is not a model"),
        (lambda a: a.update({"known/deviation": a["known/deviation"] * 0}), "is not a model"),
        (lambda a: a.update({"known/limit": np.array([np.inf])}), "is not a model"),
        (lambda a: a.pop("equations/score.weight"), "is not a model"),
        (lambda a: a.update({"equations/score.weight": a["equations/score.weight"].T}), "is not a model"),
        (lambda a: a.update({"equations/telemetry.0": a["equations/telemetry.0"] * np.nan}), "is not a model"),
    ],
)
def test_hostile_files_are_refused_in_one_line(model, tmp_path, change, message):
    write_model(model, tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as file:
        arrays = dict(file)
    change(arrays)
    np.savez(tmp_path / "m.npz", **arrays)
    with pytest.raises(UsageError, match=message) as error:
        read_model(tmp_path / "m.npz")
    assert len(str(error.value).splitlines()) == 1


def test_a_model_of_other_features_is_refused(model):
    other = replace(model, trees=replace(model.trees, incident=model.trees.incident[1:]))
    with pytest.raises(UsageError, match="train it again"):
        other.scored_queries(labels.signals(labels.collection()[0]))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "m.npz").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(UsageError, match=r"unsilent triage train"):
        read_model(tmp_path / "m.npz")


def test_every_template_has_trees(model):
    assert set(TEMPLATES) < set(model.trees.trees)


def test_the_model_that_ships_is_for_the_queries_and_features_that_there_are(tmp_path):
    shipped = read_model(SHIPPED)
    assert SHIPPED.stat().st_size < 2**20
    path = made.folder(tmp_path, 4, {2: made.spoiled(2, 90, 0, math.inf)}, alarms={2: (made.alarm(90, 2),)})
    bundle = Bundle(path)
    signals = signals_of(bundle, candidates_of(bundle))
    queries = possible_queries(bundle, signals.candidates)
    assert tuple(candidate_features(queries[0], signals, "")) == shipped.trees.candidate
    assert shipped.scored_queries(signals)[0].query.template == "scan-nonfinite"
