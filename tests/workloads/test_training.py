"""The training loop leaves no trace, is deterministic, and refuses a bad model; the score functions are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.workloads.model_fitting import (
    Goal,
    Schedule,
    accuracy_of,
    auc,
    check_option_range,
    fit,
    isolated_training,
)


def _train(seed=0, progress=lambda *a: None):
    with isolated_training(seed):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        x = torch.randn(50, 4)
        y = (x[:, 0] > 0).long()
        fit(
            model,
            lambda rows: (x[rows], y[rows]),
            50,
            nn.functional.cross_entropy,
            Schedule(3, 16, 0.01),
            seed=seed,
            description="toy",
            progress=progress,
        )
    return model


def test_same_seed_same_bits():
    a, b, c = (_train(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["0.weight"], c["0.weight"])


def test_caller_is_left_as_it_was():
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            model = _train()
            assert not torch.is_grad_enabled()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_state_is_restored_when_the_training_raises():
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    with pytest.raises(RuntimeError), isolated_training(3):
        raise RuntimeError
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads


def test_training_works_inside_inference_mode():
    with torch.inference_mode():
        assert not _train()[0].weight.is_inference()


def test_progress_counts_up_to_the_end():
    told = []
    _train(progress=lambda *what: told.append(what))
    assert [done for _, done, _ in told] == list(range(1, 10))
    assert {(text, total) for text, _, total in told} == {("toy", 9)}


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=60).filter(
        lambda rows: len({label for label, _ in rows}) == 2
    )
)
def test_auc_agrees_with_sklearn(rows):
    labels, scores = np.array(rows).T
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores))


def test_share_right():
    assert accuracy_of(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 0], [3, 4]])) == 0.75


@pytest.mark.parametrize("reached", [0.5, float("nan")])
def test_goal_missed(reached):
    with pytest.raises(UnsilentError, match=r"'w' reached AUC (0\.5000|nan), expected at least 0\.9: do this"):
        Goal("AUC", 0.9, "do this").check("w", reached)
    with pytest.raises(UsageError):
        Goal("AUC", 0.9, error=UsageError).check("w", reached)
    Goal("AUC", 0.9).check("w", 0.9)


def test_check_count():
    assert check_option_range("w", "eval", 3, 3, "things") == 3
    with pytest.raises(UsageError, match=r"workload 'w': option 'eval' is 4; expected 1 to 3 \(things\)"):
        check_option_range("w", "eval", 4, 3, "things")
