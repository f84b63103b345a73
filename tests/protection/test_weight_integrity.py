"""Checksums and parity of weights: every corrupted block is found, and one of a group repaired bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unsilent.errors import UsageError
from unsilent.protection.weight_integrity import BLOCK_BYTES, GROUP, WeightIntegrity
from unsilent.sites.memory import content_of


def large():
    """A model of several tensors and dtypes, one with other strides, of more blocks than a group has."""
    torch.manual_seed(0)
    model = nn.Module()
    model.a = nn.Linear(700, 900)
    model.b = nn.Linear(3, 5, dtype=torch.float64)
    model.brain = nn.Parameter(torch.randn(41, 53).to(torch.bfloat16))
    model.turned = nn.Parameter(torch.randn(64, 48).T)
    model.register_buffer("counter", torch.tensor(3))
    model.register_buffer("octets", torch.arange(7, dtype=torch.uint8))
    model.nothing = nn.Parameter(torch.zeros(0))
    return model


def bits(model):
    return [bytes(content_of(tensor)) for tensor in model.state_dict().values()]


def flip(tensor, byte, mask):
    """Flip bits of one byte in logical order."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
    flat[byte] ^= mask
    tensor.data.copy_(flat.view(tensor.dtype).view(tensor.shape))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_corrupted_byte_is_found_and_repaired(data):
    model = MODEL
    before = bits(model)
    name, tensor = data.draw(st.sampled_from([(n, t) for n, t in model.state_dict().items() if t.numel()]))
    byte = data.draw(st.integers(0, tensor.numel() * tensor.element_size() - 1))
    flip(tensor, byte, data.draw(st.integers(1, 255)))
    (bad,) = INTEGRITY.check()
    assert (bad.tensor, bad.start) == (name, byte // BLOCK_BYTES * BLOCK_BYTES)
    assert INTEGRITY.repair([bad]).repaired == (bad,)
    assert bits(model) == before
    assert INTEGRITY.check() == []


MODEL = large()
INTEGRITY = WeightIntegrity(MODEL)


def test_it_takes_less_than_a_hundredth_of_the_memory():
    model = nn.Linear(2048, 2048)
    integrity = WeightIntegrity(model)
    assert integrity.model_bytes == 4 * 2048 * 2049
    assert integrity.nbytes < 0.01 * integrity.model_bytes


def test_neighbours_in_memory_are_repaired_together():
    model = large()
    before, integrity = bits(model), WeightIntegrity(model)
    words = model.a.weight.data.view(-1)
    words[:2000] = torch.nan  # two blocks
    repair = integrity.repair()
    assert len(repair.repaired) == 2
    assert not repair.refused
    assert bits(model) == before


def test_two_bad_blocks_of_a_group_are_left_alone():
    model = large()
    integrity = WeightIntegrity(model)
    groups = -(-sum(-(-t.numel() * t.element_size() // BLOCK_BYTES) for t in model.state_dict().values()) // GROUP)
    words = model.a.weight.data.view(-1)
    words[0] += 1
    words[groups * BLOCK_BYTES // 4] += 1
    after = bits(model)
    repair = integrity.repair()
    assert not repair.repaired
    assert [block.start for block in repair.refused] == [0, groups * BLOCK_BYTES]
    assert len({block.group for block in repair.refused}) == 1
    assert bits(model) == after


def test_a_corrupted_parity_repairs_nothing():
    model = large()
    integrity = WeightIntegrity(model)
    integrity._devices[0].parity += 1
    model.a.weight.data.view(-1)[5] = 0
    after = bits(model)
    assert len(integrity.repair().refused) == 1
    assert bits(model) == after


@pytest.mark.parametrize("slices", [1, 7, 64, 5000])
def test_slices_check_everything_in_turn(slices):
    model = large()
    integrity = WeightIntegrity(model)
    model.a.weight.data.view(-1)[123_456] *= 2
    found = [block for _ in range(slices) for block in integrity.check_slice(slices)]
    assert found == integrity.check()
    assert len(found) == 1


def test_weights_that_change_on_purpose_are_renewed():
    model = nn.Linear(8, 8)
    integrity = WeightIntegrity(model)
    with torch.no_grad():
        model.weight.mul_(2)
    assert integrity.check()
    integrity.renew()
    assert not integrity.check()


def test_a_model_without_weights_is_refused():
    with pytest.raises(UsageError, match="no weights to check"):
        WeightIntegrity(nn.ReLU())
