"""What every fault model promises, checked by one table: each text x each dtype x shapes x selections.

A new fault model is one more row: its text, how many slots one element of a dtype has, and what must be true of each
corrupted word. Words are Python integers here and the arithmetic is the oracle's.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from conftest import few
from oracles import faults_oracle as oracle
from unsilent.basics.errors import UsageError
from unsilent.faults import CODECS, FAULT_MODELS, SAMPLING_LAWS, Fault, Region, fault_model

SHAPES = ((), (1,), (37,), (5, 9))
SEEDS = range(2)


@dataclass(frozen=True)
class Corrupted:
    """One corrupted element: everything a promise may look at."""

    dtype: str
    element: int
    before: int
    after: int
    operand: float | int


@dataclass(frozen=True)
class Row:
    text: str
    ways: Callable[[str, int], int]  # (dtype, elements of the tensor) -> slots per element
    promise: Callable[[Corrupted], bool]
    run: tuple[int, int] | None = None  # (elements, stride) of a run
    block: tuple[int, int | None] | None = None  # (elements, cycles) of a block; None: any number of cycles
    rate: bool = False


def bits_named(text, dtype):
    return len(oracle.named_bits(dtype, text))


def within(text, length=None):
    """The changed bits are among the named ones; exactly ``length`` adjacent ones, if given."""

    def promise(s):
        changed = [i for i in range(oracle.width(s.dtype)) if (s.before ^ s.after) >> i & 1]
        inside = bool(changed) and set(changed) <= oracle.named_bits(s.dtype, text)
        return inside and (length is None or changed == list(range(changed[0], changed[0] + length)))

    return promise


def bursts(length, text="all"):
    def ways(dtype, numel):
        named = oracle.named_bits(dtype, text)
        return int(any(all(p + i in named for i in range(length)) for p in named))

    return ways


def several(n, text="all"):
    """Exactly ``n`` named bits are flipped, wherever they are."""

    def promise(s):
        changed = {i for i in range(oracle.width(s.dtype)) if (s.before ^ s.after) >> i & 1}
        return len(changed) == n and changed <= oracle.named_bits(s.dtype, text)

    return promise


def as_many(n, text="all"):
    return lambda dtype, numel: int(bits_named(text, dtype) >= n)


def between(low, high, signs=(1,)):
    """A number from ``low`` to ``high``, or its negative, rounded as both ends are."""

    def number(dtype, value):
        return oracle.decode(dtype, oracle.encode(dtype, value))

    def promise(s):
        found = oracle.decode(s.dtype, s.after)
        ends = [sorted((number(s.dtype, sign * low), number(s.dtype, sign * high))) for sign in signs]
        return any(a <= found <= b for a, b in ends)

    return promise


def held(at, text="all"):
    """At most one bit changed, and it is a named one that now is ``at``."""

    def promise(s):
        changed = s.before ^ s.after
        mask = s.operand if at else s.operand ^ ((1 << oracle.width(s.dtype)) - 1)
        position = mask.bit_length() - 1
        return (
            mask == 1 << position
            and position in oracle.named_bits(s.dtype, text)
            and changed & ~mask == 0
            and s.after >> position & 1 == at
        )

    return promise


def becomes(value):
    def promise(s):
        if isinstance(value, float) and math.isnan(value):
            return oracle.is_nan(s.dtype, s.after)
        return s.after == oracle.encode(s.dtype, value)

    return promise


def any_of(*texts):
    return lambda dtype, numel: int(any(bits_named(t, dtype) for t in texts))


def every(dtype, numel):
    return 1


def flips(text="all"):
    return lambda dtype, numel: bits_named(text, dtype)


def floats(dtype, numel):
    return int(dtype in oracle.FLOATS)


def finite(s):
    return s.dtype in oracle.INTEGERS or math.isfinite(oracle.decode(s.dtype, s.after))


TABLE = (
    Row("bitflip", flips(), within("all", 1)),
    Row("bitflip:bits=exponent", flips("exponent"), within("exponent", 1)),
    Row("bitflip:bits=30", flips("30"), within("30", 1)),
    Row("bitflip:bits=sign+0-3", flips("sign+0-3"), within("sign+0-3", 1)),
    Row("bitflip:count=8", flips(), within("all")),
    Row("bitflip:bits=exponent_msb,count=5", flips("exponent_msb"), within("exponent_msb", 1)),
    Row("bitflip:count=290", flips(), within("all")),
    Row("bitflip:rate=0.2", flips(), within("all"), rate=True),
    Row("bitflip:bits=mantissa,run=4", flips("mantissa"), within("mantissa", 1), run=(4, 1)),
    Row("bitflip:count=3,stride=7", flips(), within("all", 1), run=(3, 7)),
    Row("burst", bursts(2), within("all", 2)),
    Row("burst:length=3,count=4", bursts(3), within("all", 3)),
    Row("burst:length=8,bits=exponent", bursts(8, "exponent"), within("exponent", 8)),
    Row("burst:length=20,rate=0.3", bursts(20), within("all", 20), rate=True),
    Row("burst:run=5", bursts(2), within("all", 2), run=(5, 1)),
    Row("multibit", as_many(2), several(2)),
    Row("multibit:flips=1,count=4", as_many(1), several(1)),
    Row("multibit:flips=5,bits=exponent,count=3", as_many(5, "exponent"), several(5, "exponent")),
    Row("multibit:flips=8,rate=0.4", as_many(8), several(8), rate=True),
    Row("multibit:flips=3,bits=mantissa,run=5", as_many(3, "mantissa"), several(3, "mantissa"), run=(5, 1)),
    Row("bitflip:bits=0-5,block=4", flips("0-5"), within("0-5", 1), block=(4, 1)),
    Row("stuck:at=0,block=16", every, held(0), block=(16, 1)),
    Row("multibit:block=6,cycles=2", as_many(2), several(2), block=(6, 2)),
    Row("random:block=3,cycles=any", every, finite, block=(3, None)),
    Row("copy:block=100", lambda d, n: int(n > 1), lambda s: s.operand != s.element, block=(100, 1)),
    Row("uniform:low=1e16,high=1e18", every, between(1e16, 1e18)),
    Row("uniform:low=-2.5,high=3,count=9", every, between(-2.5, 3)),
    Row("uniform:low=40,high=50,sign=minus,run=3", every, between(40, 50, (-1,)), run=(3, 1)),
    Row("uniform:low=1,high=9,sign=random,block=5,cycles=any", every, between(1, 9, (1, -1)), block=(5, None)),
    Row("stuck", every, held(1)),
    Row("stuck:at=0,count=6", every, held(0)),
    Row("stuck:at=1,bits=30", any_of("30"), held(1, "30")),
    Row("stuck:at=0,bits=exponent,run=3", any_of("exponent"), held(0, "exponent"), run=(3, 1)),
    Row("set:value=nan", floats, becomes(math.nan)),
    Row("set:value=-1.5,count=4", every, becomes(-1.5)),
    Row("set:value=inf", lambda d, n: int(d in oracle.FLOATS and oracle.FLOATS[d][3]), becomes(math.inf)),
    Row("set:value=1e17", every, becomes(1e17)),
    Row("set:value=9007199254740993", every, becomes(9007199254740993)),
    Row("set:value=0x7f80", lambda d, n: int(oracle.width(d) >= 16), lambda s: s.after == 0x7F80),
    Row("zero", every, becomes(0)),
    Row("zero:run=16", every, becomes(0), run=(16, 1)),
    Row("zero:count=4,stride=5", every, becomes(0), run=(4, 5)),
    Row("random", every, finite),
    Row("random:rate=0.5", every, finite, rate=True),
    Row("random:count=9", every, finite),
    Row("scale", every, lambda s: s.operand == 2.0),
    Row("scale:factor=-0.3,count=20", every, lambda s: s.operand == -0.3),
    Row("scale:factor=1e40,rate=0.5", every, lambda s: s.operand == 1e40, rate=True),
    Row("copy", lambda d, n: int(n > 1), lambda s: s.operand != s.element),
    Row("copy:count=7", lambda d, n: int(n > 1), lambda s: s.operand != s.element),
)


def regions_of(dtype, shape):
    """Two tensors of one dtype, all of it and then a shuffled half of it; beside one that is empty."""
    size = math.prod(shape)
    half = np.random.default_rng(99).permutation(size)[: size // 2 + 1]
    for elements in (None, half):
        yield [
            Region("param:a", dtype, shape, elements),
            Region("param:none", dtype, (0, 3)),
            Region("param:b", dtype, (11,)),
        ]


def slots_of(row, region):
    """(slots, places where a placement may start) of a region, counted the slow way."""
    ways = row.ways(region.dtype, math.prod(region.shape))
    if row.block is not None:
        return math.ceil(region.eligible_count / row.block[0]) * ways
    if row.run is None:
        return region.eligible_count * ways
    span = (row.run[0] - 1) * row.run[1] + 1
    return max(0, region.eligible_count - span + 1) * ways


def check(row, region, fault):
    """One fault against the oracle; returns how many slots it corrupted."""
    assert (fault.site, fault.dtype, fault.shape) == (region.site, region.dtype, region.shape)
    assert not fault.elements.flags.writeable
    assert not fault.operands.flags.writeable
    allowed = list(range(region.numel)) if region.elements is None else region.elements.tolist()
    elements = fault.elements.tolist()
    assert elements == sorted(set(elements))
    assert set(elements) <= set(allowed)
    assert len(fault) == len(elements) > 0

    layout = CODECS[fault.dtype]
    tensor = (
        np.random.default_rng(5).integers(0, 2**64, region.numel, np.uint64, endpoint=False).astype(layout.word_dtype)
    )
    kept = tensor.copy()
    source = tensor[fault.operands] if fault.operation == "copy_from" else None
    after = fault.apply(tensor[fault.elements], source)
    assert after.dtype == layout.word_dtype
    np.testing.assert_array_equal(tensor, kept)
    rows = zip(elements, tensor[fault.elements].tolist(), after.tolist(), fault.operands.tolist(), strict=True)
    corrupted = [Corrupted(fault.dtype, e, b, a, o) for e, b, a, o in rows]
    for s in corrupted:
        taken = int(tensor[s.operand]) if source is not None else None
        expected = oracle.apply(fault.dtype, fault.operation, s.before, s.operand, taken)
        both_nan = oracle.is_nan(fault.dtype, s.after) and oracle.is_nan(fault.dtype, expected)
        assert s.after == expected or (fault.operation == "scale" and both_nan), s
        assert row.promise(s), s
    if row.run is not None:
        places = sorted(allowed.index(e) for e in elements)
        assert places == [places[0] + i * row.run[1] for i in range(row.run[0])]
        if fault.operation in ("xor", "and", "or"):
            assert len(set(fault.operands.tolist())) == 1
    if row.block is not None:
        places = sorted(allowed.index(e) for e in elements)
        n, cycles = row.block
        assert places[0] % n == 0
        assert places == list(range(places[0], places[0] + len(places)))
        ends = places[-1] + 1 == len(allowed)
        assert ends or len(places) % n == 0
        assert cycles is None or len(places) == cycles * n or (ends and len(places) < cycles * n)
        if fault.operation in ("xor", "and", "or"):
            assert len(set(fault.operands.tolist())) == 1
    if fault.operation == "xor":
        pairs = [(s.element, i) for s in corrupted for i in range(layout.bits) if (s.before ^ s.after) >> i & 1]
        assert fault.bit_positions() == pairs
    flipped = sum((s.before ^ s.after).bit_count() for s in corrupted)
    return flipped if row.text.startswith("bitflip") else len(corrupted)


@pytest.mark.parametrize("dtype", few(CODECS, *list(CODECS)[::3]))
@pytest.mark.parametrize("row", TABLE, ids=lambda r: r.text)
def test_contract(row, dtype):
    model = fault_model(row.text)
    assert fault_model(model.text) == model
    for shape in SHAPES:
        for regions in regions_of(dtype, shape):
            slots = sum(slots_of(row, r) for r in regions)
            if row.run is None and row.block is None:
                assert model.capacity(regions) == slots
            placements = 1 if row.run or row.block or row.rate else model.count
            for law in SAMPLING_LAWS if not row.rate else ["per-element"]:
                for seed in SEEDS:
                    if slots < placements:
                        with pytest.raises(UsageError) as caught:
                            model.draw(regions, np.random.default_rng(seed), law)
                        assert "\n" not in str(caught.value)
                        continue
                    faults = model.draw(regions, np.random.default_rng(seed), law)
                    by_site = {r.site: r for r in regions}
                    sites = [f.site for f in faults]
                    assert sites == [s for s in by_site if s in sites]  # one each, in region order
                    corrupted = sum(check(row, by_site[f.site], f) for f in faults)
                    assert model.count is None or corrupted == model.count
                    assert faults == model.draw(regions, np.random.default_rng(seed), law)
                    for fault in faults:
                        assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault
                        assert "\n" not in fault.describe()


def test_every_model_is_in_the_table():
    assert {row.text.partition(":")[0] for row in TABLE} == set(FAULT_MODELS)
    for factory in FAULT_MODELS.values():
        first = factory.__doc__.splitlines()[0]
        assert first.endswith(".") or ";" in first or ":" in first


def test_draw_depends_on_seed():
    regions = [Region("param:a", "float32", (100, 100))]
    drawn = {fault_model("bitflip").draw(regions, np.random.default_rng(seed)) for seed in range(50)}
    assert len(drawn) > 45
