"""Operations with known answers: exact on a sound device in every dtype, and wrong on one with a planted fault."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from selftest.faulty_device import FAULTS, OPERATIONS, rounds
from unsilent.engine.device_placement import DTYPES
from unsilent.selftest.known_answers import known_answers
from unsilent.selftest.mismatch import mismatch
from unsilent.selftest.running import execute_tests
from unsilent.sites.faulty_device import FaultyDevice, element_fault


@pytest.fixture(scope="module")
def tests():
    result, missing = known_answers("cpu")
    assert {(test.operation, test.dtype) for test in result} | {tuple(name.split(" in ")) for name in missing} == {
        (operation, dtype) for operation in OPERATIONS for dtype in DTYPES
    }
    return result


def test_a_sound_device_gives_every_answer_exactly(tests):
    counts = execute_tests(tests, rounds(3))
    assert [count.executions for count in counts] == [3] * len(tests)
    assert [count for count in counts if count.wrong] == []


@pytest.mark.parametrize("implementation", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_every_implementation_of_the_optimizer_gives_the_answer(tests, monkeypatch, implementation):
    """None may round: that would look like a fault of a device on which torch chooses it."""
    monkeypatch.setattr(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, **implementation))
    assert [test.execute() for test in tests if test.operation == "optimizer"] == [None] * len(DTYPES)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_every_implementation_of_attention_gives_the_answer(tests, backend):
    with sdpa_kernel(backend):
        assert [test.execute() for test in tests if test.operation == "attention"] == [None] * len(DTYPES)


def test_the_answers_are_those_of_float64(tests):
    """Not from the same integers: torch computes each in float64 of the dtype's inputs, which are exact."""
    by_name = {(test.operation, test.dtype): test for test in tests}
    for dtype in DTYPES:
        for operation in ("gemm", "convolution", "reduction", "attention"):
            run = by_name[operation, dtype].run
            cells = dict(zip(run.__code__.co_freevars, (c.cell_contents for c in run.__closure__), strict=True))
            inputs = {name: tensor.double() for name, tensor in cells.items()}
            want = {
                "gemm": lambda a, b: a @ b,
                "convolution": lambda x, w: functional.conv2d(x, w, stride=2),
                "reduction": lambda x: x.sum(-1),
                "attention": lambda q, k, v: (q @ k.mT / 8).softmax(-1) @ v,
            }[operation](**inputs)
            assert torch.equal(want, by_name[operation, dtype].expected.double()), (operation, dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("probability", [1.0, 0.3])
def test_a_planted_fault_is_found_in_every_dtype(tests, operation, fault, probability):
    own = [test for test in tests if test.operation == operation]
    with FaultyDevice(FAULTS[fault], probability, OPERATIONS[operation]) as device:
        counts = execute_tests(own, rounds(1 if probability == 1 else 12))
    assert device.hits
    assert all(count.wrong for count in counts)
    assert all(count.mismatch.operation == operation and count.mismatch.dtype == count.dtype for count in counts)
    if probability == 1:
        assert all(count.first_wrong == 1 for count in counts)
    assert not any(count.wrong for count in execute_tests(own, rounds(1)))


def test_the_first_wrong_element_is_named(tests):
    gemm = next(test for test in tests if (test.operation, test.dtype) == ("gemm", "float32"))
    place = 5 * 256 + 7
    with FaultyDevice(lambda tensor: element_fault(tensor, "xor", np.array([place]), 0), 1.0, OPERATIONS["gemm"]):
        found = gemm.execute()
    value = gemm.expected[5, 7].item()
    assert (found.index, found.expected, found.got, found.count) == ((5, 7), repr(value), repr(-value), 1)
    assert (
        found.sentence() == f"gemm in float32: element [5, 7] is {-value}, expected {value}; 1 of 65,536 elements wrong"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((slice(3, 4), slice(None)), "all in row 3"),
        ((slice(None), slice(5, 6)), "all in column 5"),
        (([0, 2], slice(None)), "all in rows 0 and 2"),
        ((slice(None), slice(1, None, 4)), "every 4 elements"),
        ((slice(3, 4), slice(5, 6)), ""),
    ],
)
def test_a_wrong_row_a_wrong_column_and_a_lane_are_told_apart(wrong, said):
    expected = torch.zeros(8, 16)
    got = expected.clone()
    got[wrong] = math.nan
    assert mismatch("gemm", got, expected, got != expected).layout == said
