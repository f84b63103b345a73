"""The check of operations changes nothing, sees operations of all kinds, and names no operation of a step that is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsilent.recovery.digests import digest_text, state_tensors
from unsilent.recovery.operation_check import OperationCheck
from unsilent.recovery.rank_link import Parcel, _Unpacker


class Batch(dict):
    """A mapping of the user's own, which stays one."""


class Mixed(nn.Module):
    """Operations in place, at random, with statistics, of indices, attention, and a part that is computed again."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 3)
        self.to(dtype)

    def forward(self, x):
        x = self.first(self.table(x))
        mask = torch.full((5, 5), float("-inf"), dtype=x.dtype).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return checkpoint(self.last, x, use_reentrant=False).float()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
}


def train(optimizer, dtype, check):
    torch.manual_seed(0)
    model = Mixed(dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        made.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randint(9, (6, 5))).flatten(0, 1), torch.randint(3, (30,)))
        with check(model) if check else torch.enable_grad():
            loss = nn.functional.cross_entropy(model(torch.randint(9, (6, 5))).flatten(0, 1), torch.randint(3, (30,)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            made.step()
    return digest_text(state_tensors(model, [made])), torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_checked_has_the_bits_of_one_that_is_not(optimizer, dtype):
    checks = []

    def check(model):
        checks.append(OperationCheck(model))
        return checks[-1]

    plain, checked = train(optimizer, dtype, None), train(optimizer, dtype, check)
    assert plain[0] == checked[0]
    assert torch.equal(plain[1], checked[1])
    for one in checks:
        assert (one.overflowed, one.differing, one.far) == ("", "", "")
        assert one.checked > 60


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: (x * 0 + 100).exp(), "#exp.0"),
        (lambda x: x.mul_(1e30), "#mul.0"),
        (lambda x: (x * x) @ x.t(), "#mul.0"),
        (lambda x: x.half().float(), "#_to_copy.0"),
        (lambda x: torch._foreach_mul([x, x], 1e30)[0], "#_foreach_mul.0"),
    ],
)
def test_an_operation_whose_range_is_exceeded_is_named(operation, name):
    class Model(nn.Module):
        def forward(self, x):
            return operation(x + 0)

    model = Model()
    with OperationCheck(model) as check:
        model(torch.full((4, 4), 1e20))
    assert check.overflowed.endswith(name)
    with OperationCheck(model) as check:
        model(torch.full((4, 4), float("inf")))
    assert check.overflowed == ""


def test_what_is_infinite_in_float64_as_well_is_not_the_range_of_the_dtype():
    class Model(nn.Module):
        def forward(self, x):
            return x.log()

    model = Model()
    with OperationCheck(model) as check:
        model(torch.zeros(4))
    assert (check.overflowed, check.checked) == ("", 1)


def test_any_nesting_of_tensors_can_be_sent():
    value = Batch(x=torch.ones(2, 3), more=[(torch.arange(3), "text", None)], empty=torch.zeros(0))
    parcel = Parcel(value)
    again = _Unpacker(parcel.content, parcel.tensors).load()
    assert type(again) is Batch
    assert again["more"][0][1:] == ("text", None)
    assert again["x"] is value["x"]
    assert parcel.kinds[0] == (torch.float32, (2, 3), False, False)
    with pytest.raises(Exception, match="pickle"):
        Parcel({"x": lambda: None})
