"""Monitors of two and four real processes: one verdict for all, the right rank named, and no rank waits for one that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed

from conftest import in_process
from unsilent.events.event_files import read_events
from unsilent.events.run_history import RunHistory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]
AT = 30


def run(folder, count, *names):
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run(
        [sys.executable, *words, str(Path(__file__).parent / "monitor_ranks.py"), str(folder), *names],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run(folder, 2)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("scene", ["clean", "strict", "sharded-clean"])
def test_a_clean_run_has_the_bits_of_one_without_a_monitor_and_no_alarm(ranks, scene):
    golden = "sharded-golden" if scene.startswith("sharded") else "golden"
    for rank in ranks:
        assert (rank[scene]["bits"], rank[scene]["losses"]) == (rank[golden]["bits"], rank[golden]["losses"])
        assert (rank[scene]["ended"], rank[scene]["alarms"], rank[scene]["verdicts"]) == ("done", [], [])
        assert rank[scene]["failed"] == []


@pytest.mark.parametrize(
    "scene", ["gradient", "weight", "moment", "sharded-gradient", "sharded-weight", "sharded-moment"]
)
def test_the_rank_and_the_tensor_are_named_by_all(ranks, scene):
    reason = "own history" if scene.endswith("gradient") else "fingerprint"
    for rank in ranks:
        ((step, suspect, found, tensor, action),) = rank[scene]["verdicts"]
        assert (step, suspect, found, action) == (AT, 1, reason, "log")
        assert scene.endswith("gradient") or tensor == "fingerprint of 3.weight" + (
            "/exp_avg" if scene.endswith("moment") else ""
        )
    assert [bool(rank[scene]["alarms"]) for rank in ranks] == [False, True]


def test_two_replicas_that_differ_name_no_rank(ranks):
    for rank in ranks:
        ((_, suspect, reason, _, _),) = rank["vote"]["verdicts"]
        assert (suspect, reason) == (-1, "2 versions of the parameters without a majority")
        ((step, tensor, level),) = rank["vote"]["alarms"]  # repeated after a minute only
        assert (AT <= step <= AT + 3, tensor, level) == (True, "", "alarm")


def test_ranks_that_differ_are_an_alarm_as_long_as_it_lasts(ranks):
    for rank in ranks:
        assert len(rank["lasting"]["alarms"]) > 2
        assert len(rank["lasting"]["verdicts"]) == 1
        assert rank["from-the-start"]["alarms"]


def test_the_last_line_and_watch_count_ranks_that_differ(tmp_path):
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "unsilent",
        "run",
        "--sampling",
        "fixed:1",
    ]
    script = str(Path(__file__).parent / "diverging_ranks.py")
    done = subprocess.run(
        [sys.executable, *words, "--events", "e.jsonl", script],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = [line for line in done.stderr.splitlines() if line.startswith("unsilent: ")]
    assert len(last) == 2
    assert all("1 alarm in 160 steps" in line and "parameters differ between ranks 0, 1" in line for line in last)
    watched = in_process("watch", "e.jsonl", "--once", cwd=tmp_path)
    assert watched.returncode == 1
    assert watched.stdout.startswith("2 alarms in 160 steps of 2 ranks; the faulty rank is undetermined")
    assert "this comparison does not tell which of them is wrong" in " ".join(watched.stdout.split())
    assert all(one["health"] == "warning" for one in RunHistory(read_events(tmp_path / "e.jsonl")).as_json()["ranks"])


def test_a_step_is_left_out_in_all_ranks(ranks):
    for rank in ranks:
        assert [verdict[4] for verdict in rank["skip"]["verdicts"]] == ["skip"]
        assert rank["skip"]["losses"][: AT + 1] == rank["golden"]["losses"][: AT + 1]
    assert ranks[0]["skip"]["bits"] == ranks[1]["skip"]["bits"] != ranks[0]["golden"]["bits"]


@pytest.mark.parametrize(("scene", "code"), [("stop", 16), ("stop-weight", 17)])
def test_all_ranks_stop_at_the_same_step(ranks, scene, code):
    for rank in ranks:
        assert rank[scene]["ended"].startswith(
            f"MonitorStop {code}: the monitor stopped the job after an alarm in step {AT}"
        )
        assert ("did not record" in rank[scene]["ended"]) == (code == 17)
        assert rank[scene]["begun"] == AT + 2


@pytest.mark.parametrize("late", ["", "-late"])
@pytest.mark.parametrize("uses", ["iterate", "step"])
@pytest.mark.parametrize("fault", ["gradient", "weight", "moment"])
def test_steps_that_are_executed_again_end_with_the_bits_of_a_clean_run(ranks, fault, uses, late):
    for rank in ranks:
        result = rank[f"rerun-{fault}-{uses}{late}"]
        assert (result["ended"], result["bits"]) == ("done", rank["golden"]["bits"])
        assert [verdict[1] for verdict in result["verdicts"]] == [1]


def test_a_monitor_that_fails_in_one_rank_stops_nobody(ranks):
    for rank in ranks:
        assert (rank["failing"]["losses"], rank["failing"]["bits"]) == (
            rank["golden"]["losses"],
            rank["golden"]["bits"],
        )
    assert [rank["failing"]["failed"] for rank in ranks] == [[], ["ZeroDivisionError: planted"]]


def test_all_ranks_read_the_same_tensors_in_each_step(ranks):
    first, second = (rank["sampling"]["intervals"] for rank in ranks)
    assert first == second
    assert len({tuple(one) for one in first}) > 1


def test_ranks_with_other_settings_are_refused_together(ranks):
    for rank in ranks:
        assert rank["settings"] == (
            "UsageError: the ranks have different settings of the monitor: budget is 0.5 in rank 0, 0.6 in rank 1; "
            "give all ranks the same"
        )


def test_ranks_that_train_models_of_their_own_are_not_compared(ranks):
    assert [rank["models"] for rank in ranks] == [0, 0]


def test_monitors_one_after_the_other_leave_no_groups(ranks):
    for rank in ranks:
        ended, groups = rank["several"]
        assert ended == ["done"] * 4
        assert groups <= 2


@pytest.mark.parametrize("scene", ["uneven", "error"])
def test_nobody_waits_for_a_rank_that_makes_fewer_steps(ranks, scene):
    assert max(rank[scene] for rank in ranks) < 20


def test_ranks_that_make_other_numbers_of_steps_wait_within_a_bound(ranks):
    for number, rank in enumerate(ranks):
        scene = rank["averaged"]
        assert scene["steps"] == 3 * (10 + 3 * number)
        assert (scene["verdicts"], scene["failed"]) == (0, [])
        assert scene["seconds"] < 15
    assert [rank["averaged"]["is_off"] for rank in ranks] == [False, False]


def test_ranks_that_cannot_act_alike_end_their_monitors(ranks):
    for rank in ranks:
        scene = rank["averaged-stop"]
        assert (scene["is_off"], scene["verdicts"], scene["failed"]) == (True, 0, [])
        assert scene["seconds"] < 15


def test_a_rank_that_trains_alone_is_monitored_alone(ranks):
    assert [rank["one"][0] for rank in ranks] == [1, None]
    for rank in ranks:
        _, seconds, suspects = rank["one"]
        assert seconds < 10
        assert suspects == [1]  # later they agree again


def test_three_of_four_replicas_outvote_the_fourth(tmp_path):
    done = run(tmp_path, 4, "vote")
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        result = json.loads((tmp_path / f"{rank}.json").read_text())["vote"]
        ((step, suspect, reason, _, _),) = result["verdicts"]
        assert (suspect, reason) == (3, "vote")
        assert [one[1:] for one in result["alarms"]] == ([["", "alarm"]] if rank == 3 else [])
        assert AT <= step <= AT + 3


def test_a_rank_that_is_killed_leaves_its_events_and_those_of_the_others(tmp_path):
    begun = time.monotonic()
    done = run(tmp_path, 2, "killed")
    assert done.returncode != 0
    assert time.monotonic() - begun < 200
    for path in tmp_path.glob("events*.jsonl"):
        events = read_events(path)
        kinds = [event.kind for event in events]
        assert kinds[:3] == ["started", "sampling", "step"]
        assert ("ended" in kinds) is ("rank1" not in path.name)
    assert len(list(tmp_path.glob("events*.jsonl"))) == 2


def test_a_program_may_end_torch_distributed_before_the_monitor(tmp_path):
    done = run(tmp_path, 2, "destroyed")
    assert done.returncode == 0, done.stderr
    for path in tmp_path.glob("events*.jsonl"):
        kinds = [event.kind for event in read_events(path)]
        assert kinds[-1] == "ended"
        assert "monitor-failed" not in kinds
    assert len(list(tmp_path.glob("events*.jsonl"))) == 2
