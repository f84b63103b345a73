"""Whose error it is: the user's only where their code is the innermost one, else an internal error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics import user_code
from unsilent.basics.errors import InternalError, UnsilentError, UserCodeError
from unsilent.campaigns.worker import as_picklable_error
from unsilent.outcomes import judge
from unsilent.outcomes.tensors import rows_of
from unsilent.sites import OperationInjector
from unsilent.sites.memory import TensorMemory
from unsilent.workloads import Workload
from unsilent.workloads.base import call_model
from unsilent.workloads.trainings import Training

LINES = """
import json
import torch

def own(): return {}["gone"]

def in_torch(): return torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))

def in_the_standard_library(): return json.loads("no json")

class Net(torch.nn.Module):
    def forward(self, x): return x @ torch.ones(9, 9)

def called_back(give): return give()
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(LINES)
    return user_code.file_module(tmp_path / "mine.py", "mine.py:x")


def raised(function, *given):
    with pytest.raises(UnsilentError) as caught, user_code.user_code("mine.py:x"):
        function(*given)
    return caught.value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own", "workload 'mine.py:x' raised KeyError: 'gone' (mine.py, line 5)"),
        ("in_torch", "(mine.py, line 7)"),
        (
            "in_the_standard_library",
            "raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py, line 9)",
        ),
    ],
)
def test_the_innermost_line_of_the_user_is_named(mine, name, message):
    error = raised(getattr(mine, name))
    assert type(error) is UserCodeError
    assert str(error).endswith(message)
    # called by the user's own function that ours called: the innermost one counts, not the first
    assert str(raised(mine.called_back, getattr(mine, name))).endswith(message)


def test_an_error_that_ends_in_our_code_is_ours(mine):
    """Also where the user's code lies further out: it called something of ours that failed."""
    for function in (lambda: TensorMemory("no tensor"), lambda: mine.called_back(lambda: TensorMemory("no tensor"))):
        error = raised(function)
        assert type(error) is InternalError
        assert str(error).startswith("internal error of unsilent: AttributeError: ")
        assert "(sites/memory.py, line " in str(error)
        assert "report" in str(error)
        assert "\n" not in str(error)
        assert "in __init__" in error.traceback_text
        assert isinstance(error.__cause__, AttributeError)
        assert as_picklable_error(error) is error


def test_what_torch_raises_when_we_call_it_is_ours(monkeypatch):
    monkeypatch.setattr("unsilent.outcomes.tensors.prod", nn.Linear(3, 3))  # called with a shape
    assert type(raised(rows_of, torch.ones(2, 2))) is InternalError


def test_the_model_and_the_batches_are_the_users_even_where_all_their_code_is_torchs(mine):
    loader = torch.utils.data.DataLoader([torch.ones(2), torch.ones(3)], batch_size=2)
    for function, given in (
        (call_model, (nn.Linear(3, 2), torch.ones(4, 4))),
        (call_model, (nn.Linear(3, 2), {"inputs": torch.ones(4, 3)})),
        (lambda: Workload(nn.Linear(3, 2), loader).batches(), ()),
        (Workload(nn.Linear(3, 2), [1], run=nn.Linear.forward).run, (nn.Linear(3, 2), torch.ones(4, 4))),
        (judge(nn.functional.linear), (torch.ones(2), torch.ones(3, 3), None)),
    ):
        assert type(raised(function, *given)) is UserCodeError


def test_the_parts_of_a_training_are_the_users():
    def train(**changed):
        parts = {
            "model": lambda: nn.Linear(3, 2),
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            "batches": [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))],
            "loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
            "evaluate": [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))],
        }
        made = Training(**{**parts, **changed})
        made.step(made.start(0))

    for changed in (
        {"loss": lambda m, b: m(b[0]).detach().sum()},  # nothing to go backward through
        {"batches": torch.utils.data.DataLoader([torch.ones(2), torch.ones(3)], batch_size=2)},
        {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=-1)},
    ):
        assert type(raised(lambda changed=changed: train(**changed))) is UserCodeError


def test_an_operation_that_we_only_pass_on_is_the_users(mine):
    model = mine.Net()
    with OperationInjector(model):
        error = raised(model, torch.ones(2, 3))
    assert type(error) is UserCodeError
    assert "(mine.py, line 12)" in str(error)


@pytest.mark.parametrize(
    "module",
    [
        "unsilent",
        "unsilent.faults",
        "unsilent.monitor",
        "unsilent.placement",
        "unsilent.workloads",
        "unsilent.workloads.distributed",
    ],
)
def test_a_name_that_a_module_of_ours_lacks_is_the_error_of_who_asked(tmp_path, module):
    (tmp_path / "lacking.py").write_text(f"import {module} as ours\n\ndef use(): return ours.no_such_name\n")
    error = raised(user_code.file_module(tmp_path / "lacking.py", "lacking.py:use").use)
    assert type(error) is UserCodeError
    assert str(error).endswith(
        f"AttributeError: module {module!r} has no attribute 'no_such_name' (lacking.py, line 3)"
    )


def test_the_closest_name_is_named():
    for name, meant in (("Wrkload", "Workload"), ("decide", "judge_by_decision")):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean '{meant}'\?$"):
            getattr(unsilent, name)


def test_a_name_that_our_own_code_gets_wrong_is_our_error():
    code = compile("unsilent.no_such_name", f"{Path(unsilent.__file__).parent}/wrong.py", "eval")
    assert type(raised(eval, code, {"unsilent": unsilent})) is InternalError


def test_labels_are_advised_only_where_they_can_be_dropped():
    one, batch = nn.Linear(3, 2), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    dropped = Workload(one, [(*batch, 1)], labelled=True)
    taken = Workload(one, [batch])
    training = Training(
        model=lambda: nn.Linear(3, 2),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        batches=[batch],
        loss=lambda m, b: m(*b),
        evaluate=[batch],
    )
    texts = [
        str(raised(lambda: taken.run(taken.model(), taken.batches()[0]))),
        str(raised(lambda: dropped.run(dropped.model(), dropped.batches()[0]))),
        str(raised(lambda: training.step(training.start(0)))),
    ]
    assert [("labelled=True" in text) for text in texts] == [True, False, False]


def test_held_out_batches_need_logits():
    """A model that takes the labels and returns its loss cannot be asked for scores."""

    class WithLoss(nn.Module):
        def forward(self, x, y):
            return (x.sum() - y.sum()) ** 2

    batch = (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    training = Training(
        model=WithLoss, optimizer=lambda m: torch.optim.SGD([torch.ones(1)], lr=0.1), batches=[batch],
        loss=lambda m, b: m(*b), evaluate=[batch],
    )  # fmt: skip
    text = str(raised(lambda: training.evaluate(training.start(0))))
    assert "scores (logits)" in text
    assert "let evaluate be a function" in text
    assert "labelled" not in text
