"""Programs on real gloo processes: every one gives the sum, the DDP hook gives the loss curve, wrong ones are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def run_ranks(world, folder, orders, seconds):
    """Runs scenes in ``world`` processes; each order is (name, scene, arguments, options). Answers by rank."""
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "execution_ranks.py"),
            str(world),
            str(folder),
            json.dumps(orders),
        ],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Everything that four processes are asked to do in the fast tier, in one start."""
    orders = [(name, name, [], {}) for name in ("shapes", "together", "refused", "corrupted", "ddp")]
    return run_ranks(4, tmp_path_factory.mktemp("four"), orders, 120)


@pytest.fixture(scope="module")
def all_of_four(tmp_path_factory):
    """All programs of four processes, of every goal."""
    orders = [(name, name, [2, 2], {}) for name in ("every_program", "goals")]
    return run_ranks(4, tmp_path_factory.mktemp("all"), orders, 120)


@pytest.mark.slow
def test_every_program_gives_the_sum_on_four_processes(all_of_four):
    for rank in all_of_four:
        assert rank["every_program"] == {"programs": 93, "wrong": [], "unlike all_reduce": []}


@pytest.mark.slow
@pytest.mark.parametrize(("factors", "programs"), [((2, 4), 93), ((4, 2), 93), ((2, 2, 2), 1635)], ids=str)
def test_every_program_gives_the_sum_on_eight_processes(factors, programs, tmp_path):
    """Integers exactly, floating-point numbers within the rounding of any order of summation."""
    for rank in run_ranks(8, tmp_path, [("all", "every_program", factors, {})], 900):
        assert rank["all"] == {"programs": programs, "wrong": [], "unlike all_reduce": []}


@pytest.mark.slow
def test_programs_of_the_other_goals_are_right(all_of_four):
    """Each of the ranks ends with a chunk of its own after a reduce-scatter."""
    assert all(rank["goals"]["counts"]["all-gather"] >= 2 for rank in all_of_four)
    for owners in zip(*(rank["goals"]["owners"] for rank in all_of_four), strict=True):
        assert sorted(owners) == [0, 1, 2, 3]


def test_payloads_of_any_size_layout_and_type_are_reduced_in_place(four):
    for rank in four:
        assert len(rank["shapes"]) == 3 * 21
        assert {name: count for name, count in rank["shapes"].items() if count} == {}


def test_reductions_run_at_the_same_time_over_some_of_the_ranks(four):
    assert [rank["together"] for rank in four] == [[5, 20, 2], [10, 40, 2], [5, 20, 2], [10, 40, 2]]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "double counting: device 1 of group (0, 1, 2, 3) brings the contribution of device 0 again"),
        (1, "data is lost: chunk 0 of device 0 lacks the contribution of device 2"),
        (2, "the program is for 2 devices, but the job has 4 ranks"),
        (3, "must be different ones of 0 .. 3"),
        (4, "every reduction needs 2 ranks"),
        (5, "a payload of torch.complex64 (torch.strided) cannot be reduced"),
        (6, "a payload of torch.bool"),
        (7, "(torch.sparse_coo)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(four, number, text):
    for rank in four:
        assert rank["refused"][number].startswith("UsageError: ")
        assert text in rank["refused"][number]


def test_a_corrupted_collective_is_found_where_it_happened(four):
    for number, rank in enumerate(four):
        for message in rank["corrupted"]:
            assert message.startswith("WrongResult: element 3 is" if number == 2 else "accepted"), message


def test_a_training_with_a_program_has_the_loss_curve_of_ddp(four):
    for rank in four:
        curves = rank["ddp"]
        for name in ("best", "rooted", "shuffled"):
            assert curves[name] == pytest.approx(curves["plain"], rel=1e-11)
        assert curves["doubled"] != pytest.approx(curves["plain"], rel=1e-4)
        assert curves["best single"] == pytest.approx(curves["plain single"], rel=1e-4)
        assert curves["plain"][-1] < curves["plain"][0]
