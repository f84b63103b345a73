"""Codes of memories: what they correct, report and miss, by exhaustive enumeration or against algebra done otherwise."""

import itertools

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.faults import Fault, Region, fault_model
from unsilent.faults.hardware import SHIPPED
from unsilent.faults.hardware.description import _event
from unsilent.faults.hardware.description_file import load_accelerator, parse_accelerator
from unsilent.faults.hardware.event_shares import DRAWS, outcome_shares
from unsilent.faults.hardware.memories import SymbolCode, decoded, fitted, make_code

MEMORY = """
name = "mine"
description = "one memory"
sources = []
[memories.dram]
size = "1GiB"
fit_per_mbit = 50.0
bandwidth = "25GB"
holds = ["param:*"]
evidence = "assumed"
[memories.dram.patterns.single]
model = "bitflip"
share = 0.9
evidence = "assumed"
[memories.dram.patterns.row]
model = "bitflip:run=4"
share = 0.1
evidence = "read"
"""


def flips_of(*bits):
    return frozenset(bits)


@pytest.mark.parametrize("word", [8, 32, 64, 128])
def test_sec_ded_corrects_every_flip_and_reports_every_pair(word):
    code = make_code("sec-ded", word)
    assert all(code.decode(flips_of(bit)) == frozenset() for bit in range(word))
    assert all(code.decode(frozenset(pair)) is None for pair in itertools.combinations(range(word), 2))


def test_sec_ded_never_returns_three_flips_as_right():
    code = make_code("sec-ded", 32)
    seen = [code.decode(frozenset(three)) for three in itertools.combinations(range(32), 3)]
    assert all(left is None or len(left) in (3, 4) for left in seen)
    assert any(left is not None and len(left) == 4 for left in seen)  # miscorrected
    assert any(left is None for left in seen)


def test_on_die_correction_reports_nothing_and_often_makes_three_of_two():
    code = make_code("on-die", 128)
    columns = code.columns
    assert len({*columns, *(1 << n for n in range(8))}) == 136  # eight check bits are enough
    assert all(code.decode(flips_of(bit)) == frozenset() for bit in range(128))
    pairs = list(itertools.combinations(range(128), 2))
    left = [len(code.decode(frozenset(pair))) for pair in pairs]
    # Two columns whose sum is a third one: counted by the values of the columns alone.
    expected = sum((columns[a] ^ columns[b]) in set(columns) for a, b in pairs)
    assert left.count(3) == expected > len(pairs) / 3
    assert left.count(2) == len(pairs) - expected


def test_parity_reports_odd_numbers_of_flips():
    code = make_code("parity", 32)
    for count in range(1, 6):
        flips = frozenset(range(0, 6 * count, 6))
        assert code.decode(flips) == (None if count % 2 else flips)


def test_chipkill_corrects_any_error_of_a_symbol_and_reports_any_two():
    code = SymbolCode(64)
    for place, error in itertools.product(range(8), range(1, 256)):
        flips = frozenset(8 * place + bit for bit in range(8) if error >> bit & 1)
        assert code.decode(flips) == frozenset()
    rng = np.random.default_rng(0)
    for one, other in itertools.combinations(range(8), 2):
        for _ in range(50):
            errors = {one: rng.integers(1, 256), other: rng.integers(1, 256)}
            flips = frozenset(8 * p + bit for p, e in errors.items() for bit in range(8) if int(e) >> bit & 1)
            assert code.decode(flips) is None
    with pytest.raises(UsageError, match="multiple of 8 bits"):
        make_code("chipkill", 12)


def test_flips_are_counted_in_each_code_word():
    """Words of 64 bits hold four elements of float16: two flips in one are reported, one in each of two corrected."""
    code = make_code("sec-ded", 64)
    masks = np.array([1, 1], np.uint16)
    same = Fault("param:w", "float16", (16,), np.array([0, 3]), "xor", masks)
    apart = Fault("param:w", "float16", (16,), np.array([3, 4]), "xor", masks)
    assert decoded(same, code)[0] == "detected"
    assert decoded(apart, code)[0] == "corrected"


