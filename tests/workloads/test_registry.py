"""A text becomes a workload, or one clear line."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from conftest import few
from unsilent.basics.errors import UsageError, UserCodeError
from unsilent.workloads import Workload, load_training
from unsilent.workloads.base import labels_of
from unsilent.workloads.registry import load

GOOD = """
import torch
from unsilent.workloads import Workload

ready = Workload(torch.nn.Linear(3, 2), [torch.ones(4, 3)], name="mine")

def make(width: int = 3, scale=1.0, text="x", flag: bool = False, data=None, progress=None):
    torch.manual_seed(0)
    return Workload(torch.nn.Linear(width, 2), [torch.full((4, width), scale)],
                    info={"text": text, "flag": flag, "data": data, "told": progress is not None})

def needs(size: int, weights: str):
    return make(size)

def anything(**options):
    return Workload(torch.nn.Linear(3, 2), [torch.ones(4, 3)], info=options)

class Own:
    name, judge, components, info = "own", staticmethod(lambda g, f, b: None), {}, {}
    def model(self): return torch.nn.Linear(1, 2)
    def batches(self): return [torch.ones(1, 1)]
    def run(self, model, batch): return model(batch)

class Partial:
    name, components, info = "own", {}, {}
    def model(self): return None
    def batches(self): return []
    def run(self, model, batch): return None

class Textual(Own):
    judge = "top1"

own = Own()
partial = Partial()
number = 7
net = torch.nn.Linear(1, 1)
def gives_none(): return None
def gives_pair(): return torch.nn.Linear(1, 1), []
_hidden = 1
"""

BAD = """
from unsilent.workloads import Workload
import helper_of_mine

def boom(at: int = 0):
    try:
        return helper_of_mine.deep()
    except ZeroDivisionError as error:
        raise RuntimeError("first line\\nsecond line") from error

def wrong_judge():
    return Workload(None, [], judge="topp1")

