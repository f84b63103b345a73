"""The search with an order that judges findings: what it asks next, when it ends, and what it concludes."""

from __future__ import annotations

import math

import pytest

from conftest import in_process
from triage import made_triage as made
from triage.ranking import made_labels as labels
from unsilent.triage.farm.naming import HEALTHY
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, Query
from unsilent.triage.investigation import Conclusion, Executed, executable, gain, investigate
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking.model_file import write_model
from unsilent.triage.runbook import ScoredQuery
from unsilent.triage.triage_report import Triage


class Fixed:
    """An order with one score for all, that believes each finding so much."""

    def __init__(self, score=0.5, belief=0.0, least_gain=0.0):
        self.score, self.of_finding, self.least_gain = score, belief, least_gain

    def scored_queries(self, signals):
        return [ScoredQuery(Query(name), self.score, "") for name in TEMPLATES]

    def belief(self, signals, query, finding):
        return self.of_finding if finding.outcome in (Outcome.DIFFERS, Outcome.LOCALISED) else 0.0


@pytest.fixture(scope="module")
def model():
    return labels.model()


def far(tmp_path):
    """An onset that differs, and a gradient that is localised."""
    return made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, 1e6)})


@pytest.mark.parametrize(
    ("belief", "conclusion", "is_ended"),
    [
        (0.5, Conclusion.LOCALISED, True),
        (0.49, Conclusion.NOT_LOCALISED, False),
        (0.2, Conclusion.NOT_LOCALISED, False),
        (0.19, Conclusion.HEALTHY, False),
    ],
)
def test_belief_decides_whether_a_finding_ends_it(tmp_path, belief, conclusion, is_ended):
    found = investigate(far(tmp_path), is_run=True, order=Fixed(belief=belief))
    assert found.conclusion is conclusion
    assert (found.localised is not None) is is_ended
    assert is_ended or len(found.answered) > 4


def test_what_lies_behind_an_unlike_gradient_is_looked_for_before_it_ends(tmp_path):
    batch = made.batch(1)
    batch[0][0][0, 0] = math.nan
    path = made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, 1e6)}, batches={1: batch})
    found = investigate(path, is_run=True)
    templates = [one.query.query.template for one in found.executed]
    assert templates.index("compare-gradients") < templates.index("inspect-batch")
    assert found.localised.kind is FindingKind.BATCH
    alone = investigate(far(tmp_path / "alone"), is_run=True)
    assert alone.localised.kind is FindingKind.GRADIENT
    assert {"inspect-batch", "inspect-state"} <= {one.query.query.template for one in alone.executed}


def test_it_ends_where_nothing_that_is_left_would_tell_much(tmp_path):
    path = made.folder(tmp_path, 2)
    found = investigate(path, is_run=True, order=Fixed(0.01, least_gain=0.02))
    assert (found.conclusion, len(found.answered)) == (Conclusion.HEALTHY, 3)
    left = len(executable(found.ranked, found.executed))
    assert left > 1
    assert f"by 3 queries of 3 kinds; not run, as little was expected of them: {left} queries" in str(Triage(found, 5))
    assert len(investigate(path, is_run=True, order=Fixed(0.03, least_gain=0.02)).answered) > 3


def test_without_any_part_nothing_looks_healthy(tmp_path):
    path = made.folder(tmp_path, 0, world_size=2, settings={"fingerprint": "off"})
    found = investigate(path, is_run=True, order=Fixed(0.01, least_gain=0.02))
    assert found.conclusion is Conclusion.UNANSWERED


def test_gain_falls_with_each_query_of_the_template_and_rises_with_a_rank_that_was_named():
    query = ScoredQuery(Query("inspect-batch", Blanks(rank=1)), 0.4, "")
    found = Finding(outcome=Outcome.NOTHING, text="")
    same = Executed(ScoredQuery(Query("inspect-batch", Blanks(rank=0)), 1.0, ""), found, 0.0)
    assert gain(query, []) == pytest.approx(0.4)
    assert gain(query, [same, same]) == pytest.approx(0.1)
    named = Executed(
        ScoredQuery(Query("find-onset"), 1.0, ""), Finding(outcome=Outcome.DIFFERS, text="", ranks=(1,)), 0.0
    )
    assert gain(query, [named]) == pytest.approx(0.6)


def test_without_adapting_the_first_order_stands(tmp_path):
    path = made.folder(tmp_path, 2)
    order = Fixed()
    order.scored_queries = lambda _: [
        ScoredQuery(Query("find-onset", blanks), score, "")
        for blanks, score in [(Blanks(), 0.9), (Blanks(rank=1), 0.8)]
    ]
    assert len(investigate(path, True, order).executed) == 1  # the second one is implied
    assert len(investigate(path, True, order, adaptive=False).executed) == 2


def test_the_learned_order_localises_a_fault_and_doubts_a_harmless_finding(model):
    for one in labels.collection(2, 100):
        found = investigate(one.folder, is_run=True, order=model)
        if one.planned.family == HEALTHY:
            assert found.conclusion is Conclusion.HEALTHY
        else:
            assert found.conclusion is Conclusion.LOCALISED
            assert found.localised.ranks == (one.planned.rank,)


# -- the command --------------------------------------------------------------------------------------------------------


def test_a_model_orders_the_queries_of_the_command(tmp_path, model):
    write_model(model, tmp_path / "m.npz")
    path = made.folder(tmp_path, 2, {1: made.spoiled(1, 90, 0, math.nan)}, alarms={1: (made.alarm(90, 1),)})
    done = in_process("triage", path, "--model", tmp_path / "m.npz", "--run", "--plain")
    assert done.returncode == 1, done.stderr
    assert "Localised: step 90, rank 1" in done.stdout
    healthy = next(one for one in labels.collection(2, 100) if one.planned.family == HEALTHY)
    done = in_process("triage", healthy.folder, "--model", tmp_path / "m.npz", "--run", "--plain")
    assert done.returncode == 0, done.stderr
    assert "that is likely a fault was found by" in done.stdout or "Nothing was found by" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--order", "best"), "unknown order 'best'"),
        (("--order", "runbook", "--model", "m.npz"), "--model is not used with --order runbook"),
        (("--model", "absent.npz"), "absent.npz"),
    ],
)
def test_errors_are_one_line(tmp_path, words, message):
    made.folder(tmp_path, 2)
    done = in_process("triage", ".", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
