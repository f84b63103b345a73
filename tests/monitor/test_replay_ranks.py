"""The step of an alarm, executed again by two real ranks: an alarm follows the batch, or stays with the device."""

from __future__ import annotations

import json

import pytest
import torch.distributed

from monitor.two_ranks import run_two_ranks
from unsilent.recovery.evidence import NEIGHBOUR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]
AT, SUSPECT, OTHER = 30, 1, 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("replay_ranks.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def evidence_of(ranks, scene):
    """That of the first alarm, which is the same in both ranks."""
    first, second = (rank[scene]["evidence"][0] for rank in ranks)
    assert first == second
    assert (first["step"], first["rank"], first["world_size"]) == (AT, SUSPECT, 2)
    return first


def executions(evidence, place, dtype=""):
    return [(e["rank"], e["has_alarm"]) for e in evidence["executions"] if (e["place"], e["dtype"]) == (place, dtype)]


def test_the_alarm_of_a_batch_comes_again_in_the_rank_that_gets_the_batch(ranks):
    evidence = evidence_of(ranks, "batch")
    assert executions(evidence, NEIGHBOUR) == [(OTHER, True)]
    assert executions(evidence, "same device") == [(SUSPECT, True)] * 3
    assert evidence["batch_problem"] == "element [2, 1] of tensor x of the batch is nan"


def test_the_alarm_of_a_device_does_not_come_again_in_the_rank_that_gets_the_batch(ranks):
    evidence = evidence_of(ranks, "device")
    assert executions(evidence, NEIGHBOUR) == [(OTHER, False)]
    assert executions(evidence, "same device") == [(SUSPECT, True)] * 3
    assert [e["is_equal"] for e in evidence["executions"]] == [None, None, True, True, True]


def test_a_neighbour_counts_only_where_it_is_seen_to_compute_the_same(ranks):
    for scene in ("batch", "device"):
        evidence = evidence_of(ranks, scene)
        assert evidence["no_neighbour"] == ""
        assert evidence["is_neighbour_checked"]


@pytest.mark.parametrize("scene", ["numbers", "numbers, device"])
def test_a_neighbour_that_executes_data_of_its_own_is_no_evidence(ranks, scene):
    """The loader yields numbers of samples, and each rank has samples of its own."""
    evidence = evidence_of(ranks, scene)
    assert executions(evidence, NEIGHBOUR) == []
    assert "data from elsewhere than its batch" in evidence["no_neighbour"]
    assert executions(evidence, "same device") == [(SUSPECT, True)] * 3
    assert ranks[0][scene]["codes"][0] == "UNSILENT-U02"


def test_a_value_that_one_rank_puts_into_a_sum_is_not_taken_for_data(ranks):
    """All ranks get it in the same step."""
    for rank in ranks:
        evidence = rank["payload"]["evidence"][0]
        assert evidence["rank"] == -1
        assert [one["ranks"] for one in evidence["executions"]] == [[]] * len(evidence["executions"])
        assert rank["payload"]["codes"][0] == "UNSILENT-U02"


def test_a_transient_fault_comes_again_nowhere_and_the_training_is_not_changed(ranks):
    evidence = evidence_of(ranks, "transient")
    assert executions(evidence, NEIGHBOUR) == [(OTHER, False)]
    assert executions(evidence, "same device") == [(SUSPECT, False)] * 3
    assert [e["is_equal"] for e in evidence["executions"]][2:] == [False] * 3
    for rank in ranks:
        assert rank["transient"]["begun"] > rank["logged"]["begun"]
        for what in ("bits", "generator", "suspects"):
            assert rank["transient"][what] == rank["logged"][what]


def test_ranks_with_states_of_their_own_do_not_ask_each_other(ranks):
    evidence = evidence_of(ranks, "apart")
    assert executions(evidence, NEIGHBOUR) == []
    assert executions(evidence, "same device") == [(SUSPECT, True)] * 3
    for rank in ranks:
        assert any(
            "no execution of another rank is evidence: the ranks hold different states" in m
            for m in rank["apart"]["messages"]
        )


def test_what_cannot_be_executed_again_is_said(ranks):
    evidence = evidence_of(ranks, "no loop")
    assert evidence["executions"] == []
    assert "has no `for batch in loader`" in evidence["problem"]
