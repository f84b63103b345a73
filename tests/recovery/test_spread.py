"""How far executions of a step lie apart."""

from __future__ import annotations

import math

import torch

from unsilent.recovery.digests import digest_text
from unsilent.recovery.spread import Spread


def spread_of(*executions):
    tensors = [{"x": torch.tensor(values)} for values in executions]
    spread = Spread(tensors[0], digest_text(tensors[0]))
    for one in tensors:
        spread.add(one, has_alarm=True)
    return spread


def test_executions_alike_are_not_apart():
    assert spread_of([1.0, 4.0], [1.0, 4.0]).apart == 0


def test_a_difference_counts_relative_to_the_largest_magnitude_of_its_tensor():
    assert spread_of([1.0, 4.0], [1.0, 4.0], [1.5, 4.0]).apart == 0.125


def test_a_value_that_is_infinite_in_one_execution_alone_is_infinitely_apart():
    assert spread_of([1.0, 4.0], [1.0, 4.0], [1.0, math.inf]).apart == math.inf
    assert spread_of([1.0, math.nan], [1.0, math.nan], [1.0, 2.0]).apart == math.inf
    assert spread_of([0.0], [0.0], [1.0]).apart == math.inf


def test_values_that_are_infinite_in_all_executions_do_not_lie_apart():
    spread = spread_of([2.0, math.inf, math.nan], [2.5, math.inf, math.nan])
    assert spread.apart == 0.25
    assert spread.are_equal() == [True, False]
