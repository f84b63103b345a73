"""Protected models whose fault stays, or whose call is not the one that was calibrated: no alarm is lost."""

import pytest
import torch
from torch import nn

from unsilent.protection.protect import protect


def linear(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)).eval()


def inputs(samples, seed=0):
    return torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))


CALIBRATION = [inputs(50, seed) for seed in range(10)]


def flip(tensor, row, column, bit=30):
    """Flip one bit of a float32 matrix in place."""
    with torch.no_grad():
        tensor.view(torch.int32)[row, column] ^= 1 << bit


def calls(guarded, count, batch):
    """Whether each call is flagged, its action, whether it counts as recovered, and the answers."""
    verdicts, answers = [], []
    with torch.no_grad():
        for _ in range(count):
            answers.append(guarded(batch))
            verdict = guarded.verdict
            verdicts.append((bool(verdict.flagged.any()), verdict.action, verdict.recovered))
    return verdicts, answers


def test_a_fault_that_one_slice_shows_is_not_recovered_by_the_next_slice():
    model, batch = linear(4096), inputs(4)
    with protect(model, CALIBRATION, "weight-integrity:slices=8", recovery="rerun") as guarded:
        flip(model[0].weight, 100, 3)
        verdicts, _ = calls(guarded, 24, batch)
    shown = [number for number, verdict in enumerate(verdicts) if verdict[0]]
    assert [later - first for first, later in zip(shown, shown[1:], strict=False)] == [8, 8]  # each slice has its turn
    assert {verdicts[number] for number in shown} == {(True, "rerun", False)}


def test_a_fault_that_one_slice_shows_is_repaired():
    model, batch = linear(4096), inputs(4)
    with protect(model, CALIBRATION, "weight-integrity:slices=8", recovery=("rerun", "repair")) as guarded:
        right = model(batch)
        flip(model[0].weight, 100, 3)
        verdicts, answers = calls(guarded, 9, batch)
    shown = next(number for number, verdict in enumerate(verdicts) if verdict[0])
    assert verdicts[shown] == (True, "repair", True)
    assert all(torch.equal(answer, right) for answer in answers[shown:])
    assert not any(verdict[0] for verdict in verdicts[shown + 1 :])


@pytest.mark.parametrize(("recovery", "ending"), [("rerun", ("rerun", False)), (("rerun", "repair"), ("repair", True))])
def test_a_golden_test_is_run_again_after_its_alarm(recovery, ending):
    model, batch = linear(), inputs(4)
    with protect(model, CALIBRATION, "golden-test:every=3", recovery=recovery) as guarded:
        flip(model[0].weight, 10, 3)
        verdicts, _ = calls(guarded, 7, batch)
    shown = [number for number, verdict in enumerate(verdicts) if verdict[0]]
    assert verdicts[shown[0]] == (True, *ending)
    if not ending[1]:
        assert [later - first for first, later in zip(shown, shown[1:], strict=False)] == [3] * (len(shown) - 1)
        assert len(shown) >= 2
