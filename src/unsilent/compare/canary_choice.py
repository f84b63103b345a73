"""Choice of inputs for canaries: near a decision boundary, random, or moved close to a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.outcomes import judge_text
from unsilent.outcomes.base import Judge
from unsilent.outcomes.decision_judges import NextToken, Threshold, Top1
from unsilent.workloads.base import InferenceWorkload
from unsilent.workloads.batch_samples import count_samples, take_samples

BOUNDARY, RANDOM, CONSTRUCTED = CHOICES = ("boundary", "random", "constructed")
CLOSENESS = 1e-3
"""Margin of a constructed input as a share of the median margin: small, but far above rounding errors."""
STEPS = 50


def choose_inputs(
    workload: InferenceWorkload, model: nn.Module, batches: Sequence[Any], count: int, choice: str, seed: int, name: str
) -> list[Any]:
    """Choose ``count`` inputs from batches, and return them as a part of each batch.

    Inputs nearest to another answer come first.

    ``name``: name of the workload in error messages.
    """
    if choice not in CHOICES:
        raise unknown_name_error("--choice", choice, CHOICES)
    sizes = [count_samples(batch) for batch in batches]
    if count > sum(sizes):
        raise UsageError(
            f"-k (--count) is {count}, but {name} has {sum(sizes)} samples; give at most that many, or let "
            "the workload evaluate more (built-in ones: --with eval=N)"
        )
    if choice == BOUNDARY:
        order = np.argsort(_all_margins(workload, model, batches).numpy(), kind="stable")
    else:
        order = np.random.default_rng(seed).permutation(sum(sizes))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.cumsum([0, *sizes])
    chosen = order[:count]
    result = [
        take_samples(batches[owner], torch.from_numpy(chosen[owners[chosen] == owner] - firsts[owner]))
        for owner in dict.fromkeys(owners[chosen].tolist())
    ]
    if choice != CONSTRUCTED:
        return result
    target = CLOSENESS * float(_all_margins(workload, model, batches).median())
    return [move_to_boundary(workload, model, part, target, name) for part in result]


def margins(rule: Judge, output: Any) -> Tensor:
    """Margin of each sample to another answer, [n].

    The margin is the best score minus the second best, or the distance from a threshold.
    """
    if isinstance(rule, Threshold):
        score = rule.decision_rows(output).float()
        return ((score.sigmoid() if rule.logits else score) - rule.at).abs()
    if isinstance(rule, (Top1, NextToken)):
        best = rule.decision_rows(output).float().topk(2, -1).values
        return best[:, 0] - best[:, 1]
    raise UsageError(
        f"{judge_text(rule)} does not say how far an input is from another answer (top1, threshold and next-token do); "
        "give --choice random"
    )


def _all_margins(workload: InferenceWorkload, model: nn.Module, batches: Sequence[Any]) -> Tensor:
    with torch.no_grad():
        return torch.cat([margins(workload.judge, workload.run(model, batch)).cpu() for batch in batches])


def move_to_boundary(workload: InferenceWorkload, model: nn.Module, inputs: Any, target: float, name: str) -> Tensor:
    """Inputs moved along the gradient until their margins are close to the target.

    Values stay within their range.

    Each step is one of Newton's method for the margin, as in DeepFool (Moosavi-Dezfooli et al., CVPR 2016).
    """
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise UsageError(
            f"--choice constructed needs inputs that are one floating-point tensor; those of {name} are not: give "
            "--choice boundary"
        )
    low, high, moved = float(inputs.min()), float(inputs.max()), inputs.detach().clone()
    best, smallest = moved, torch.full((len(inputs),), torch.inf, device=inputs.device)
    per_sample = (-1, *[1] * (inputs.ndim - 1))
    for _ in range(STEPS):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            margin = margins(workload.judge, workload.run(model, moved))
            (gradient,) = torch.autograd.grad(margin.sum(), moved)
        off = (margin.detach() - target).abs()
        best = torch.where((off < smallest).view(per_sample), moved.detach(), best)
        smallest = smallest.minimum(off)
        steepness = gradient.square().flatten(1).sum(1).clamp_min(1e-20)
        step = ((margin.detach() - target) / steepness).view(per_sample) * gradient
        moved = (moved.detach() - step).clamp(low, high)
    return best