def test_a_miscorrection_adds_a_flip_to_the_fault():
    code = make_code("on-die", 64)
    pair = next(p for p in itertools.combinations(range(32), 2) if len(code.decode(frozenset(p))) == 3)
    mask = np.array([sum(1 << bit for bit in pair)], np.uint32)
    fault = Fault("param:w", "float32", (2,), np.array([0]), "xor", mask)
    outcome, left = decoded(fault, code)
    assert outcome == "miscorrected"
    assert sum(int(m).bit_count() for m in left.operands) == 3
    alone = Fault("param:w", "float32", (1,), np.array([0]), "xor", mask)  # the third flip may lie behind its end
    assert set(decoded(alone, code)[1].elements.tolist()) == {0}


def shares_of(model, region, code):
    shares, draws = outcome_shares(fault_model(model), [region], code)
    assert draws == 0
    return shares


def test_shares_of_outcomes_follow_from_the_pattern():
    region = Region("param:w", "float32", (4096,))
    sec_ded, parity = make_code("sec-ded", 64), make_code("parity", 32)
    assert shares_of("bitflip", region, sec_ded) == {"corrected": 1.0}
    assert shares_of("burst:length=2", region, sec_ded) == {"detected": 1.0}
    assert shares_of("burst:length=2", region, parity) == {"missed": 1.0}
    assert shares_of("bitflip", region, None) == {"missed": 1.0}
    # Of 4,095 runs 2,048 begin at the first element of a word.
    assert shares_of("bitflip:run=2", region, sec_ded) == pytest.approx(
        {"detected": 2048 / 4095, "corrected": 2047 / 4095}, rel=1e-15
    )


