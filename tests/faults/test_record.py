"""The fault record: exact round trip, safe reading of hostile JSON, content equality."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.errors import UsageError
from unsilent.faults import CODECS, OPERATIONS, Fault


def fault(**changes):
    base = {
        "site": "param:fc.weight",
        "dtype": "float32",
        "shape": (4, 6),
        "elements": np.array([3, 23]),
        "operation": "xor",
        "operands": np.array([1 << 30, 3], dtype=np.uint32),
    }
    return Fault(**{**base, **changes})


GOOD = fault(step=0, last_step=7, first_step=7, phase="fwd", rank=2).to_json()


@st.composite
def faults(draw):
    layout = CODECS[draw(st.sampled_from(sorted(CODECS)))]
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    size = int(np.prod(shape))
    elements = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    operation = draw(st.sampled_from(OPERATIONS))
    n = len(elements)
    if operation == "copy_from":
        operands = np.array(draw(st.lists(st.integers(0, size - 1), min_size=n, max_size=n)))
    elif operation == "scale":
        operands = np.array(draw(st.lists(st.floats(allow_nan=False), min_size=n, max_size=n)))
    elif operation == "function":
        operands = np.array(draw(st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n)), dtype=np.uint64)
    else:
        words = st.integers(0, (1 << layout.bits) - 1)
        operands = np.array(draw(st.lists(words, min_size=n, max_size=n)), dtype=layout.word_dtype)
    numbers = st.none() | st.integers(0, 2**63 - 1)
    moment = {k: draw(numbers) for k in ("step", "micro_step", "occurrence")}
    if operation == "function":
        moment["function"] = "name@0123456789abcdef"
    return Fault(
        draw(st.text("abc.:/#@Å ", min_size=1)), layout.name, shape, np.array(elements), operation, operands, **moment
    )


@given(faults())
def test_round_trip(one):
    again = Fault.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one
    assert hash(again) == hash(one)
    assert again.to_json() == one.to_json()
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.site in one.describe()


def test_equality_is_by_content():
    assert fault() == fault()
    assert len({fault(), fault()}) == 1
    for changed in (
        fault(site="x"),
        fault(elements=np.array([3, 22])),
        fault(operands=np.array([1 << 30, 2], dtype=np.uint32)),
        fault(rank=1),
        fault(operation="or"),
        fault(shape=(24,)),
    ):
        assert changed != fault()
    assert fault() != "fault"


def test_arrays_are_read_only_also_after_copies():
    for one in (fault(), copy.deepcopy(fault()), pickle.loads(pickle.dumps(fault())), Fault.from_json(GOOD)):
        with pytest.raises(ValueError, match="read-only"):
            one.elements[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            one.operands[0] = 1


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (fault(elements=np.array([11]), operands=np.array([1 << 30], dtype=np.uint32)),
         "param:fc.weight[1,5] xor 0x40000000 (bit 30, exponent)"),
        (fault(), "param:fc.weight xor on 2 elements (3 bits)"),
        (fault(elements=np.array([0]), operands=np.array([3], dtype=np.uint32), step=0, phase="fwd"),
         "param:fc.weight[0,0] xor 0x00000003 (bits 0, 1) at step 0, phase fwd"),
        (fault(shape=(), elements=np.array([0]), operation="set", operands=np.array([0x7FC00000], dtype=np.uint32)),
         "param:fc.weight set 0x7fc00000 (nan)"),
        (fault(elements=np.array([1]), operation="copy_from", operands=np.array([9])),
         "param:fc.weight[0,1] copy_from element 9"),
        (fault(elements=np.array([1]), operation="scale", operands=np.array([-0.5])),
         "param:fc.weight[0,1] scale by -0.5"),
        (fault(elements=np.array([1]), operation="and", operands=np.array([0x7FFFFFFF], dtype=np.uint32), rank=3),
         "param:fc.weight[0,1] and 0x7fffffff (bit 31, sign) at rank 3"),
    ],
)  # fmt: skip
def test_describe(one, text):
    assert one.describe() == text


def test_bit_positions():
    assert fault().bit_positions() == [(3, 30), (23, 0), (23, 1)]
    cleared = fault(operation="and", operands=np.array([0xFFFFFFFE, 0xFFFFFFFF], dtype=np.uint32))
    assert cleared.bit_positions() == [(3, 0)]
    assert fault(operation="set").bit_positions() == []
    wide = fault(dtype="int64", operands=np.array([1 << 63, 1], dtype=np.uint64))
    assert wide.bit_positions() == [(3, 63), (23, 0)]


def test_apply_refuses_what_does_not_fit():
    words = np.zeros(2, np.uint32)
    for wrong in (words[:1], words.astype(np.int32), words.reshape(1, 2), words.astype(np.uint64)):
        with pytest.raises(UsageError, match="words is"):
            fault().apply(wrong)
    moved = fault(operation="copy_from", operands=np.array([1, 2]))
    for wrong in (None, words[:1], words.astype(np.int32)):
        with pytest.raises(UsageError, match="source is"):
            moved.apply(words, wrong)


def test_apply_makes_a_new_array():
    words, source = np.zeros(2, np.uint32), np.ones(2, np.uint32)
    for operation in [o for o in OPERATIONS if o != "function"]:  # which needs one that is loaded
        operands = {"copy_from": np.array([1, 2]), "scale": np.array([2.0, 2.0])}.get(operation)
        one = fault(operation=operation, **({} if operands is None else {"operands": operands}))
        after = one.apply(words, source)
        after[:] = 7
        assert not words.any()
        assert source.all()
        assert one.operands[0] != 7


HOSTILE = [
    ("version", 2, "expected 1"),
    ("version", True, "expected 1"),
    ("version", "1", "expected 1"),
    ("site", "", "printable"),
    ("site", "a\x1b[31m", "printable"),
    ("site", "a\nb", "printable"),
    ("site", 3, "printable"),
    ("dtype", "float23", "did you mean"),
    ("dtype", None, "printable"),
    ("operation", "xnor", "did you mean 'xor'"),
    ("operation", ["xor"], "printable"),
    ("shape", "46", "a list"),
    ("shape", [4, -6], "whole numbers"),
    ("shape", [4, 6.0], "whole numbers"),
    ("shape", [True, 24], "whole numbers"),
    ("shape", [2**40, 2**40], "below 2\\^63"),
    ("shape", [1] * 100, "at most 64"),
    ("shape", [0, 4], "has none"),
    ("shape", [4, 5], "0-19"),
    ("elements", [], "at least one"),
    ("elements", [3, 3], "3 after 3.*distinct"),
    ("elements", [23, 3], "ascending"),
    ("elements", [-1, 3], "is -1; .*0-23"),
    ("elements", [3, 24], "is 24; .*0-23"),
    ("elements", [3, 10**400], "0-23"),
    ("elements", [-(10**6000), 3], "a int"),
    ("elements", [3, 4.0], "a list"),
    ("elements", [False, True], "a list"),
    ("elements", {"3": 1}, "a list"),
    ("elements", [3], "2 operands for 1 elements"),
    ("operands", ["0x40000000"], "1 operands for 2 elements"),
    ("operands", ["0x40000000", "0x3"], "8 hex digits"),
    ("operands", ["0x40000000", "0x0000000_"], "8 hex digits"),
    ("operands", ["0x40000000", "0x00000003\n"], "8 hex digits"),
    ("operands", ["0x40000000", "-0x0000003"], "8 hex digits"),
    ("operands", ["0x40000000", 3], "hex strings"),
    ("operands", None, "hex strings"),
    ("rank", None, "whole number"),
    ("rank", -1, "whole number"),
    ("step", 1.5, "whole number"),
    ("step", True, "whole number"),
    ("step", 2**63, "whole number"),
    ("last_step", 6, "before first_step"),
    ("phase", "", "printable"),
    ("layout", None, "printable"),
    ("layuot", "strided", "did you mean 'layout'"),
    (3, 4, "unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "expected"), HOSTILE)
def test_hostile_record(key, value, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        Fault.from_json({**GOOD, key: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("factor", ["nan", "0x1.8", "2.0", "0x1.0p+99999", "1e5", "0x1.0p+5000", 2.0, "inf\n"])
def test_hostile_factor(factor):
    with pytest.raises(UsageError, match=r"factor|hex strings"):
        Fault.from_json({**GOOD, "operation": "scale", "operands": [factor, factor]})


def test_hostile_source():
    assert Fault.from_json({**GOOD, "operation": "copy_from", "operands": [0, 23]}).operands.tolist() == [0, 23]
    for wrong in ([0, 24], [-1, 0], ["0x0", "0x1"], [0, 1.0]):
        with pytest.raises(UsageError):
            Fault.from_json({**GOOD, "operation": "copy_from", "operands": wrong})


@pytest.mark.parametrize("record", [None, [], "fault", 3, [GOOD]])
def test_not_a_record(record):
    with pytest.raises(UsageError, match="expected an object"):
        Fault.from_json(record)


def test_what_is_missing_is_named():
    required = ("version", "site", "dtype", "shape", "elements", "operation", "operands")
    for key in required:
        with pytest.raises(UsageError, match=f"lacks {key}"):
            Fault.from_json({k: v for k, v in GOOD.items() if k != key})
    assert Fault.from_json({k: GOOD[k] for k in required}).rank == 0


def test_deep_nesting_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError):
        Fault.from_json({**GOOD, "elements": deep})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(key=st.sampled_from(sorted(GOOD)), value=JSON)
def test_anything_else_is_refused_or_applies(key, value):
    try:
        one = Fault.from_json({**GOOD, key: value})
    except UsageError:
        return
    assert 0 <= one.elements[0] <= one.elements[-1] < np.prod(one.shape)
    assert Fault.from_json(one.to_json()) == one
