"""Projected gradient ascent with steps of fixed size (Madry et al., ICLR 2018), and random noise as a control.

The loop is that of DIVA's authors: it starts from the clean input, without momentum, and computes the gradient at the projected
input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsilent.compare.attacks.objectives import Objective
from unsilent.compare.attacks.search import Ball, Budget, Found, Pair, Search


def pgd(pair: Pair, objective: Objective, clean: Tensor, labels: Tensor, ball: Ball, budget: Budget) -> Found:
    """Search for inputs by projected gradient ascent."""
    search = Search(pair, objective, clean, labels, Found(clean))
    step = (budget.eps / 8 if budget.step is None else budget.step) * ball.size
    for rows, within, x in search.restarts(ball, budget):
        for at in range(budget.steps):
            _, gradient, scores = search.passes(rows, x)
            if at:
                search.look_at(rows, x, scores, at)
            x = within.project(x + step * gradient.sign())
        search.look_at(rows, x, pair.scores(x, objective), budget.steps)
        search.found.last[rows] = x
    search.found.finish()
    return search.found


def noise(pair: Pair, objective: Objective, clean: Tensor, labels: Tensor, ball: Ball, budget: Budget) -> Found:
    """Search for inputs among random corners of the ball, one per step, as a control for attacks."""
    search, rows = Search(pair, objective, clean, labels, Found(clean)), torch.arange(len(clean))
    generator = torch.Generator().manual_seed(budget.seed)
    for at in range(1, budget.steps * budget.restarts + 1):
        signs = torch.rand(clean.shape, generator=generator) < 0.5
        x = torch.where(signs.to(clean.device), ball.low, ball.high)
        search.look_at(rows, x, pair.scores(x, objective), at)
        search.found.last = x
    search.found.finish()
    return search.found
