"""Which weights are likely to matter, before any fault: how far outputs move, to first order, when a weight vanishes or doubles.

The score of an element is ``|gradient x value|``, the gradient being of random projections of all floating-point outputs
(Hutchinson 1989), root of the summed squares. Rows of embedding tables that no input looks up have gradient, and score, zero.
A score sorts elements into strata for sampling; it is never an answer, and a wrong one costs trials, not truth.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.plain import PlainEngine
from unsilent.outcomes.tensors import leaves
from unsilent.sites.modules import named_parameters
from unsilent.workloads.process_side_effects import contain_user_process

PROJECTIONS = 2
SEED = 0x5EED

Scores = Mapping[str, NDArray[np.float32]]


def score_parameters(engine: PlainEngine) -> tuple[Scores, str]:
    """Scores by parameter name, float32[elements] in memory order of the values, and a note where they are magnitudes alone.

    Leaves the model as it was, and its write counters too.
    """
    named = dict(named_parameters(engine.model))
    differentiable = {name: p for name, p in named.items() if p.dtype.is_floating_point and p.numel()}
    before = {name: p.requires_grad for name, p in differentiable.items()}
    squares = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in differentiable.items()}
    note = ""
    try:
        for p in differentiable.values():
            p.requires_grad_(True)
        for batch in engine.batches:
            _add(engine, batch, differentiable, squares)
    except RuntimeError as error:  # outputs without gradient, operations without a derivative
        note = f"Risk was predicted without gradients, from magnitudes alone: {str(error).splitlines()[0]}."
        squares = {name: torch.ones_like(s) for name, s in squares.items()}
    finally:
        for name, p in differentiable.items():
            p.requires_grad_(before[name])
    scores = {name: (squares[name].sqrt() * p.detach().abs().float()) for name, p in differentiable.items()}
    return {name: _flat(s) for name, s in scores.items()}, note


def _add(engine: PlainEngine, batch: object, parameters: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> None:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), contain_user_process():
        torch.manual_seed(SEED)
        outputs = [t for t in leaves(engine.workload.run(engine.model, batch)) if t.requires_grad]
        if not outputs:
            raise RuntimeError("the outputs have no gradient")
        for last in range(PROJECTIONS - 1, -1, -1):
            signs = [torch.randint(0, 2, t.shape, device=t.device).to(t.dtype) * 2 - 1 for t in outputs]
            result = torch.autograd.grad(
                outputs, list(parameters.values()), signs, retain_graph=bool(last), allow_unused=True
            )
            for name, gradient in zip(parameters, result, strict=True):
                if gradient is not None:
                    squares[name].add_(gradient.detach().float() ** 2)


def _flat(scores: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = scores.nan_to_num(posinf=3e38).reshape(-1).cpu().numpy()
    return values
