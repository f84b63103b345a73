"""Projected gradient ascent with steps of fixed size (Madry et al., ICLR 2018), and random noise as a control.

The loop is that of DIVA's authors: from the clean input, without momentum; the gradient is taken at the projected input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsilent.compare.attacks.objectives import CROSS_ENTROPY, Objective
from unsilent.compare.attacks.search import Ball, Budget, Found, Pair


def pgd(
    pair: Pair,
    objective: Objective,
    clean: Tensor,
    labels: Tensor,
    ball: Ball,
    budget: Budget,
    *,
    stops_when_evasive: bool = False,
) -> Found:
    """Inputs found by projected gradient ascent.

    Args:
        stops_when_evasive: Whether inputs leave the batch at the first step at which they are evasive.
    """
    results, rows = Found(clean), torch.arange(len(clean))
    generator = torch.Generator().manual_seed(budget.seed)
    step = (budget.eps / 8 if budget.step is None else budget.step) * ball.size
    for restart in range(budget.restarts):
        if restart:
            rows = rows[results.evasive_step[rows] == 0]
        left, within, y = rows, ball.of(rows), labels[rows]
        x = within.random(generator) if budget.random_start or restart else clean[rows]
        for at in range(budget.steps):
            if not len(left):
                break
            _, gradient, original, adapted = pair.passes(x, y, objective)
            results.gradients += len(x)
            if at:
                results.look_at(pair, objective, left, x, (original, adapted), y, at)
            if stops_when_evasive:
                goes_on = results.evasive_step[left] == 0
                left, within, y, x, gradient = (
                    left[goes_on],
                    within.of(goes_on),
                    y[goes_on],
                    x[goes_on],
                    gradient[goes_on],
                )
            x = within.project(x + step * gradient.sign())
            results.last[left] = x
        if len(left):
            results.look_at(pair, objective, left, x, pair.scores(x, objective), y, budget.steps)
    results.finish()
    return results


def noise(pair: Pair, clean: Tensor, labels: Tensor, ball: Ball, budget: Budget) -> Found:
    """Inputs found among random corners of the ball, as many as steps: the control of every attack."""
    results, rows = Found(clean), torch.arange(len(clean))
    generator = torch.Generator().manual_seed(budget.seed)
    for at in range(1, budget.steps * budget.restarts + 1):
        signs = torch.rand(clean.shape, generator=generator) < 0.5
        x = torch.where(signs.to(clean.device), ball.low, ball.high)
        results.look_at(pair, CROSS_ENTROPY, rows, x, pair.scores(x, CROSS_ENTROPY), labels, at)
        results.last = x
    results.finish()
    return results
