"""A store is the same, byte for byte, with every shortcut on and with all off, whatever strikes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import unsilent_cli

CAMPAIGNS = {
    "parameters": ["digits-cnn", "--trials", "60", "--flips", "1,8"],
    "tensors, in two processes": ["digits-vit", "--trials", "4", "--per", "tensor", "--jobs", "2"],
    "operations": ["digits-cnn", "--trials", "150", "--at", "op:*"],
    "operands": ["digits-vit", "--trials", "40", "--at", "op:*/fwd/first", "--at", "op:*/fwd/second", "--jobs", "2"],
    "inputs that raise": ["dlrm", "--trials", "100", "--at", "input:*"],
    "sparse embeddings": ["dlrm", "--trials", "100", "--flips", "1,128"],
    "language": ["chargpt", "--trials", "30", "--at", "op:*", "--fault", "bitflip:bits=exponent"],
    "exceptions": ["tiny.py:raises", "--trials", "30", "--per", "tensor"],
    "bfloat16": ["digits-vit", "--trials", "20", "--dtype", "bfloat16"],
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_canonical_exports_are_identical(name: str, tiny: str, tmp_path: Path) -> None:
    found = []
    for engine in ("auto", "plain"):
        store = tmp_path / f"{engine}.sqlite"
        done = unsilent_cli("pvf", *CAMPAIGNS[name], "--engine", engine, "--store", store, "--quiet", "--plain")
        assert done.returncode == 0, done.stderr
        exported = unsilent_cli("export", store, "--canonical")
        assert exported.returncode == 0, exported.stderr
        found.append(exported.stdout)
    assert found[0] == found[1]
    assert found[0].count("\n") > 20
