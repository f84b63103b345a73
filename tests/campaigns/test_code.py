"""What a campaign is identified by: the content of weights, inputs and of the user's own code, wherever these lie."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import TINY, in_process
from unsilent.campaigns.code import code_fingerprint, imported_modules
from unsilent.studies.pvf.kind import PvfStore

WEIGHED = (
    TINY
    + """

def weighed(weights: str, data: str):
    model = Tiny().eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    return unsilent.Workload(model, [torch.load(data, weights_only=True)], name="weighed")
"""
)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules into a folder that can be imported from; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(texts):
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class Live:
    """A workload without code of its own."""


def live_in(name):
    """An object of the class ``Live`` of a module."""
    return importlib.import_module(name).Live()


def test_only_what_the_workload_imports_counts(modules):
    modules(
        {
            "users.py": "from helpers_a import one\nclass Live:\n    pass\n",
            "helpers_a.py": "def one():\n    import helpers_b\n    return helpers_b\n",
            "helpers_b.py": "x = 1\n",
            "unrelated.py": "y = 1\n",
        }
    )
    live = live_in("users")
    first = code_fingerprint("", live, None)
    importlib.import_module("unrelated")
    assert code_fingerprint("", live, None) == first
    importlib.import_module("helpers_b")
    assert set(imported_modules(["users"])) == {"users", "helpers_a", "helpers_b"}
    assert code_fingerprint("", live, None) != first  # it is imported within a function, and was not loaded before


@pytest.mark.parametrize("edited", ["model.py", "parts.py", "__init__.py"])
def test_an_edit_of_an_imported_module_counts(modules, tmp_path, edited):
    modules(
        {
            "pack/__init__.py": "",
            "pack/model.py": "from . import parts\nfrom .parts import *\nclass Live:\n    pass\n",
            "pack/parts.py": "z = 1\n",
        }
    )
    live = live_in("pack.model")
    first = code_fingerprint("", live, None)
    assert code_fingerprint("", live, None) == first
    path = tmp_path / "pack" / edited
    path.write_text(path.read_text() + "# edited\n")
    assert code_fingerprint("", live, None) != first


def test_the_name_of_the_users_file_does_not_count(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(TINY)
    shutil.copy(one, other)
    first = code_fingerprint(f"{one}:make", Live(), None)
    assert code_fingerprint(f"{other}:make", Live(), None) == first
    other.write_text(TINY + "# edited\n")
    assert code_fingerprint(f"{other}:make", Live(), None) != first


def test_the_same_content_under_other_names_is_the_same_campaign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weighed_once.py").write_text(WEIGHED)
    probe = {"__name__": "probe"}
    exec(TINY, probe)
    torch.save(probe["Tiny"]().state_dict(), "w.pt")
    torch.save(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), "x.pt")
    ask = ("pvf", "weighed_once.py:weighed", "--trials", 3, "--quiet", "--store", "s.sqlite")
    done = in_process(*ask, "--weights", "w.pt", "--data", "x.pt")
    assert done.returncode == 0, done.stderr
    Path("sub").mkdir()
    for name, copy in (("weighed_once.py", "sub/theirs.py"), ("w.pt", "sub/renamed.pt"), ("x.pt", "sub/inputs.pt")):
        shutil.copy(name, copy)
    names = ("--weights", "sub/renamed.pt", "--data", "sub/inputs.pt")
    again = in_process("replay", "s.sqlite", "first/x1/0", "--workload", "sub/theirs.py:weighed", *names)
    assert again.returncode == 0, again.stderr
    assert "ended as stored" in again.stdout
    more = in_process("pvf", "sub/theirs.py:weighed", "--trials", 4, "--quiet", "--store", "s.sqlite", *names)
    assert more.returncode == 0, more.stderr
    state = torch.load("w.pt", weights_only=True)
    state["last.bias"] += 1
    torch.save(state, "w.pt")
    other = in_process(*ask, "--weights", "w.pt", "--data", "x.pt")
    assert other.returncode == 2
    assert "holds another campaign (" in other.stderr
    assert "weights" in other.stderr


def test_the_name_of_the_function_still_counts(stored):
    with PvfStore(stored) as store:
        spec = store.spec
    assert replace(spec, workload="a/b.py:make").identity()["workload"] == "b.py:make"
    done = in_process("replay", stored, "first/x1/0", "--workload", spec.workload.replace(":make", ":raises"))
    assert done.returncode == 2
    assert "differs from this replay in workload" in done.stderr
