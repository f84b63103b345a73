"""Draws: the order of runs, the dtype that hardware holds a value in, and the outputs that see it."""

import json

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.faults import CODECS, Fault, fault_model
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.unresolved_fault import UnresolvedFault

SITE = "op:conv1#convolution.0/fwd/first"
NHWC = (0, 2, 3, 1)


def test_runs_follow_the_axes():
    shape = (2, 32, 5, 7)
    draw = UnresolvedFault("op:conv1#convolution.0/fwd/out", fault_model("zero:block=16"), seed=3)
    (fault,) = draw.resolve_for_tensor("float32", shape, axes=NHWC)
    n, c, h, w = np.unravel_index(fault.elements, shape)
    assert c.tolist() in ([*range(16)], [*range(16, 32)])
    assert [len(set(i.tolist())) for i in (n, h, w)] == [1, 1, 1]


@pytest.mark.parametrize("axes", [None, NHWC])
def test_positions_may_be_the_fastest(axes):
    shape = (2, 6, 5, 7) if axes else (2, 5, 7, 6)
    draw = UnresolvedFault("op:conv1#convolution.0/fwd/out", fault_model("zero:block=7"), seed=3, fastest="positions")
    (fault,) = draw.resolve_for_tensor("float32", shape, axes=axes)
    index = np.moveaxis(np.array(np.unravel_index(fault.elements, shape)), 0, 1)
    channel, *rest = (1, 0, 2, 3) if axes else (3, 0, 1, 2)
    assert len({tuple(i[[channel, *rest[:-1]]].tolist()) for i in index}) == 1
    assert sorted(i[rest[-1]] for i in index) == [*range(7)]
    assert UnresolvedFault(SITE, fault_model("zero"), fastest="positions").resolve_for_tensor("float32", ()) != ()


def test_a_selection_may_be_corrupted_along_the_axes():
    elements = np.array([0, 1, 10, 11])  # two channels at two positions
    (fault,) = UnresolvedFault(SITE, fault_model("zero:block=2")).resolve_for_tensor(
        "float32", (1, 2, 2, 5), elements, axes=NHWC
    )
    assert fault.elements.tolist() in ([0, 10], [1, 11])


def test_a_held_value_is_corrupted_in_its_own_words():
    draw = UnresolvedFault(SITE, fault_model("bitflip:bits=sign"), seed=1, held="float16")
    (fault,) = draw.resolve_for_tensor("float32", (40,))
    assert (fault.dtype, fault.held) == ("float32", "float16")
    assert fault.operands.dtype == np.uint16
    assert fault.operands.tolist() == [0x8000]
    assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault
    before = np.array([1.0 + 2**-20], dtype=np.float32)
    after = fault.apply(before.view(np.uint32)).view(np.float32)
    assert after.tolist() == [-1.0]  # rounded to float16 as well


def test_held_in_the_tensors_own_dtype_is_nothing_special():
    plain, held = (UnresolvedFault(SITE, fault_model("random:count=3"), seed=1, held=h) for h in (None, "float32"))
    assert plain.resolve_for_tensor("float32", (40,)) == held.resolve_for_tensor("float32", (40,))


@pytest.mark.parametrize("held", [n for n, c in CODECS.items() if c.kind == "float"])
@pytest.mark.parametrize(
    "text", ["bitflip:count=5", "random:block=16", "copy:run=3", "scale:count=2", "uniform:rate=0.2"]
)
def test_every_model_can_be_held(text, held):
    rng = np.random.default_rng(0)
    words = rng.standard_normal(64).astype(np.float32).view(np.uint32)
    (fault,) = UnresolvedFault(SITE, fault_model(text), seed=1, held=held).resolve_for_tensor("float32", (64,))
    source = words[fault.operands] if fault.operation == "copy_from" else None
    after = CODECS["float32"].decode(fault.apply(words[fault.elements], source))
    codec = CODECS[held]
    np.testing.assert_array_equal(codec.decode(codec.encode(after)), after)  # what it holds fits into it


def test_the_reach_is_the_same_whenever_it_is_asked():
    everything = np.ones((2, 32, 4, 4), dtype=np.bool_)
    draw = UnresolvedFault(SITE, fault_model("bitflip"), seed=5, window=OutputWindow(16, 1))
    reach = draw.affected_outputs(everything, 1)
    assert reach.size == 16
    np.testing.assert_array_equal(reach, draw.affected_outputs(everything, 1))
    assert (
        len(
            {
                tuple(UnresolvedFault(SITE, draw.model, s, window=draw.window).affected_outputs(everything, 1).tolist())
                for s in range(20)
            }
        )
        > 10
    )
    assert UnresolvedFault(SITE, fault_model("bitflip")).affected_outputs(everything, 1) is None


def test_the_reach_does_not_depend_on_what_is_corrupted():
    everything = np.ones((2, 32, 4, 4), dtype=np.bool_)
    found = {
        tuple(
            UnresolvedFault(SITE, fault_model(text), seed=5, window=OutputWindow(1, 16))
            .affected_outputs(everything, 1)
            .tolist()
        )
        for text in ("bitflip", "zero:count=7", "copy:block=16,cycles=any")
    }
    assert len(found) == 1


def test_the_reach_has_a_stream_of_its_own():
    """The channel that sees the fault is not the number of the corrupted element more often than by chance."""
    everything = np.ones((8, 3), dtype=np.bool_)
    same = 0
    for seed in range(200):
        draw = UnresolvedFault(SITE, fault_model("zero"), seed, window=OutputWindow(1, None))
        (fault,) = draw.resolve_for_tensor("float32", (8,))
        same += int(draw.affected_outputs(everything, 0)[0]) // 3 == int(fault.elements[0])
    assert same < 60  # 25 expected


@pytest.mark.parametrize(
    "site", ["op:conv1#convolution.0/fwd/out", "saved:conv1#convolution.0/first", "param:fc.weight"]
)
def test_a_window_is_for_operands(site):
    with pytest.raises(UsageError, match="has a window; only the operands first, second and third"):
        UnresolvedFault(site, fault_model("bitflip"), window=OutputWindow(16, 1))


@pytest.mark.parametrize(
    ("field", "message"), [({"held": "float17"}, "unknown dtype"), ({"fastest": "rows"}, "unknown fastest axis 'rows'")]
)
def test_what_cannot_be(field, message):
    with pytest.raises(UsageError, match=message):
        UnresolvedFault(SITE, fault_model("bitflip"), **field)