def brute_force(model, region, code):
    """Every event of a region, written out here: where it begins, which bits it flips, and what is left of each word."""
    name, _, parameters = model.partition(":")
    given = dict(one.split("=") for one in parameters.split(",") if one)
    width, size = region.codec.bits, region.eligible_count
    lowest, highest = map(int, given.get("bits", f"0-{width - 1}").split("-"))
    bits = range(lowest, highest + 1)
    sets = {
        "bitflip": [{bit} for bit in bits],
        "burst": [set(range(b, b + int(given.get("length", 2)))) for b in bits],
        "multibit": [set(c) for c in itertools.combinations(bits, int(given.get("flips", 2)))],
    }[name]
    sets = [one for one in sets if max(one) <= highest]
    if "block" in given:
        length = int(given["block"])
        places = [range(first, min(first + length, size)) for first in range(0, size, length)]
    else:
        count, stride = int(given.get("count", given.get("run", 1))), int(given.get("stride", 1))
        count = min(count, (size - 1) // stride + 1)
        places = [[first + k * stride for k in range(count)] for first in range(size - (count - 1) * stride)]
    chosen = range(size) if region.elements is None else region.elements.tolist()
    seen = []
    for place, flips in itertools.product(places, sets):
        elements = np.array(sorted(chosen[k] for k in place), np.int64)
        masks = np.full(len(elements), sum(1 << bit for bit in flips), region.codec.word_dtype)
        seen.append(decoded(Fault(region.site, region.dtype, region.shape, elements, "xor", masks), code)[0])
    return {outcome: seen.count(outcome) / len(seen) for outcome in set(seen)}


@pytest.mark.parametrize("protection", ["parity", "sec-ded", "on-die", "chipkill"])
@pytest.mark.parametrize(
    ("model", "dtype", "size", "word"),
    [
        ("bitflip", "float32", 7, 64),
        ("bitflip:bits=23-30", "float32", 33, 48),
        ("burst:length=3", "float32", 21, 64),
        ("burst:length=4,bits=10-15", "bfloat16", 25, 72),
        ("multibit:flips=3", "float16", 9, 64),
        ("bitflip:run=3", "float32", 50, 128),
        ("bitflip:run=9", "float32", 5, 64),
        ("bitflip:count=3,stride=5", "float32", 41, 64),
        ("burst:length=2,count=4,stride=2", "float16", 37, 40),
        ("bitflip:block=4", "float32", 23, 64),
        ("bitflip:block=3", "float16", 40, 80),
        ("bitflip", "float64", 11, 24),
    ],
)
def test_exact_shares_are_those_of_every_event(protection, model, dtype, size, word):
    region, code = Region("param:w", dtype, (size,)), make_code(protection, word)
    assert shares_of(model, region, code) == pytest.approx(brute_force(model, region, code), rel=1e-12)


def test_exact_shares_of_selected_elements():
    region = Region("param:w", "float32", (4, 8), elements=np.array([3, 4, 8, 9, 30, 31]))
    code = make_code("on-die", 64)
    for model in ("multibit:flips=2", "bitflip:run=2"):
        assert shares_of(model, region, code) == pytest.approx(brute_force(model, region, code), rel=1e-12)


def test_regions_count_by_their_weights():
    code = make_code("parity", 64)
    lone, pair = Region("param:a", "float32", (1,)), Region("param:b", "float32", (2,))
    shares, draws = outcome_shares(fault_model("bitflip:run=2"), [lone, pair], code, [3.0, 1.0])
    assert (shares, draws) == ({"detected": 0.75, "missed": 0.25}, 0)


@pytest.mark.parametrize("model", ["bitflip:count=2", "multibit:flips=7", "bitflip:tile=2x2"])
def test_patterns_of_too_many_events_are_drawn(model):
    region = Region("param:w", "float32", (60, 60))
    shares, draws = outcome_shares(fault_model(model), [region], make_code("sec-ded", 64))
    assert draws == DRAWS
    assert sum(shares.values()) == 1.0


def test_drawn_shares_agree_with_the_exact_ones(monkeypatch):
    region, code = Region("param:w", "float32", (50,)), make_code("on-die", 64)
    exact = brute_force("multibit:flips=2", region, code)
    monkeypatch.setattr("unsilent.faults.hardware.event_shares.MOST_CASES", 10)
    shares, draws = outcome_shares(fault_model("multibit:flips=2"), [region], code)
    assert draws == DRAWS
    for outcome, share in exact.items():
        assert abs(shares[outcome] - share) < 5 * (share * (1 - share) / DRAWS) ** 0.5


def test_a_run_is_cut_at_the_end_of_a_small_tensor():
    small = Region("param:b", "float32", (3,))
    assert fitted(fault_model("bitflip:run=8"), small).pattern.count == 3
    assert fitted(fault_model("bitflip:count=4,stride=2"), small).pattern.count == 2
    assert fitted(fault_model("bitflip:run=2"), small).pattern.count == 2


def test_a_description_of_memories_alone():
    about = parse_accelerator(MEMORY.encode(), "mine.toml")
    memory = about.description.memories["dram"]
    assert (memory.size_bytes, memory.bytes_per_second, memory.code) == (2**30, 25 * 10**9, None)
    assert memory.fit_per_bit == 50 / 2**20
    assert about.table() == ()
    assert about.why_no_fit_rate == "no flip-flops are described"
    with pytest.raises(UsageError, match="describes no flip-flops"):
        _ = about.weighted_presets


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("share = 0.1", "share = 0.2", "the shares of its patterns add up to 1.1; expected 1"),
        ('size = "1GiB"', 'size = "big"', "cannot read 'big' as a number of bytes"),
        ('["param:*"]', '["optim:*"]', "is in no memory during inference; expected param, op, input, kv"),
        ("[memories.dram.patterns.single]", 'protection = "sec-ded"\n[memories.dram.patterns.single]', "give both"),
        (
            "[memories.dram.patterns.single]",
            'protection = "ecc"\ncode_word = 64\n[memories.dram.patterns.single]',
            "unknown protection 'ecc'",
        ),
        (
            'evidence = "assumed"\n[memories.dram.patterns.single]\nmodel = "bitflip"',
            'evidence = "assumed"\nprotection = "parity"\ncode_word = 32\n'
            '[memories.dram.patterns.single]\nmodel = "random"',
            "use bitflip, burst or multibit",
        ),
        ('model = "bitflip"\n', 'model = "bitflop"\n', "unknown fault model"),
        ('model = "bitflip"\n', 'model = "bitflip:rate=0.1"\n', "draws how much it corrupts, maybe nothing"),
        ("fit_per_mbit = 50.0", "fit_per_mbit = -1.0", "greater than or equal to 0"),
        (MEMORY[MEMORY.index("[memories") :], "", "nothing is described; give flip-flops"),
        (
            "sources = []",
            "sources = []\nother = 0.5\nevidence = 'read'",
            "array is missing; give array, dtypes, groups",
        ),
    ],
)
def test_every_way_that_a_memory_can_be_wrong(old, new, message):
    assert old in MEMORY
    with pytest.raises(UsageError) as raised:
        parse_accelerator(MEMORY.replace(old, new).encode(), "mine.toml")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", SHIPPED[3:])
