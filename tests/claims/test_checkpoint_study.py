"""What corrupted checkpoints do under several strategies (docs/papers/checkpoint-alteration.md), with fewer trials."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import unsilent

STRATEGIES = [
    "ddp",
    "fsdp2",
    *(["horovod"] if find_spec("horovod") else []),
    *(["zero1"] if find_spec("deepspeed") else []),
]


@pytest.fixture
def floor(tmp_path):
    return tmp_path / "floor.sqlite"


def test_strategies_with_the_same_clean_bits_have_the_same_faulty_bits(tmp_path, floor):
    found = unsilent.checkpoint_study(
        "train-resnet", options={"steps": 60, "clip": 0}, strategy=STRATEGIES, section="weights,first_moment", flips=[10, 100],
        trials=3, floor=floor,
    )  # fmt: skip
    assert len({one.checkpoint_hash for one in found.baseline.resumes}) == 1
    # DeepSpeed leaves out an update whose gradients are not finite: the only difference.
    counted = [trial for trial in found.trials if not trial.nonfinite.any()]
    by_fault = {}
    for trial in counted:
        by_fault.setdefault((trial.target.section, trial.flips, trial.k), set()).add(trial.final_hash)
    assert by_fault
    assert all(len(hashes) == 1 for hashes in by_fault.values())


def test_weights_are_more_sensitive_than_first_moments_under_the_law_of_elements(floor):
    found = unsilent.checkpoint_study(
        "train-resnet", options={"steps": 150}, strategy="ddp", section="weights,first_moment", flips=[100], trials=60,
        floor=floor,
    )  # fmt: skip
    (difference,) = found.differences
    assert difference.difference.low > 0


def test_one_rank_with_a_corrupted_file_is_healed_by_a_broadcast(floor):
    found = unsilent.checkpoint_study(
        "train-resnet", options={"steps": 60}, strategy="ddp", section="weights,first_moment", flips=[100], trials=3,
        loaded_by="one-before,one-after-broadcast", floor=floor,
    )  # fmt: skip
    healed = {("weights", "one-before"), ("first_moment", "one-after-broadcast")}
    for trial in found.trials:
        assert trial.bit_identical == ((trial.target.section, trial.target.loaded_by) in healed)
