"""Checksums and parity of weights: corrupted blocks are found, and repaired bit for bit or left as they are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.protection.weight_checksums import MOST_WORDS, checksums, correct, factors
from unsilent.protection.weight_integrity import BLOCK_SIZES, WeightIntegrity, choose_sizes
from unsilent.sites.memory import content_of


def large():
    """A model of several tensors and dtypes, one with other strides, of more blocks than a group has."""
    torch.manual_seed(0)
    model = nn.Module()
    model.a = nn.Linear(1400, 900)
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


@given(st.data())
def test_any_corrupted_byte_is_found_and_repaired(data):
    model = MODEL
    before = bits(model)
    name, tensor = data.draw(st.sampled_from([(n, t) for n, t in model.state_dict().items() if t.numel()]))
    byte = data.draw(st.integers(0, tensor.numel() * tensor.element_size() - 1))
    flip(tensor, byte, data.draw(st.integers(1, 255)))
    (bad,) = INTEGRITY.check()
    assert (bad.tensor, bad.start) == (name, byte // BLOCK * BLOCK)
    assert INTEGRITY.repair([bad]).repaired == (bad,)
    assert bits(model) == before
    assert INTEGRITY.check() == []


MODEL = large()
INTEGRITY = WeightIntegrity(MODEL)
BLOCK, GROUPS = INTEGRITY._devices[0].size, INTEGRITY._devices[0].groups


def test_the_large_model_has_several_groups():
    assert BLOCK == 1024
    assert GROUPS > 1


@pytest.mark.parametrize(
    "sizes", [(470_000,), (500_000, 300), (10**6,) * 3 + (256,) * 20, (4 * 2048 * 2048,), (10**8,)]
)
def test_checksums_and_parity_take_their_share_of_the_memory(sizes):
    size, groups = choose_sizes(sizes)
    taken = 8 * sum(-(-one // size) for one in sizes) + groups * (size + 8)
    assert taken <= 0.0085 * sum(sizes)
    assert taken + size + 8 > 0.0085 * sum(sizes)  # another group would be too many
    assert all(
        8 * sum(-(-one // less) for one in sizes) + less + 8 > 0.0085 * sum(sizes)
        for less in BLOCK_SIZES
        if less < size
    )


def test_the_memory_is_counted():
    integrity = WeightIntegrity(nn.Linear(2048, 2048))
    assert integrity.model_bytes == 4 * 2048 * 2049
    assert 0.005 * integrity.model_bytes < integrity.nbytes <= 0.0085 * integrity.model_bytes
    tiny = WeightIntegrity(nn.Linear(64, 80, bias=False))  # 20 KiB
    assert tiny.nbytes == 40 * 8 + 512 + 8


def reference_checksum(words):
    """The formula of the module, in Python's integers."""
    whole, upper = (one.tolist() for one in factors(len(words), torch.device("cpu")))
    return sum(f * w + g * (w >> 32) for f, g, w in zip(whole, upper, words.tolist(), strict=True)) % 2**64


@given(st.integers(0, 2**32), st.sampled_from([8, 64, 128, 256]))
def test_checksums_are_those_of_the_formula(seed, words):
    given = np.random.default_rng(seed).integers(-(2**63), 2**63, (3, words))
    assert [int(one) % 2**64 for one in checksums(torch.from_numpy(given))] == [
        reference_checksum(one) for one in given
    ]


def test_factors_differ_so_that_two_flips_never_cancel():
    whole, upper = (one.tolist() for one in factors(MOST_WORDS, torch.device("cpu")))
    every = [one % 2**32 for one in (*whole, *upper)]  # 2**32 f + g is g
    assert all(one % 2 for one in every)
    assert len({*every, *(2**32 - one for one in every)}) == 2 * len(every)


