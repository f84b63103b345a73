"""Codecs against torch's casts (every word of the narrow dtypes) and against exact fractions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles import faults_oracle as oracle
from unsilent.basics.errors import UsageError
from unsilent.faults import CODECS, codec

NAMES = tuple(CODECS)
FLOATS = tuple(oracle.FLOATS)
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words_of(name, n=4096):
    """Every word of a narrow dtype; random and special ones of a wide dtype."""
    bits = codec(name).bits
    if bits <= 16:
        return np.arange(1 << bits, dtype=codec(name).word_dtype)
    special = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    drawn = (
        np.random.default_rng(7).integers(0, 1 << bits, n, dtype=np.uint64, endpoint=False)
        if bits < 64
        else (np.random.default_rng(7).integers(0, 2**64 - 1, n, dtype=np.uint64, endpoint=True))
    )
    return np.concatenate([np.array(special, dtype=np.uint64), drawn]).astype(codec(name).word_dtype)


def as_torch(name, words):
    return torch.from_numpy(words.view(f"i{words.itemsize}" if words.itemsize > 1 else "u1").copy()).view(
        getattr(torch, name)
    )


def from_torch(tensor, name):
    return tensor.view(VIEWS[codec(name).bits // 8]).numpy().view(codec(name).word_dtype)


def same_or_nan(name, found, expected):
    """Word for word, except that any NaN is as good as another."""
    nan = np.isnan(codec(name).decode(expected)) if name in FLOATS else np.zeros(expected.shape, bool)
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert np.isnan(codec(name).decode(found[nan])).all()


@pytest.mark.parametrize("name", NAMES)
def test_width_matches_torch(name):
    kind = getattr(torch, name)
    assert codec(name).bits == 8 * torch.empty(0, dtype=kind).element_size()
    assert (codec(name).kind == "float") == kind.is_floating_point


@pytest.mark.parametrize("name", NAMES)
def test_decode_matches_torch(name):
    words = words_of(name)
    wide = torch.float64 if name in FLOATS else torch.int64
    expected = as_torch(name, words).to(wide).numpy()
    found = codec(name).decode(words)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("name", NAMES)
def test_encode_undoes_decode(name):
    words = words_of(name)
    same_or_nan(name, codec(name).encode(codec(name).decode(words)), words)


@pytest.mark.parametrize("name", FLOATS)
def test_encode_matches_torch_from_float32(name):
    """From float32 torch rounds once to every narrower dtype, so the words must be the same, overflow included."""
    values = as_torch("float32", words_of("float32", 20000))
    halves = torch.from_numpy(codec("bfloat16").decode(np.arange(1 << 16, dtype=np.uint16))).to(torch.float32)
    narrow = torch.from_numpy(codec(name).decode(words_of(name)[: 1 << 16])).to(torch.float32)
    ties = (narrow[:-1] + narrow[1:]) / 2  # halfway between neighbours
    edges = torch.tensor([448.0, 464.0, 464.00003, 480.0, 57344.0, 61440.0, 61439.996, 65504.0, 65520.0, 65536.0])
    everything = torch.cat([values, halves, narrow, ties, edges, -edges])
    if torch.tensor(500.0).to(torch.float8_e4m3fn).isnan():  # before 2.12 torch did not saturate
        everything = everything[everything.abs() <= 464]
    expected = from_torch(everything.to(getattr(torch, name)), name)
    same_or_nan(name, codec(name).encode(everything.to(torch.float64).numpy()), expected)


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_encode_matches_torch_from_float64(name):
    values = as_torch("float64", words_of("float64", 20000))
    spread = torch.from_numpy(
        np.random.default_rng(3).normal(size=5000) * 10.0 ** np.arange(5000).__mod__(90).__sub__(45)
    )
    everything = torch.cat([values, spread])
    same_or_nan(name, codec(name).encode(everything.numpy()), from_torch(everything.to(getattr(torch, name)), name))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_encode_rounds_once(name):
    """Just above halfway: rounding to float32 first would land on the tie and then go the wrong way."""
    table = oracle.finite_magnitudes(name)
    rng = np.random.default_rng(5)
    for i in rng.integers(0, len(table) - 1, 20).tolist():
        middle = float((table[i] + table[i + 1]) / 2)
        for value in (np.nextafter(middle, np.inf), np.nextafter(middle, 0), middle, -middle):
            expected = oracle.encode(name, float(value))
            assert int(codec(name).encode(value)) == expected, (name, value)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@given(value=st.floats(width=64))
def test_encode_matches_exact_fractions(name, value):
    assert np.isnan(value) or int(codec(name).encode(value)) == oracle.encode(name, value)


@pytest.mark.parametrize("name", oracle.INTEGERS)
def test_integers_round_and_saturate(name):
    values = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        126.5,
        127.5,
        255.5,
        1e30,
        -1e30,
        np.inf,
        -np.inf,
        np.nan,
        2.0**63,
        -(2.0**63),
        2.0**62,
    ]
    assert codec(name).encode(values).tolist() == [oracle.encode(name, v) for v in values]
    whole = np.array([-(2**63), -129, -1, 0, 127, 128, 255, 256, 2**53 + 1, 2**63 - 1])
    assert codec(name).encode(whole).tolist() == [oracle.encode(name, int(v)) for v in whole]
    assert codec(name).encode(np.array([2**64 - 1], dtype=np.uint64))[0] == oracle.encode(name, 2**64 - 1)
    assert codec(name).encode(np.array([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_fields(name):
    assert [codec(name).field_of_bit(i) for i in range(codec(name).bits)] == oracle.fields(name)
    for outside in (-1, codec(name).bits):
        with pytest.raises(UsageError, match=f"outside {name}"):
            codec(name).field_of_bit(outside)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "all",
        "sign",
        "exponent",
        "exponent_msb",
        "mantissa",
        "30",
        "0",
        "23-30",
        "5-63",
        "sign+0-2",
        "mantissa+exponent",
    ],
)
def test_positions(name, text):
    expected = tuple(sorted(oracle.named_bits(name, text)))
    assert codec(name).selected_bits(text) == expected


@pytest.mark.parametrize("text", ["", "expnent", "64", "-1", "5-3", "1.5", "0x3", "sign+", "99999999999999999999", "٣"])
def test_bits_that_cannot_be(text):
    with pytest.raises(UsageError) as caught:
        codec("float32").selected_bits(text)
    assert "\n" not in str(caught.value)


def test_close_names_are_suggested():
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        codec("bfloat61")
    with pytest.raises(UsageError, match="did you mean 'exponent'"):
        codec("float32").selected_bits("expnent")


def test_shapes_are_kept():
    for name in NAMES:
        for shape in ((), (0,), (2, 3)):
            words = np.zeros(shape, codec(name).word_dtype)
            assert codec(name).decode(words).shape == shape
            assert codec(name).encode(np.zeros(shape)).shape == shape
