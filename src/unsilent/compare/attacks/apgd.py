"""Auto-PGD (Croce & Hein, ICML 2020): projected gradient ascent with adaptive step sizes, on any objective.

Each input begins with steps of 2 eps, with momentum 0.75. At a checkpoint, the step of an input is halved and the search goes on
from its best point, if its objective rarely rose, or if it has neither a new best value nor a new step size since the last
checkpoint. The last input is the one with the best value of the objective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsilent.compare.attacks.objectives import Objective
from unsilent.compare.attacks.search import Ball, Budget, Found, Pair, Search

MOMENTUM, RISES = 0.75, 0.75
"""Share of the new direction in a step, and share of a window's steps in which the objective has to rise."""


def checkpoints(steps: int) -> list[int]:
    """The steps after which step sizes may be halved."""
    result, last, at = {0}, 0, 22  # percent
    while at <= 100:
        result.add(-(-at * steps // 100))
        last, at = at, at + max(at - last - 3, 6)
    return sorted(result)


def apgd(pair: Pair, objective: Objective, clean: Tensor, labels: Tensor, ball: Ball, budget: Budget) -> Found:
    """Search for inputs by Auto-PGD; inputs with a success are left out of further restarts."""
    search = Search(pair, objective, clean, labels, Found(clean))
    for rows, within, start in search.restarts(ball, budget):
        search.found.last[rows] = _ascend(search, rows, start, within, budget)
    search.found.finish()
    return search.found


def _ascend(search: Search, rows: Tensor, x: Tensor, ball: Ball, budget: Budget) -> Tensor:
    """Run one restart, and return the best points."""
    looks, shape = checkpoints(budget.steps), (-1, *[1] * (x.ndim - 1))
    size = torch.full((len(x),), 2 * budget.eps, dtype=x.dtype)
    values, gradient, _ = search.passes(rows, x)
    best, best_x, best_gradient, before = values.clone(), x.clone(), gradient.clone(), x
    rises = torch.zeros(len(x))
    looked_best, looked_size = best.clone(), size.clone()
    for at in range(1, budget.steps + 1):
        moved = ball.project(x + size.view(shape) * ball.size * gradient.sign())
        if at > 1:
            moved = ball.project(x + MOMENTUM * (moved - x) + (1 - MOMENTUM) * (x - before))
        before, x, last = x, moved, values
        if at < budget.steps:
            values, gradient, scores = search.passes(rows, x)
        else:
            original, adapted = scores = search.pair.scores(x, search.objective)
            values = search.objective.function(adapted if original is None else original, adapted, search.labels[rows])
        search.look_at(rows, x, scores, at)
        better = values > best
        best = torch.where(better, values, best)
        best_x[better], best_gradient[better] = x[better], gradient[better]
        rises += values > last
        if at in looks:
            # Steps that rarely raise the value, or never the best one, are too large: halve them, and go on from the best.
            window = at - looks[looks.index(at) - 1]
            halves = (rises < RISES * window) | ((looked_size == size) & (looked_best >= best))
            looked_best, looked_size = best.clone(), size.clone()
            size = torch.where(halves, size / 2, size)
            x, gradient, values = x.clone(), gradient.clone(), values.clone()
            x[halves], gradient[halves], values[halves] = best_x[halves], best_gradient[halves], best[halves]
            rises.zero_()
    return best_x