def leaves():
    raise SystemExit(3)
    return Workload(None, [])
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "helper_of_mine.py").write_text("def deep():\n    return 1 / 0\n")
    (tmp_path / "syntax.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "raises.py").write_text("def inner():\n    return {}['gone']\n\ninner()\n")
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(GOOD)
    (package / "broken.py").write_text("import not_installed_anywhere\n")
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith(("my_package", "_unsilent_user_", "helper_of_mine"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "ref", ["good.py:ready", "./good.py:ready", "my_package.models:ready", "good.py:own", "good.py:Own"]
)
def test_objects_and_classes(here, ref):
    workload = load(ref)
    assert workload.name in ("mine", "own")
    assert len(workload.batches()) == 1


def test_absolute_path(here):
    assert load(f"{here}/good.py:ready").name == "mine"


def test_file_is_read_anew(here):
    first = load("good.py:ready")
    (here / "good.py").write_text(GOOD.replace("mine", "edit"))
    assert (first.name, load("good.py:ready").name) == ("mine", "edit")
    assert not (here / "__pycache__").exists()


def test_options_are_converted(here):
    workload = load(
        "good.py:make", {"width": "5", "scale": "0.5", "flag": "yes", "text": "7"}, data="some.csv", progress=print
    )
    assert workload.batches()[0].tolist() == [[0.5] * 5] * 4
    assert workload.info == {"text": "7", "flag": True, "data": "some.csv", "told": True}
    assert load("good.py:anything", {"a": "1"}, data="d").info == {"a": "1", "data": "d"}
    assert load("good.py:needs", {"size": "2"}, weights="w").batches()[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("ref", "values", "message"),
    [
        ("digits-cn", {}, r"unknown workload 'digits-cn'; did you mean 'digits-cnn'\? Known: .*chargpt.*dlrm"),
        ("zzz", {}, r"unknown workload 'zzz'\. Known: "),
        ("", {}, r"unknown workload ''"),
        ("digits-cnn", {"options": {"evla": "3"}}, r"unknown option of workload 'digits-cnn' 'evla'; did you mean 'eval'"),
        ("digits-cnn", {"options": {"eval": "many"}}, r"option 'eval' is 'many'; expected a value of type int"),
        ("digits-cnn", {"data": "x.csv"}, r"'digits-cnn' brings its own data; leave --data out"),
        ("dlrm", {"weights": "x.pt"}, r"'dlrm' brings its own weights; leave --weights out"),
        ("cifar-resnet20", {}, r"'cifar-resnet20' needs --weights FILE and --data FILE"),
        ("cifar-resnet20", {"weights": "w"}, r"'cifar-resnet20' needs --data FILE"),
        ("cifar-resnet20", {"options": {"depth": "3"}}, r"unknown option of workload 'cifar-resnet20' 'depth'"),
        ("gone.py:ready", {}, r"cannot read gone.py of workload 'gone.py:ready': No such file"),
        ("no/such:thing", {}, r"cannot read no/such of workload .*: No such file"),
        ("good.py:redy", {}, r"good.py has no 'redy'; its public names: Own, .*make.*ready"),
        ("good.py", {}, r"good.py needs a name after it, as in FILE.py:NAME; its public names: Own"),
        ("good.py:", {}, r"good.py needs a name after it"),
        ("my_package.models:redy", {}, r"my_package.models has no 'redy'"),
        ("my_package.nothing:x", {}, r"no module named 'my_package.nothing'"),
        ("nothing_at_all:x", {}, r"no module named 'nothing_at_all'"),
        ("my package:x", {}, r"'my package' is neither a .py file nor a module name"),
        ("good.py:number", {}, r"is int; expected a workload: wrap it as unsilent.Workload\(model, batches\)"),
        ("good.py:net", {}, r"is torch.nn.modules.linear.Linear; expected a workload: wrap it"),
        ("good.py:gives_none", {}, r"is a function that returns nothing; expected one that returns unsilent.Workload"),
        ("good.py:gives_pair", {}, r"is tuple; expected a workload"),
        ("good.py:partial", {}, r"Partial without judge; a workload has name, judge"),
        ("good.py:Textual", {}, r"judge is str; expected a callable"),
        ("good.py:make", {"options": {"wdth": "3"}}, r"unknown option of workload 'good.py:make' 'wdth'; did you mean 'width'"),
        ("good.py:make", {"options": {"width": "x"}}, r"option 'width' is 'x'; expected a value of type int"),
        ("good.py:make", {"options": {"scale": "x"}}, r"option 'scale' is 'x'; expected a value of type float"),
        ("good.py:make", {"weights": "w"}, r"takes no --weights; give its function a parameter 'weights'"),
        ("good.py:needs", {"weights": "w"}, r"'good.py:needs' needs --with size=VALUE"),
        ("good.py:needs", {"options": {"size": "2"}}, r"'good.py:needs' needs --weights FILE"),
        ("good.py:ready", {"options": {"a": "1"}}, r"is an object and cannot take 'a'"),
        ("good.py:ready", {"data": "d"}, r"is an object and cannot take 'data'"),
        ("bad.py:wrong_judge", {}, r"^unknown judge 'topp1'; did you mean 'top1'"),
    ],
)  # fmt: skip
def test_one_line(here, ref, values, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(ref, **values)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, UserCodeError)


@pytest.mark.parametrize(
    ("ref", "message", "in_trace"),
    [
        (
            "bad.py:boom",
            "workload 'bad.py:boom' raised RuntimeError: first line (bad.py, line 9)",
            "helper_of_mine.deep()",
        ),
        ("bad.py:leaves", "workload 'bad.py:leaves' raised SystemExit: 3 (bad.py, line 15)", "SystemExit(3)"),
        ("syntax.py:x", "workload 'syntax.py:x' raised SyntaxError: invalid syntax (syntax.py, line 2)", "y = = 2"),
        ("raises.py:x", "workload 'raises.py:x' raised KeyError: 'gone' (raises.py, line 2)", "return {}['gone']"),
        (
            "my_package.broken:x",
            "workload 'my_package.broken:x' raised ModuleNotFoundError: No module named 'not_installed_anywhere' "
            "(broken.py, line 1)",
            "import not_installed_anywhere",
        ),
    ],
)
def test_user_code_raises(here, ref, message, in_trace):
    with pytest.raises(UserCodeError) as caught:
        load(ref)
    assert str(caught.value) == message
    trace = caught.value.traceback_text
    assert in_trace in trace
    assert "unsilent/basics/user_code.py" not in trace
    assert "workloads/registry.py" not in trace
    assert "importlib" not in trace


def test_chained_causes_are_shown(here):
    with pytest.raises(UserCodeError) as caught:
        load("bad.py:boom")
    assert "ZeroDivisionError" in caught.value.traceback_text
    assert "direct cause" in caught.value.traceback_text


def test_keyboard_interrupt_passes(here):
    (here / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load("interrupted.py:x")


def test_annotations_for_the_type_checker_alone(here):
    (here / "typed.py").write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            from typing import TYPE_CHECKING
            import torch
            from unsilent.workloads import Workload
            if TYPE_CHECKING:
                from somewhere import Thing
            def make(n: int = 2, thing: Thing | None = None):
                return Workload(torch.nn.Linear(n, 2), [torch.ones(1, n)])
            """
        )
    )
    assert load("typed.py:make", {"n": "4"}).batches()[0].shape == (1, 4)


def test_five_lines_are_enough():
    workload = Workload(torch.nn.Linear(3, 2), [(torch.ones(4, 3), torch.zeros(4))], labelled=True)
    assert workload.run(workload.model(), workload.batches()[0]).shape == (4, 2)


def test_labels_are_those_of_the_batches():
    model, batches = torch.nn.Linear(3, 2), [torch.ones(4, 3), torch.ones(2, 3)]
    labels = [torch.zeros(4), torch.ones(2)]
    pairs = zip(batches, labels, strict=True)
    for workload in (Workload(model, batches, labels=iter(labels)), Workload(model, pairs, labelled=True)):
        assert labels_of(workload) == labels_of(workload) == labels
    assert labels_of(Workload(model, batches)) is None
    assert labels_of(object()) is None


@pytest.mark.parametrize("ref", few(["digits-cnn", "chargpt", "dlrm"], "digits-cnn"))
def test_built_in_labels_are_right_about_as_often_as_the_workload_says(ref):
    workload = load(ref)
    with torch.no_grad():
        rows = workload.judge.decision_rows(workload.run(workload.model(), workload.batches()[0])).numpy()
    right = workload.judge.is_right(rows, labels_of(workload)[0].numpy())
    assert right.mean() > {"digits-cnn": 0.95, "chargpt": 0.4, "dlrm": 0.6}[ref]


@pytest.mark.parametrize("module", ["unsilent.campaigns.worker", "unsilent.replicas.replica_process"])
@pytest.mark.parametrize(
    ("ref", "name"),
    [("~/mine.py:make", "mine.py"), ("package.mine:make", "package.mine"), ("digits-cnn", "digits-cnn")],
)
def test_user_code_in_a_worker_sees_no_arguments_of_ours(monkeypatch, module, ref, name):
    """A script that parses ``sys.argv`` when it is imported must not meet what the worker was started with."""
    import importlib
    from types import SimpleNamespace

    worker, seen = importlib.import_module(module), []

    def load_it(*_, **__):
        seen.extend(sys.argv)
        raise EOFError

    monkeypatch.setattr(sys, "argv", ["worker.py", "7", "4242"])
    start = ("start", load_it, SimpleNamespace(workload=ref), None)
    with pytest.raises(EOFError):
        worker._serve(SimpleNamespace(recv=lambda: start if "replicas" not in module else start[:3]))
    assert len(seen) == 1
    assert seen[0].endswith(name)
    assert "~" not in seen[0]


@pytest.mark.parametrize("load_it", [load, load_training])
def test_a_function_that_returns_nothing_is_not_run(tmp_path, monkeypatch, load_it):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(
        "def main(steps=3):\n    def inner(): return 1\n    open('has_run', 'w')\n    if steps: return\n    return None\n"
    )
    with pytest.raises(UsageError, match=r"returns nothing; expected .*unsilent explain script.py:main$"):
        load_it("script.py:main")
    assert not (tmp_path / "has_run").exists()


@pytest.mark.parametrize("body", ["return 3", "yield 3", "if True:\n        return [1]"])
def test_a_function_that_may_return_something_is_run(tmp_path, monkeypatch, body):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(f"def make():\n    {body}\n")
    with pytest.raises(UsageError, match="script.py:make' is (int|generator|list); expected a workload"):
        load("script.py:make")
