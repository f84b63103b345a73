"""Fault models as text, their errors, and what regions may be."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.faults import FAULT_MODELS, FaultModel, Population, Region, fault_model

PATTERN = ["count", "rate", "run", "stride", "block", "cycles", "tile", "whole", "heads"]
BIAS = Region("bias", "int8", (8,))


def draw(text, *regions, law="per-element"):
    return fault_model(text).draw(regions, np.random.default_rng(0), law)


@pytest.mark.parametrize(
    ("text", "canonical", "count", "counted"),
    [
        ("bitflip", "bitflip", 1, False),
        ("bitflip:bits=all", "bitflip", 1, False),
        ("bitflip:count=1", "bitflip:count=1", 1, True),
        ("bitflip:count=8,bits=exponent", "bitflip:bits=exponent,count=8", 8, True),
        ("bitflip:rate=1e-6", "bitflip:rate=1e-06", None, True),
        ("burst:length=2", "burst", 1, False),
        ("burst: length = 3 , count = 4", "burst:length=3,count=4", 4, True),
        ("stuck", "stuck:at=1", 1, False),
        ("stuck:bits=30", "stuck:at=1,bits=30", 1, False),
        ("stuck:bits=30,at=0", "stuck:at=0,bits=30", 1, False),
        ("set:value=NaN", "set:value=nan", 1, False),
        ("zero:run=16", "zero:run=16", 16, True),
        ("zero:stride=32,count=4", "zero:count=4,stride=32", 4, True),
        ("scale:factor=3", "scale:factor=3.0", 1, False),
        ("multibit:flips=2", "multibit", 1, False),
        ("multibit:bits=sign+exponent,flips=3,run=2", "multibit:flips=3,bits=sign+exponent,run=2", 2, True),
        ("uniform", "uniform:low=0.0,high=1.0", 1, False),
        ("uniform:sign=random,high=1e18,low=1e16", "uniform:low=1e+16,high=1e+18,sign=random", 1, False),
        ("zero:block=16", "zero:block=16", None, True),
        ("zero:block=16,cycles=1", "zero:block=16", None, True),
        ("zero:cycles=4,block=16", "zero:block=16,cycles=4", None, True),
        ("zero:block=16,cycles=any", "zero:block=16,cycles=any", None, True),
        ("copy:tile=16x8", "copy:tile=16x8", None, True),
        ("scale:factor=-inf", "scale:factor=-inf", 1, False),
    ],
)
def test_text(text, canonical, count, counted):
    model = fault_model(text)
    assert model.text == canonical
    assert fault_model(canonical) == model
    assert (model.count, model.has_explicit_count) == (count, counted)


def test_with_count():
    assert fault_model("bitflip:bits=sign").with_count(4).text == "bitflip:bits=sign,count=4"
    assert fault_model("bitflip:count=9").with_count(1).text == "bitflip:count=1"
    assert fault_model("zero:run=9").with_count(3).text == "zero:run=3"
    assert fault_model("zero:count=9,stride=2").with_count(3).text == "zero:count=3,stride=2"
    for text in ("bitflip", "zero:run=9", "zero:count=9,stride=2"):
        with pytest.raises(UsageError, match="=0; expected 1 or more"):
            fault_model(text).with_count(0)
    for text in ("block=16", "block=16,cycles=any", "tile=2x3"):
        with pytest.raises(UsageError, match=f"{text} already chooses the elements; leave it out to corrupt 4"):
            fault_model(f"zero:{text}").with_count(4)
    with pytest.raises(UsageError, match=r"rate=0\.5 draws the number of corrupted elements"):
        fault_model("bitflip:rate=0.5").with_count(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bitfilp", "unknown fault model 'bitfilp'; did you mean 'bitflip'"),
        ("bitflip:cuont=3", "did you mean 'count'"),
        ("zero:bits=3", "unknown parameter of fault model 'zero'"),
        ("bitflip:count=0", "count=0; expected 1 or more"),
        ("bitflip:count=-3", "count=-3"),
        ("bitflip:count=1.5", "expected a value of type int"),
        ("bitflip:rate=1.5", "rate=1.5; expected a probability"),
        ("bitflip:rate=-1e-9", "rate=-1e-09"),
        ("bitflip:rate=nan", "rate=nan"),
        ("bitflip:rate=0.1,count=2", "count and rate exclude each other"),
        ("zero:run=3,count=2", "count and run exclude each other"),
        ("zero:run=3,stride=2", "run and stride exclude each other"),
        ("zero:stride=2", "stride=2 also needs count"),
        ("zero:run=0", "run=0"),
        ("zero:count=3,stride=0", "stride=0"),
        ("bitflip:bits=expnent", "unknown bit class 'expnent'; did you mean 'exponent'"),
        ("bitflip:bits=64", "within 0-63"),
        ("burst:length=0", "length=0"),
        ("burst:length=65", "expected 1 to 64"),
        ("stuck:at=2", "at=2; expected 0 or 1"),
        ("set:value=abc", "value='abc'"),
        ("set:value=0x1ffffffffffffffff", "value='0x1fff"),
        ("zero:block=0", "block=0; expected 1 or more"),
        ("zero:block=4,cycles=0", "cycles=0; expected 1 or more"),
        ("zero:block=4,cycles=many", "cycles='many'; expected a number of blocks, or the word any"),
        ("zero:cycles=4", "cycles=4 needs block"),
        ("zero:block=4,run=4", "run and block exclude each other"),
        ("zero:block=4,count=4", "count and block exclude each other"),
        ("zero:block=4,tile=2x2", "block and tile exclude each other"),
        ("zero:cycles=4,tile=2x2", "cycles and tile exclude each other"),
        ("zero:tile=16", "tile='16'; expected ROWSxCOLUMNS"),
        ("zero:tile=0x8", "rows of the tile=0"),
        ("zero:tile=8x0", "columns of the tile=0"),
        ("multibit:flips=0", "flips=0; expected 1 to 64"),
        ("multibit:flips=65", "flips=65"),
        ("uniform:low=2,high=1", "low=2.0,high=1.0; expected two finite numbers"),
        ("uniform:low=nan", "low=nan"),
        ("uniform:high=inf", "high=inf"),
        ("uniform:sign=plsu", "unknown sign 'plsu'; did you mean 'plus'"),
        ("scale:factor=nan", "factor=nan"),
        ("scale:factor=x", "expected a value of type float"),
    ],
)
def test_text_that_cannot_be(text, message):
    with pytest.raises(UsageError) as caught:
        fault_model(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bitflip:count=128", "asked for 128 distinct flips, but 'bias' has 64 for bitflip"),
        ("zero:count=9", "asked for 9 distinct elements, but 'bias' has 8"),
        ("bitflip:bits=exponent", "needs a dtype with bits=exponent; found 'bias' (int8, 8 elements)"),
        ("bitflip:bits=30,rate=0", "needs a dtype with bits=30"),
        ("burst:length=9", "needs a dtype with 9 adjacent bits among bits=all; found 'bias' (int8"),
        ("set:value=nan", "needs a dtype that can hold nan"),
        ("set:value=0x100", "needs a dtype that can hold 0x100"),
        ("zero:run=9", "run=9 spans 9 elements of one tensor, but the largest tensor, 'bias', has 8"),
        ("zero:count=3,stride=4", "spans 9 elements"),
        ("multibit:flips=9", "needs a dtype with 9 bits among bits=all; found 'bias' (int8"),
    ],
)
def test_what_cannot_be_drawn(text, message):
    with pytest.raises(UsageError) as caught:
        draw(text, BIAS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_than_several_tensors_have():
    with pytest.raises(UsageError, match="the 2 tensors have 96 for bitflip"):
        draw("bitflip:count=97", BIAS, Region("w", "int16", (2,)))


def test_nothing_to_corrupt():
    with pytest.raises(UsageError, match="found no tensor"):
        draw("bitflip")
    with pytest.raises(UsageError, match="'w' \\(float32, 0 elements\\)"):
        draw("bitflip:rate=0.5", Region("w", "float32", (0,)))
    with pytest.raises(UsageError, match="two elements or more"):
        draw("copy", Region("w", "float32", ()))
    with pytest.raises(UsageError, match="unknown sampling law 'per-layer'"):
        draw("bitflip", BIAS, law="per-layer")


def test_regions():
    region = Region("w", "bfloat16", (2, 3, 4), np.array([5, 0]))
    assert (region.eligible_count, region.numel, region.eligible_bit_count, region.codec.name) == (
        2,
        24,
        32,
        "bfloat16",
    )
    assert Region("s", "float64", ()).eligible_bit_count == 64
    with pytest.raises(UsageError, match="element 24 is outside 'w', which has 24"):
        Region("w", "int8", (2, 3, 4), np.array([3, 24]))
    with pytest.raises(UsageError, match="element -1"):
        Region("w", "int8", (2, 3, 4), np.array([-1]))
    for axes in ((0, 1), (0, 1, 1), (0, 1, 3)):
        with pytest.raises(UsageError, match="expected each of its 3 axes once"):
            Region("w", "int8", (2, 3, 4), axes=axes)
    with pytest.raises(UsageError, match="twice"):
        Region("w", "int8", (2,), np.array([1, 1]))
    with pytest.raises(UsageError, match="whole numbers"):
        Region("w", "int8", (2,), np.array([True, False]))
    with pytest.raises(UsageError, match="unknown dtype"):
        Region("w", "bool", (2,))
    with pytest.raises(UsageError, match="'bias' appears twice in the regions"):
        Population([BIAS, Region("bias", "int8", (8,))])
    assert draw("bitflip:rate=0.5", Region("w", "int8", (4,), np.array([], dtype=np.int64)), BIAS)[0].site == "bias"


def test_a_population_draws_the_same_as_its_regions():
    regions = [BIAS, Region("w", "float32", (30, 4))]
    for text in ("bitflip:count=9", "random:rate=0.3", "zero:run=3"):
        model = fault_model(text)
        for law in ("per-element", "per-tensor") if "rate" not in text else ("per-element",):
            first = model.draw(Population(regions), np.random.default_rng(3), law)
            assert first == model.draw(regions, np.random.default_rng(3), law)
            assert first == model.draw(tuple(regions), np.random.default_rng(3), law)


def test_factories_can_be_listed_and_called():
    for name, factory in FAULT_MODELS.items():
        assert inspect.getdoc(factory)
        assert list(inspect.signature(factory).parameters)[-len(PATTERN) :] == PATTERN
        model = factory(count=3)
        assert isinstance(model, FaultModel)
        told = {"stuck": "at=1,", "uniform": "low=0.0,high=1.0,"}.get(name, "")
        assert model.text == f"{name}:{told}count=3"
        assert hash(model) == hash(fault_model(model.text))
        assert name in repr(factory)
    assert FAULT_MODELS["bitflip"](bits=30).text == "bitflip:bits=30"
    assert FAULT_MODELS["set"](value=float("nan")).text == "set:value=nan"


def test_runs_without_torch():
    code = "import sys, unsilent.faults; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