def test_memories_of_devices_that_come_with_the_package(name):
    """Sizes and bandwidths of device memory are from the vendor; nothing about failures is published, and nothing claims it."""
    about = load_accelerator(name).description
    assert (about.name, about.groups) == (name, {})
    assert about.sources
    hbm, on_chip = about.memories.values()
    assert hbm.holds == ["param:*", "kv:*"]
    assert on_chip.holds == ["op:*", "input:*"]
    assert hbm.evidence_grade("size") == hbm.evidence_grade("bandwidth") == "read"
    for memory in (hbm, on_chip):
        assert memory.evidence_grade("fit_per_mbit") == "assumed"
        assert {pattern.evidence_grade("share") for pattern in memory.patterns.values()} == {"assumed"}
        region = Region("param:w", "float32", (2**16,))
        altered = [shares_of(p.model, region, memory.code) for p in memory.patterns.values()]
        assert any(shares.keys() & {"missed", "miscorrected"} for shares in altered)  # there is something to measure


@pytest.mark.parametrize("text", ["mine.py:worn", "1*bitflip + 1*burst", "bitflip:lasts=2", "bitflip:from=2"])
def test_a_pattern_is_one_built_in_fault_model(text):
    with pytest.raises(UsageError, match="a pattern is one built-in fault model, without lasts and from"):
        _event(text)


def test_sec_ded_has_the_lightest_odd_columns():
    code = make_code("sec-ded", 64)  # as the (72, 64) code of Hsiao: 56 columns of weight 3 and 8 of weight 5
    assert sorted(column.bit_count() for column in code.columns) == [3] * 56 + [5] * 8
    assert len(set(code.columns)) == 64
    rows = [sum(column >> row & 1 for column in code.columns) for row in range(8)]
    assert max(rows) - min(rows) <= 1
    assert sorted({column.bit_count() for column in make_code("on-die", 128).columns}) == [2, 3, 4]


def test_three_flips_of_a_word_are_miscorrected_as_often_as_their_syndrome_is_a_column():
    code = make_code("sec-ded", 64)
    columns, rng = set(code.columns), np.random.default_rng(5)
    for _ in range(2000):
        flips = frozenset(rng.choice(64, 3, replace=False).tolist())
        a, b, c = (code.columns[bit] for bit in flips)
        syndrome = a ^ b ^ c
        left = code.decode(flips)
        if syndrome in columns or syndrome.bit_count() == 1:
            assert left is not None
            assert len(left) in (3, 4)
        else:
            assert left is None
