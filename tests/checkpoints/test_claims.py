"""What inspect and diff say of a checkpoint: of what was looked at, and of nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from unsilent.cli.main import run


def report(capsys, *arguments):
    """Exit code, headline and findings."""
    capsys.readouterr()
    code = run(["checkpoint", *map(str, arguments), "--plain"])
    return code, capsys.readouterr().out


def test_inspect_names_tensors_whose_values_were_not_read(tmp_path, capsys):
    scale = torch.full((4,), 0.5).to(torch.float8_e8m0fnu)
    save_file({"w": torch.ones(3), "scale": scale}, tmp_path / "some.safetensors")
    code, text = report(capsys, "inspect", tmp_path / "some.safetensors")
    assert code == 0
    assert "no value in the 1 of 2 tensors that were read is NaN" in text
    assert "1 tensor with values that were not read: `model/scale`" in text
    save_file({"scale": scale}, tmp_path / "none.safetensors")
    _, text = report(capsys, "inspect", tmp_path / "none.safetensors")
    assert "no values were read" in text
    assert "(4 B)" in text
    assert "is NaN" not in text


def test_inspect_claims_nothing_of_no_tensor(tmp_path, capsys):
    torch.save({"count": torch.arange(3)}, tmp_path / "counts.pt")
    _, text = report(capsys, "inspect", tmp_path / "counts.pt")
    assert "1 tensor with 3 elements" in text
    assert "no floating-point values" in text
    assert "no value is" not in text
    for state in ({"text": "x"}, {"w": torch.ones(0, 3)}):
        torch.save(state, tmp_path / "empty.pt")
        _, text = report(capsys, "inspect", tmp_path / "empty.pt")
        assert "no floating-point values" in text
        assert "no value is" not in text


def test_inspect_says_so_where_every_value_was_read(tmp_path, capsys):
    torch.save({"w": torch.ones(3), "count": torch.arange(3)}, tmp_path / "w.pt")
    _, text = report(capsys, "inspect", tmp_path / "w.pt")
    assert "no value is NaN, infinite or beyond" in text
    assert "not read" not in text


@pytest.mark.parametrize("other", [{"b": torch.ones(2)}, {}])
def test_diff_of_nothing_in_common_is_not_equality(other, tmp_path, capsys):
    torch.save({"a": torch.ones(2)}, tmp_path / "one.pt")
    torch.save(other, tmp_path / "other.pt")
    code, text = report(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")
    assert (code, "All 0" in text, "No tensor or number is in both checkpoints" in text) == (1, False, True)


def test_diff_names_what_it_could_not_compare(tmp_path, capsys):
    torch.save({"a": torch.ones(2), "z": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "one.pt")
    code, text = report(capsys, "diff", tmp_path / "one.pt", tmp_path / "one.pt")
    assert code == 1
    assert "1 of 2 tensors and numbers in both checkpoints are identical; 1 could not be compared" in text
    assert "could not be compared: `model/z`" in text


def test_diff_compares_objects_by_all_that_the_file_says_of_them(tmp_path, capsys):
    for name, value in (("one", np.arange(3)), ("same", np.arange(3)), ("other", np.arange(1, 4))):
        torch.save({"a": torch.ones(2), "numpy": value}, tmp_path / f"{name}.pt")
    code, text = report(capsys, "diff", tmp_path / "one.pt", tmp_path / "same.pt")
    assert (code, "All 2 tensors, numbers and objects in both checkpoints are identical" in text) == (0, True)
    assert report(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")[0] == 1


def test_diff_compares_dtypes_of_less_than_a_byte_by_their_bytes(tmp_path, capsys):
    for name, last in (("one", 1), ("other", 3)):
        header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes([5, 6, last])
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    code, text = report(capsys, "diff", tmp_path / "one.safetensors", tmp_path / "other.safetensors")
    assert (code, "1 bit" in text) == (1, True)
    assert report(capsys, "diff", tmp_path / "one.safetensors", tmp_path / "one.safetensors")[0] == 0


def test_an_integer_is_not_the_number_of_the_same_value(tmp_path, capsys):
    torch.save({"step": 1}, tmp_path / "one.pt")
    torch.save({"step": True}, tmp_path / "other.pt")
    assert report(capsys, "diff", tmp_path / "one.pt", tmp_path / "other.pt")[0] == 1
