"""Names that no file and no terminal can show (lone surrogates, control characters) are written as escapes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from conftest import command, in_process
from unsilent.basics.errors import UsageError
from unsilent.cli import main
from unsilent.sites.modules import named_modules, named_parameters
from unsilent.sites.training.step_survey import StepSurvey

ODD = """
import torch
from torch import nn
import unsilent


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("\\ud800x", nn.Linear(6, 8))
        self.add_module("\\x1b[31mred", nn.Linear(8, 3))

    def forward(self, x):
        first, last = self.children()
        if first.weight.abs().max() > 5:
            raise ArithmeticError("\\udfff is no number")
        return last(first(x).relu())


def make():
    torch.manual_seed(1)
    odd = {"\\ud801 first": "\\ud800x.*", "last": "\\x1b?31mred.*"}
    return unsilent.Workload(Odd(), [torch.randn(7, 6)], components=odd, name="odd \\ud802")
"""


class Odd(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd.py").write_text(ODD)
    done = in_process(
        "pvf", "odd.py:make", "--trials", 10, "--fault", "bitflip:bits=30", "--store", "s.sqlite", "--plain", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert r"\ud801_first" in done.stdout
    return folder / "s.sqlite"


def test_they_are_shown_as_escapes(store):
    told = json.loads(in_process("report", store, "--json").stdout)
    assert {row["target"] for row in told["results"]} >= {r"\ud801 first", "last", "model"}
    assert r"\ud800x" in {row["target"] for row in told["results"] if row["level"] == "layer"}
    page = store.with_suffix(".html").read_bytes().decode()
    assert r"\ud801 first" in page
    assert "\x1b" not in page
    rows = [json.loads(line) for line in in_process("export", store).stdout.splitlines()]
    assert r"ArithmeticError: \udfff is no number" in {row["error"] for row in rows}
    again = in_process("replay", "s.sqlite", r"\ud801 first/x1/3", "--workload", "odd.py:make", cwd=store.parent)
    assert again.returncode == 0, again.stderr


def test_a_terminal_of_ascii_alone(store):
    done = subprocess.run(
        command("report", store), capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    )
    assert done.returncode == 0, done.stderr.decode()
    assert rb"\ud801 first" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_a_terminal_cannot_show_is_escaped(monkeypatch, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    main.escape_unencodable_output()
    print("\udcff.sqlite")
    out.flush()
    assert out.buffer.getvalue() == b"\\udcff.sqlite\n"  # type: ignore[attr-defined]


def test_a_file_whose_name_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_text(ODD)
    name = os.fsdecode(b"\xff.sqlite")
    monkeypatch.setattr(sys, "argv", ["unsilent", "pvf", "odd.py:make", "--store", name])
    done = in_process("pvf", "odd.py:make", "--trials", 2, "--store", name, "--json")
    assert done.returncode == 0, done.stderr
    assert in_process("report", name, "--json").returncode == 0


def test_faults_are_addressed_by_either_name():
    model = Odd("\ud800x")
    for address in ("param:\ud800x.weight[0,0]", r"param:\ud800x.weight[0,0]"):
        with unsilent.inject(model, address, bit=30) as receipt:
            assert receipt.applied_faults[0].fault.site == r"param:\ud800x.weight"


def test_a_step_of_a_training():
    model = Odd("\ud800x")
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        next(iter(model.children()))(torch.randn(3, 2)).sum().backward()
        optimizer.step()

    step()
    with StepSurvey(model, [optimizer]) as survey:
        step()
    sites = (
        {region.site for region in survey.regions("*")}
        if False
        else {r.site for r in survey.select_regions("optim:*", "param:*", "op:*/*/*")}
    )
    assert r"optim:\ud800x.weight/exp_avg" in sites
    assert r"op:\ud800x#addmm.0/grad_wt/out" in sites
    assert all(site.isprintable() for site in sites)
    with unsilent.inject(model, "op:\ud800x/grad_wt", "zero", optimizers=[optimizer]) as step_of:
        step()
    assert len(step_of.applied_faults) == 1


def test_two_names_that_are_written_alike():
    model = Odd("\ud800", r"\ud800")
    for listed in (named_parameters, named_modules):
        with pytest.raises(UsageError, match=r"two names .* are both written as '\\\\ud800"):
            list(listed(model))
    assert [name for name, _ in named_parameters(Odd("fine"))] == ["fine.weight", "fine.bias"]