@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([(0, 64), (31, 32), (62, 64), (22, 32)]))
def test_one_or_two_flipped_bits_of_a_block_are_corrected(seed, flips, bits):
    rng = np.random.default_rng(seed)
    right = rng.integers(-(2**63), 2**63, 128)
    wrong = right.copy()
    width = bits[1] - bits[0]
    for place in rng.choice(128 * width, flips, replace=False):
        wrong.view(np.uint64)[place // width] ^= np.uint64(1 << (bits[0] + int(place) % width))
    stored = torch.from_numpy(right[None])
    assert checksums(torch.from_numpy(wrong[None])) != checksums(stored)
    found = correct(torch.from_numpy(wrong), checksums(stored)[0])
    if flips == 3:
        assert found is None
    else:
        assert found.flips == flips
        assert (found.words.numpy() == right).all()


def flip_bits(tensor, places):
    """Flip bits of contiguous memory by their numbers, with NumPy."""
    octets = tensor.detach().numpy().reshape(-1).view(np.uint8)
    for place in places:
        octets[place // 8] ^= 1 << place % 8


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_scattered_flips_of_a_small_model_are_repaired_or_left(seed, count):
    rng = np.random.default_rng(seed)
    model = nn.Linear(64, 80, bias=False)
    integrity, right = WeightIntegrity(model), bits(model)
    places = rng.choice(model.weight.nbytes * 8, count, replace=False)
    flip_bits(model.weight, places)
    wrong = bits(model)
    per_block = np.bincount(places // (512 * 8), minlength=40)
    repair = integrity.repair()
    assert sorted(one.start // 512 for one in (*repair.repaired, *repair.refused)) == per_block.nonzero()[0].tolist()
    many = int((per_block > 2).sum())
    if many <= 1:
        assert not repair.refused
        assert bits(model) == right
    else:
        assert not repair.repaired
        assert bits(model) == wrong


def test_ten_scattered_flips_are_repaired_in_small_and_large_models():
    for width in (64, 300, 1500):
        model = nn.Linear(width, width)
        integrity, right = WeightIntegrity(model), bits(model)
        for _ in range(10):
            flip_bits(model.weight, np.random.default_rng(width).choice(32 * width**2, 10, replace=False))
            assert not integrity.repair().refused
            assert bits(model) == right


def test_neighbours_in_memory_are_repaired_together():
    model = large()
    before, integrity = bits(model), WeightIntegrity(model)
    model.a.weight.data.view(-1)[: GROUPS * BLOCK // 4] = torch.nan  # a block of each group
    repair = integrity.repair()
    assert len(repair.repaired) == GROUPS
    assert not repair.refused
    assert bits(model) == before


def test_two_ruined_blocks_of_a_group_are_left_alone():
    model = large()
    integrity = WeightIntegrity(model)
    words = model.a.weight.data.view(-1)
    words[:3] = 1e8
    words[GROUPS * BLOCK // 4 :][:3] = 1e8
    words[300] *= 2  # of another group
    repair = integrity.repair()
    assert [block.start for block in repair.refused] == [0, GROUPS * BLOCK]
    assert len({block.group for block in repair.refused}) == 1
    assert len(repair.repaired) == 1
    assert words[:3].tolist() == words[GROUPS * BLOCK // 4 :][:3].tolist() == [1e8] * 3


def test_a_wrong_correction_is_undone_because_parity_disagrees():
    model = nn.Linear(64, 80, bias=False)
    integrity = WeightIntegrity(model)
    flip_bits(model.weight, [5, 512 * 8 + 5])
    wrong, device = bits(model), integrity._devices[0]
    device.checksums[1] = checksums(device.words(1, 2) ^ torch.eye(64, dtype=torch.int64)[3])[0]  # fits another flip
    assert len(integrity.repair().refused) == 2
    assert bits(model) == wrong


def test_a_group_is_left_alone_if_its_digest_disagrees():
    model = nn.Linear(64, 80, bias=False)
    integrity = WeightIntegrity(model)
    flip_bits(model.weight, [5, 512 * 8 + 5])
    wrong = bits(model)
    integrity._devices[0].digests += 1
    assert len(integrity.repair().refused) == 2
    assert bits(model) == wrong


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
