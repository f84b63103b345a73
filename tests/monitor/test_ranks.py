"""Two real processes under DDP: what corrupts one rank sends both back, and both end as if nothing had been."""

from __future__ import annotations

import json

import pytest
import torch.distributed

from monitor.segments import executed_again
from monitor.two_ranks import run_two_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("ranks.py", folder, seconds=240)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_clean_run_has_the_bits_of_an_unguarded_one(ranks):
    for rank in ranks:
        assert rank["clean"] == rank["golden"]
        assert rank["harmed"]["bits"] != rank["golden"]["bits"]


@pytest.mark.parametrize("scene", ["gradient", "statistic", "nan", "late", "last"])
def test_both_ranks_go_back_together(ranks, scene):
    for rank in ranks:
        assert rank[scene]["bits"] == rank["golden"]["bits"]
        seen = {"late": 15, "last": 19}.get(scene, 14)
        assert (rank[scene]["ended"], rank[scene]["begun"]) == ("done", 20 + executed_again(seen))
    corrupted = {"gradient": "module.4.weight/exp_avg", "last": "module.4.weight/exp_avg"}.get(
        scene, "module.1.running_var"
    )
    assert [r[scene]["alarms"] for r in ranks] == [[[19 if scene == "last" else 14, corrupted]]] * 2


def test_both_ranks_stop_where_a_fault_stays(ranks):
    for rank in ranks:
        assert rank["permanent"]["ended"].startswith("GuardStop: step")
        assert rank["permanent"]["ended"] == ranks[0]["permanent"]["ended"]


def test_ranks_that_are_not_alike_are_refused_together(ranks):
    for rank in ranks:
        assert rank["all"].startswith("UsageError: the ranks train different parameters")
        assert rank["alone"] == "done"
