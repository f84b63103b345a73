"""Hashes of tensors where they lie, against whole-number arithmetic in numpy; every flipped bit is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from unsilent.sites.content_hash import CHUNK, FACTORS_SEED, chunk_factor, content_hashes, device_hash
from unsilent.sites.memory import WORDS, content_of

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip


def oracle(tensor: Tensor) -> int:
    data = bytes(content_of(tensor))
    words = np.frombuffer(data + bytes(-len(data) % 4), np.int32).astype(np.int64).astype(np.uint64)
    factors = np.random.Generator(np.random.PCG64(FACTORS_SEED)).integers(0, 2**64, CHUNK, np.uint64) | np.uint64(1)
    total = 0
    for number, first in enumerate(range(0, len(words), CHUNK)):
        part = words[first : first + CHUNK]
        terms = part * factors[: len(part)]
        total += int((terms ^ (terms >> np.uint64(32))).sum(dtype=np.uint64)) * chunk_factor(number)
    return total % 2**64


def value(tensor: Tensor) -> int:
    return int(device_hash(tensor)) % 2**64


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    rng = np.random.default_rng(1)
    raw = torch.from_numpy(rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8))
    return raw.bool()[..., 0] if dtype == torch.bool else raw.view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (4, 3, 2, 2), (0, 3)])
def test_the_hash_is_that_of_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = drawn(dtype, *shape)
    assert value(tensor) == oracle(tensor)


def test_views_are_hashed_by_their_elements() -> None:
    tensor = drawn(torch.float16, 9, 11)
    for view in (tensor.T, tensor[1:, 1:4], tensor[::2], tensor[0].expand(3, 11), tensor[3, 1:]):
        assert value(view) == oracle(view) == value(view.clone())
    image = drawn(torch.float32, 2, 3, 4, 5)
    assert value(image.to(memory_format=torch.channels_last)) == value(image)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_chunks_count_with_factors_of_their_own(size: int) -> None:
    tensor = drawn(torch.int8, 4 * size - 1)
    before = value(tensor)
    assert before == oracle(tensor)
    words = torch.cat([tensor, tensor.new_zeros(1)]).view(torch.int32)
    if size > CHUNK:
        words[[0, CHUNK]] = words[[CHUNK, 0]]
        assert value(words) != before, "the first words of two chunks are exchanged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_each_flipped_bit_is_noticed(dtype: torch.dtype) -> None:
    """10,000 flips of a bit in all; proven for every one, so none may be missed."""
    tensor = drawn(dtype, 400)
    width, before = dtype.itemsize, value(tensor)
    words, rng = tensor.view(WORDS[width]), np.random.default_rng(2)
    for place, bit in zip(rng.integers(0, 400, 2500), rng.integers(0, 8 * width, 2500), strict=True):
        flip = torch.tensor(1).to(words.dtype) << int(bit)
        words[place] ^= flip
        assert value(tensor) != before
        words[place] ^= flip
    assert value(tensor) == before


def test_exchanged_words_and_signs_of_zero_are_noticed() -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    assert len({value(tensor), value(tensor[[1, 0, 2, 3]]), value(torch.tensor([-0.0, 1.0, 2.0, float("nan")]))}) == 3


def test_flips_of_two_sign_bits_do_not_cancel() -> None:
    """Odd factors alone would let 2^31 * k(i) and 2^31 * k(j) cancel for about one of 2^32 pairs: two that would are tried."""
    factors = np.random.Generator(np.random.PCG64(FACTORS_SEED)).integers(0, 2**64, CHUNK, np.uint64) | np.uint64(1)
    low = (factors & np.uint64(2**33 - 1)).astype(np.int64)
    order = np.argsort(low)
    (same,) = np.nonzero(low[order][1:] == low[order][:-1])
    assert len(same)
    tensor = drawn(torch.float32, CHUNK).abs()
    words, before = tensor.view(torch.int32), value(tensor)
    for k in same[:20].tolist():
        pair = torch.from_numpy(order[k : k + 2].copy())
        for one, other in ((0, 0), (-(2**31), 0), (0, -(2**31)), (-(2**31), -(2**31))):
            kept = words[pair].clone()
            words[pair] = (kept & 0x7FFFFFFF) | torch.tensor([one, other], dtype=torch.int32)
            assert (value(tensor) == before) == torch.equal(words[pair], kept)
            words[pair] = kept


def test_hashes_of_several_tensors_say_which_kind_each_is() -> None:
    """Shape and dtype belong to it."""
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]
    assert len(set(content_hashes(zeros))) == 3
    assert content_hashes(zeros) == content_hashes([t.clone() for t in zeros])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_gives_the_value_of_the_cpu(dtype: torch.dtype) -> None:
    tensor = drawn(dtype, 3, CHUNK // 2 + 11)
    placed = tensor.cuda()
    assert value(placed) == value(tensor)
    assert content_hashes([placed])[0].bits == value(tensor)
    changed = placed.clone().view(WORDS[dtype.itemsize]) if not dtype.is_complex else None
    if changed is not None and dtype != torch.bool:
        changed[1, 77] ^= 1
        assert value(changed) != value(placed)
