"""A store is the same, byte for byte, with every shortcut on and with all off, whatever corrupts where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unsilent
from conftest import in_process
from unsilent.campaigns.export import canonical_lines
from unsilent.studies.pvf.kind import PvfStore
from unsilent.workloads import load

pytestmark = pytest.mark.slow

CAMPAIGNS: dict[str, tuple[str, dict[str, Any]]] = {
    "parameters": ("digits-cnn", {"trials": 24, "flips": (1, 8)}),
    "operations": ("digits-cnn", {"trials": 60, "at": "op:*"}),
    "operands": ("digits-vit", {"trials": 12, "at": ("op:*/fwd/first", "op:*/fwd/second")}),
    "inputs that raise": ("dlrm", {"trials": 40, "at": "input:*"}),
    "sparse embeddings": ("dlrm", {"trials": 40, "flips": (1, 128)}),
    "language": ("chargpt", {"trials": 12, "at": "op:*", "fault": "bitflip:bits=exponent"}),
    "exceptions": ("tiny.py:raises", {"trials": 12, "per": "tensor"}),
    "bfloat16": ("digits-vit", {"trials": 8, "dtype": "bfloat16"}),
}
CHOICES = ("auto", "plain")


def canonical(path: Path) -> list[str]:
    with PvfStore(path) as store:
        return list(canonical_lines(store))


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_canonical_exports_are_identical(name: str, tiny: str, tmp_path: Path) -> None:
    workload, asked = CAMPAIGNS[name]
    live = load(workload, {})
    for engine in CHOICES:
        unsilent.pvf(live, **asked, engine=engine, store=tmp_path / f"{engine}.sqlite")
    found = [canonical(tmp_path / f"{engine}.sqlite") for engine in CHOICES]
    assert found[0] == found[1]
    assert len(found[0]) > 20


@pytest.mark.claim
def test_in_worker_processes_too(tmp_path: Path) -> None:
    for engine in CHOICES:
        done = in_process(
            "pvf", "digits-vit", "--trials", 4, "--per", "tensor", "--jobs", 2, "--quiet",
            "--engine", engine, "--store", tmp_path / f"{engine}.sqlite",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    found = [canonical(tmp_path / f"{engine}.sqlite") for engine in CHOICES]
    assert found[0] == found[1]
    assert len(found[0]) > 20
