"""Predicted risk: what is never read scores nothing, what matters scores high, and looking leaves no trace."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import unsilent
from unsilent.engine import make_engine
from unsilent.engine.risk_scores import score_parameters
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.live, self.dead = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.live(x) + 0.0 * self.dead(x)


def made(model: nn.Module, batch: object):
    torch.manual_seed(3)
    return make_engine(unsilent.Workload(model, [batch], judge="tolerance"))


def test_what_is_never_looked_up_or_multiplied_by_zero_scores_nothing() -> None:
    engine = made(Tables(), torch.tensor([1, 2, 5]))
    versions = [p._version for p in engine.model.parameters()]
    state = torch.random.get_rng_state()
    scores, note = score_parameters(engine)
    assert note == ""
    rows = scores["table.weight"].reshape(20, 4).sum(1)
    assert set(np.flatnonzero(rows)) == {1, 2, 5}
    assert not scores["dead.weight"].any()
    assert (scores["live.weight"] > 0).all()
    assert versions == [p._version for p in engine.model.parameters()]
    assert all(p.grad is None and p.requires_grad for p in engine.model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_score_is_that_of_differences() -> None:
    """Against the same projections by hand: doubling a weight of a linear model moves outputs by gradient x value."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    engine = made(model, x)
    scores, _ = score_parameters(engine)
    with torch.random.fork_rng():
        torch.manual_seed(0x5EED)
        signs = [torch.randint(0, 2, (5, 2)).double() * 2 - 1 for _ in range(2)]
    weight = model[0].weight.detach()
    moved = sum(((s.T @ x) * weight) ** 2 for s in signs).sqrt()
    np.testing.assert_allclose(scores["0.weight"].reshape(2, 3), moved.numpy(), rtol=1e-5)


def test_without_gradients_magnitudes_are_left() -> None:
    class Chooses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(1)

    engine = made(Chooses(4, 3), torch.randn(6, 4))
    scores, note = score_parameters(engine)
    assert "magnitudes alone" in note
    np.testing.assert_allclose(scores["weight"], engine.model.weight.detach().abs().reshape(-1).numpy())


def test_risky_elements_are_a_stratum_of_their_own() -> None:
    torch.manual_seed(3)
    workload = unsilent.Workload(Tables(), [torch.tensor([1, 2, 5])], judge="tolerance")
    runner = TrialRunner(PvfSpec("tables", strata="risk"), workload)
    targets = runner.targets
    assert abs(sum(t.share for t in targets.values()) - 1) < 1e-12
    risky = targets["table/exponent-top/risky"]
    assert {int(e) // 4 for r in risky.regions for e in r.elements} == {1, 2, 5}
    assert risky.elements + targets["table/exponent-top/calm"].elements == 80
    assert "table/mantissa-low/risky" not in targets
    assert "screening" in runner.fingerprint
