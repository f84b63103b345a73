"""Where two runs part: the operation is named, and what is known about why is said."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from unsilent.engine.differences import first_difference


class Net(nn.Module):
    """Linear, a part that is given, linear."""

    def __init__(self, middle=None):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), middle or nn.Identity(), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def between(function):
    """A module that applies a function."""

    class Between(nn.Module):
        def forward(self, x):
            return function(x)

    return Between()


def found(middle, **more):
    model = Net(middle).eval() if not more.pop("train", False) else Net(middle)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    return first_difference(lambda: model(x), model)


def test_equal_runs_have_no_difference():
    assert found(nn.ReLU()) is None
    assert found(nn.Dropout(0.5)) is None  # in eval mode
    seeded = between(lambda x: (torch.manual_seed(1), x + torch.rand(5))[1])
    assert found(seeded) is None


def test_dropout_in_training_mode():
    assert found(nn.Dropout(0.5), train=True) == "'middle#bernoulli.0', which draws random numbers"


def test_random_numbers_are_named_where_they_are_drawn():
    assert found(between(lambda x: x * 2 + torch.rand(5))) == "'middle#rand.0', which draws random numbers"


def test_a_counter_in_python():
    count = itertools.count()
    why = "which Python calls with other arguments in each run, maybe from a counter or a changing order"
    assert found(between(lambda x: x.relu() + next(count) * 1e-3)) == f"'middle#add.0', {why}"


def test_a_counter_too_small_to_change_the_bits_is_seen_too():
    count = itertools.count()
    assert found(between(lambda x: x + 1e-30 * next(count))).startswith("'middle#add.0', which Python calls with")


def test_an_order_that_is_another_each_time():
    class Part:
        def __init__(self, index, mark):
            self.index, self.mark = index, mark

        def __hash__(self):
            return self.mark

    runs = itertools.count()

    def total(x):
        sign = 1 if next(runs) % 2 else -1
        parts = {Part(i, 10 + sign * i) for i in range(5)}
        return sum(x[:, part.index] for part in parts)[:, None].expand(-1, 5)

    assert found(between(total)).startswith("'middle#select.0', which Python calls with other arguments")


def test_noise_from_numpy():
    generator = np.random.default_rng(0)
    noisy = between(lambda x: x.relu() + torch.from_numpy(generator.standard_normal(5).astype(np.float32)))
    said = found(noisy)
    assert said.startswith("'middle#add.0', which reads a tensor that differs. No recorded operation computed it")


def test_a_constant_made_of_a_random_number():
    generator = np.random.default_rng(0)
    assert "reads a tensor" in found(between(lambda x: x + torch.tensor(generator.random())))


def test_state_that_one_run_leaves_for_the_next():
    kept = []
    remembering = between(lambda x: (kept.append(x * (len(kept) and kept[-1])), kept[-1])[1])
    assert found(remembering).startswith("'middle#mul.0', which ")


def test_runs_that_take_different_ways():
    runs = itertools.count()
    odd = between(lambda x: x.relu().abs() if next(runs) % 2 else x.relu().neg())
    name = "'middle#relu.0', which is followed by 'middle#neg.0' in one run and by 'middle#abs.0' in the other"
    assert found(odd) == name


def test_runs_of_different_length():
    runs = itertools.count()
    model = Net()
    x = torch.ones(1, 5)

    def run():
        y = model(x)
        return y.exp() if next(runs) % 2 else y

    assert first_difference(run, model) == (
        "'last#addmm.0', which is followed by nothing in one run and by '(run)#exp.0' in the other"
    )
    assert first_difference(lambda: x.exp() if next(runs) % 2 else x.cos(), model) == (
        "the first operation, which is '(run)#cos.0' in one run and '(run)#exp.0' in the other"
    )


def test_memory_that_was_never_written():
    """`torch.empty` alone is no difference; reading what it happened to hold is."""
    stale = itertools.count(1)

    def careful(x):
        torch.empty(1000)
        return torch.empty_like(x).copy_(x)

    def careless(x):
        room = torch.empty(5)
        if not _get_current_dispatch_mode()._clear:  # what memory happens to hold cannot be arranged for
            room.numpy()[:] = next(stale)
        return x + room

    assert found(between(careful)) is None
    assert found(between(careless)) == "'middle#add.0', which reads memory that was never written"


def test_minus_zero_and_nan_are_bits_like_others():
    runs = itertools.count()
    zeros = between(lambda x: torch.from_numpy(np.float32([(-0.0, 0.0)[next(runs) % 2]] * 5)) * x)
    assert "reads a tensor" in found(zeros)
    assert found(between(lambda x: x / 0 * 0)) is None


def test_dtypes_and_layouts_without_plain_bytes():
    def odd(x):
        torch.tensor([], dtype=torch.complex64).conj()
        y = x.to(torch.bfloat16).to(torch.complex64).conj() * 2
        (x > 0).sum().item()
        x.relu().to_sparse().to_dense()
        return y.real.float().contiguous()

    assert found(between(odd)) is None


def test_a_run_that_raises_leaves_the_callers_error_alone():
    assert found(between(lambda x: 1 // 0)) is None


def test_nothing_is_left_behind():
    before = torch.nn.modules.module._global_forward_hooks.copy()
    found(between(lambda x: 1 // 0))
    found(nn.ReLU())
    assert torch.nn.modules.module._global_forward_hooks == before
    assert not _get_current_dispatch_mode_stack()
