"""Codes of memories: what they correct, report and miss, by exhaustive enumeration or against algebra done otherwise."""

import itertools

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.faults import Fault, Region, fault_model
from unsilent.faults.hardware import SHIPPED
from unsilent.faults.hardware.description import _event
from unsilent.faults.hardware.description_file import load_accelerator, parse_accelerator
from unsilent.faults.hardware.memories import SymbolCode, decoded, fitted, make_code, outcome_shares

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


def test_shares_of_outcomes_follow_from_the_pattern():
    region = [Region("param:w", "float32", (4096,))]
    sec_ded, parity = make_code("sec-ded", 64), make_code("parity", 32)
    assert outcome_shares(fault_model("bitflip"), region, sec_ded) == {"corrected": 1.0}
    assert outcome_shares(fault_model("burst:length=2"), region, sec_ded) == {"detected": 1.0}
    assert outcome_shares(fault_model("burst:length=2"), region, parity) == {"missed": 1.0}
    assert outcome_shares(fault_model("bitflip"), region, None) == {"missed": 1.0}
    runs = outcome_shares(fault_model("bitflip:run=2"), region, sec_ded)  # both in one word, or one in each of two
    assert runs["detected"] == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(4096))
    assert runs["corrected"] + runs["detected"] == 1


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
        region = [Region("param:w", "float32", (2**16,))]
        altered = [outcome_shares(fault_model(p.model), region, memory.code) for p in memory.patterns.values()]
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
