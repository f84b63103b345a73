"""Digests see where an element is: changes that cancel out in a sum, or in an XOR, are seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unsilent.recovery import digests
from unsilent.recovery.digests import device_digests, digests_of

SIZES = [24, 4000, digests.LEAST_ROW + 40, 5 * digests.LEAST_ROW + 8]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
HASHES = {"host": digests_of, "device": device_digests}
"""Both ways can be taken on tensors of the host, so that the one for devices is tested without a device."""


def words(tensor):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(kind)


def flip(tensor, places, bit):
    bit = tensor.element_size() * 8 - 1 if bit == "sign" else bit
    own = words(tensor).numpy()
    own[places] ^= own.dtype.type(1) << own.dtype.type(bit)


def equal_flips(tensor):
    """The same bit of two elements, set in one of them and cleared in the other: a sum does not change."""
    own = words(tensor).numpy()
    own[3] |= 1 << 9
    own[11] &= ~(1 << 9)
    return lambda: flip(tensor, [3, 11], 9)


def two_signs(tensor):
    return lambda: flip(tensor, [1, 7], "sign")


def signs_of_every_other(tensor):
    return lambda: flip(tensor, slice(1, len(tensor) // 2 * 2, 2), "sign")


def stuck_lane(tensor):
    """One bit of every 8th element: an even number of them."""
    return lambda: flip(tensor, slice(5, len(tensor) // 16 * 16, 8), 4)


def four_that_cancel(tensor):
    """Up, down, down, up at even distances, which weights that grow evenly would not see."""
    own = words(tensor).numpy()
    own[[2, 10, 12, 20]] = 64

    def change():
        own[[2, 10, 12, 20]] += np.array([1, -1, -1, 1], dtype=own.dtype)

    return change


def exchanged(tensor):
    def change():
        own = words(tensor)
        own[[2, len(own) - 3]] = own[[len(own) - 3, 2]]

    return change


def reversed_order(tensor):
    return lambda: words(tensor).copy_(words(tensor).flip(0))


def shifted(tensor):
    return lambda: words(tensor).copy_(words(tensor).roll(1))


CHANGES = [
    equal_flips, two_signs, signs_of_every_other, stuck_lane, four_that_cancel, exchanged, reversed_order, shifted,
]  # fmt: skip


@pytest.mark.parametrize("way", HASHES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_that_cancel_out_elsewhere_are_seen(way, change, dtype):
    for size in SIZES:
        tensor = torch.randint(-99, 99, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
        tensor[0], tensor[1], tensor[-3] = 101, 102, 103
        prepared = change(tensor)
        before = HASHES[way]([tensor])
        prepared()
        assert not torch.equal(HASHES[way]([tensor]), before), size


@pytest.mark.parametrize("way", HASHES)
def test_pairs_of_signs_in_any_two_rows_are_seen(way):
    tensor = torch.ones(4 * digests.LEAST_ROW)
    before = HASHES[way]([tensor])
    for other in range(7, len(tensor), digests.LEAST_ROW // 2 + 1):
        flip(tensor, [5, other], "sign")
        assert not torch.equal(HASHES[way]([tensor]), before), other
        flip(tensor, [5, other], "sign")


@pytest.mark.parametrize("way", HASHES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_digest_depends_on_the_elements_alone(way, dtype):
    content = torch.randint(0, 2, (2 * digests.LEAST_ROW,), generator=torch.Generator().manual_seed(0)).to(dtype)
    for size in (1, 7, 4000, digests.LEAST_ROW + 5):
        # At another offset, so at another alignment, or with another tensor, and in another layout.
        memory = torch.zeros(size + 1, dtype=dtype)
        memory[1:] = content[:size]
        (expected,) = HASHES[way]([content[:size]]).tolist()
        assert HASHES[way]([memory[1:], content[:3]]).tolist()[0] == expected
        strided = torch.zeros(size, 2, dtype=dtype)
        strided[:, 0] = content[:size]
        assert HASHES[way]([strided[:, 0]]).tolist() == [expected]
    assert HASHES[way]([content[:0]]).shape == (1,)
    assert HASHES[way]([]).shape == (0,)


@pytest.mark.parametrize("way", HASHES)
def test_a_conjugated_or_negated_view_has_the_digest_of_its_elements(way):
    tensor = torch.randn(5, dtype=torch.complex64)
    for view in (tensor.conj(), tensor.conj().imag):
        assert torch.equal(HASHES[way]([view]), HASHES[way]([view.clone().resolve_conj().resolve_neg()]))
    assert not torch.equal(HASHES[way]([tensor.conj()]), HASHES[way]([tensor]))
