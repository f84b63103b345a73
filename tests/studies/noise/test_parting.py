"""Where two runs part, on steps written by hand: what does not end up in the weights does not count."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.stored_values import DamagedRecordError
from unsilent.replicas import ReplicaRow, StepTrace
from unsilent.replicas.step_trace import Operation, read_step_trace
from unsilent.studies.noise.diverging_operation import (
    DATA,
    KERNEL,
    MOVED,
    PATH,
    RANDOM,
    START,
    find_diverging_operation,
)
from unsilent.studies.noise.study import check_control


def op(name, reads, gives, phase="fwd", draws=False, moves=False):
    return Operation(name, name.partition("#")[2].partition(".")[0] or name, phase, draws, moves, reads, gives)


def run(*operations, before=(1,), after=(9,)):
    return StepTrace(before, after, operations)


def found(twin, other):
    first = find_diverging_operation(twin, other, "within/0", 4)
    return first if first is None else (first.kind, first.kernel, first.module, first.phase)


# data 5 -> conv 6 -> loss 7, which only a report reads; conv 6 -> gradient 8 -> weights 9
TWIN = run(
    op("conv#convolution.0", (5, 1), (6,)),
    op("(run)#mean.0", (6,), (7,)),
    op("conv#convolution.0", (6, 1), (8,), "bwd"),
    op("conv.weight", (8, 1), (9,), "update"),
)


def changed(**values):
    """The twin with some values replaced wherever they occur: ``v7=70``."""
    other = {int(k[1:]): v for k, v in values.items()}

    def map_(numbers):
        return tuple(other.get(n, n) for n in numbers)

    operations = [
        o._replace(input_hashes=map_(o.input_hashes), output_hashes=map_(o.output_hashes)) for o in TWIN.operations
    ]
    return StepTrace(map_(TWIN.before), map_(TWIN.after), operations)


def test_what_does_not_reach_the_weights_is_passed_over():
    assert found(TWIN, changed(v7=70, v8=80, v9=90)) == (KERNEL, "convolution", "conv", "backward")
    assert found(TWIN, changed(v6=60, v7=70, v8=80, v9=90)) == (KERNEL, "convolution", "conv", "forward")
    assert found(TWIN, changed(v9=90)) == (KERNEL, "conv.weight", "", "update")


def test_where_it_comes_from_is_told():
    assert found(TWIN, changed(v5=50, v6=60, v7=70, v8=80, v9=90))[0] == DATA
    assert found(TWIN, changed(v1=10, v6=60, v7=70, v8=80, v9=90)) == (START, "", "", "")
    for flag, kind in (("is_random", RANDOM), ("only_moves_data", MOVED)):
        pairs = [changed(v6=60, v7=70, v8=80, v9=90), TWIN]
        other, twin = (
            StepTrace(run.before, run.after, [run.operations[0]._replace(**{flag: True}), *run.operations[1:]])
            for run in pairs
        )
        assert found(twin, other)[0] == kind


def test_operations_that_only_one_run_has_are_no_difference_by_themselves():
    """As where the rows of a batch are put into another order first."""
    other = changed(v8=80, v9=90)
    more = [op("(run)#randperm.0", (), (40,)), op("(run)#index.0", (5, 40), (5,)), *other.operations]
    assert found(TWIN, StepTrace(other.before, other.after, more)) == (KERNEL, "convolution", "conv", "backward")
    more = [*other.operations[:2], op("act#relu.0", (6,), (8_000,)), *other.operations[2:]]
    more[3] = more[3]._replace(input_hashes=(8_000, 1))
    assert found(TWIN, StepTrace(other.before, other.after, more)) == (PATH, "relu", "act", "forward")


def test_nothing_is_told_of_what_nobody_could_watch():
    assert found(TWIN, StepTrace(note="compiled")) is None
    assert found(TWIN, TWIN) is None


def test_round_trip_and_damage():
    assert read_step_trace(TWIN.text()).text() == TWIN.text()
    whole = json.loads(TWIN.text())
    for broken in ({}, {"before": [1] * 9}, {"operations": [["a"]]}, {"after": ["x"]}, {"note": 1}):
        with pytest.raises(DamagedRecordError):
            read_step_trace(json.dumps(whole | broken if broken else None))


ROW = ReplicaRow(
    TrialId("control", None, 0), "[]", 0.5, "{}", "", "[]",
    np.ones(2), np.ones(2, np.uint64), np.ones(3, np.int64), b"",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": math.nan}, "in loss of held-out samples"),
        ({"metrics": '{"accuracy": 1}'}, "in metrics of held-out samples"),
        ({"predictions": np.zeros(3, np.int64)}, "in predictions of held-out samples"),
        ({"loss": 0.25, "predictions": np.zeros(3, np.int64)}, "in loss and predictions of held-out samples"),
        ({"losses": np.zeros(2)}, "in the loss from step 0 on"),
    ],
)
def test_twins_that_differ_are_told_by_what_differs(change, said):
    with pytest.raises(UnsilentError, match=f"control/0 and control/1 differ {said}[,;]"):
        check_control([ROW, replace(ROW, trial=TrialId("control", None, 1), **change)], "loop.py:make")


def test_a_run_as_reports_name_it_is_answered_with_the_name_of_its_trial():
    with pytest.raises(UsageError, match=r"cannot read trial 'within/0'.*TARGET/x/NUMBER, like within/x/0$"):
        TrialId.parse("within/0")
