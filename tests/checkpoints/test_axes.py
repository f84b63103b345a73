"""An injection, repeated in a checkpoint that stores the same tensors with their axes in another order."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.corrupting import corrupt, replay
from unsilent.checkpoints.injection_file import SavedInjection, with_axes
from unsilent.cli.main import run
from unsilent.faults.record import Fault

AXES = {"conv.weight": (2, 3, 1, 0), "fc.weight": (1, 0), "square.weight": (1, 0)}
NAMES = {"model/conv": "model/convolution", "model/conv.weight": "model/convolution.kernel"}
WORDS = [f"--map={old}={new}" for old, new in NAMES.items()]
WORDS += [f"--axes=model/{name}={','.join(map(str, axes))}" for name, axes in AXES.items()]


@pytest.fixture
def state():
    draw = torch.Generator().manual_seed(3)
    shapes = {"conv.weight": (4, 3, 5, 2), "conv.bias": (4,), "fc.weight": (6, 7), "square.weight": (5, 5)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture
def files(state, tmp_path):
    """The state as ``torch.save`` writes it, and as another framework stores it."""
    torch.save(state, tmp_path / "first.pt")
    save_file({renamed(name): stored(name, tensor) for name, tensor in state.items()}, tmp_path / "other.safetensors")
    return tmp_path / "first.pt", tmp_path / "other.safetensors"


def renamed(name):
    return {"conv.weight": "convolution.kernel", "conv.bias": "convolution.bias"}.get(name, name)


def stored(name, tensor):
    return tensor.permute(AXES[name]).contiguous() if name in AXES else tensor


def assert_equivalent(first, other, state):
    """Both files hold the same bits, and not those of the state in any tensor."""
    found = load_file(other)
    for name, tensor in torch.load(first).items():
        assert torch.equal(stored(name, tensor).view(torch.int32), found[renamed(name)].view(torch.int32)), name
        assert not torch.equal(tensor.view(torch.int32), state[name].view(torch.int32)), name


@pytest.mark.parametrize("how", [(), ("--same-bits",)])
def test_the_same_elements_are_hit(files, state, tmp_path, how):
    first, other = files
    saved = tmp_path / "made.jsonl"
    assert (
        run(["checkpoint", "corrupt", str(first), "--fault", "bitflip:count=200", "--seed", "2", "--save", str(saved)])
        == 0
    )
    assert run(["checkpoint", "replay", str(other), str(saved), *WORDS, *how]) == 0
    assert_equivalent(first, other, state)


@pytest.mark.parametrize("operation", ["copy_from", "scale", "set", "or"])
def test_operands_follow_their_elements(files, state, tmp_path, operation):
    first, other = files
    rng, faults = np.random.default_rng(1), []
    for name, tensor in state.items():
        elements = np.sort(rng.choice(tensor.numel(), 3, replace=False))
        operands = {
            "copy_from": rng.choice(np.setdiff1d(np.arange(tensor.numel()), elements), 1).repeat(3),
            "scale": rng.random(3) * 10,
        }.get(operation, rng.integers(1 << 20, 1 << 31, 3).astype(np.uint32))
        faults.append(Fault(f"param:{name}", "float32", tuple(tensor.shape), elements, operation, operands))
    list_of_faults = tmp_path / "faults.jsonl"
    list_of_faults.write_text("\n".join(json.dumps(fault.to_json()) for fault in faults))
    replay(first, list_of_faults)
    replay(other, list_of_faults, names=NAMES, axes={f"model/{name}": axes for name, axes in AXES.items()})
    assert_equivalent(first, other, state)


def test_without_the_order_of_axes_it_is_refused_and_nothing_changes(files, tmp_path, capsys):
    first, other = files
    before = other.read_bytes()
    saved = tmp_path / "made.jsonl"
    saved.write_text(json.dumps(corrupt(first, ["fc.weight"]).injection))
    with pytest.raises(UsageError, match=r"\[6, 7\].* is float32\[7, 6\].*--axes"):
        replay(other, saved)
    with pytest.raises(UsageError, match=r"axes 0,2 do not fit file:model/fc.weight.*0 to 1 once"):
        replay(other, saved, axes={"model/fc.weight": (0, 2)})
    for wrong in ("model/fc.weight", "=1,0", "model/fc.weight=1;0", "model/fc.weight=" + "9" * 5000):
        assert run(["checkpoint", "replay", str(other), str(saved), "--axes", wrong]) == 2
        assert "expected OLD=AXES" in capsys.readouterr().err
    assert other.read_bytes() == before


def test_a_sequence_of_hdf5_corrupter_has_the_indices_of_the_checkpoint(files, tmp_path):
    sequence = tmp_path / "sequence.json"
    sequence.write_text(json.dumps({"/fc.weight": [[[6, 5], [4]]]}))
    with pytest.raises(UsageError, match="leave out --axes"):
        replay(files[1], sequence, axes={"model/fc.weight": (1, 0)})


def test_names_that_the_injection_does_not_have_are_noted(files, tmp_path, capsys):
    saved, (one, _) = tmp_path / "i.json", files
    assert run(["checkpoint", "corrupt", str(one), "--at", "model/fc.weight", "--save", str(saved)]) == 0
    asked = ["--map", "nothing=model", "--map", "model=model", "--axes", "fc=1,0", "--dry-run"]
    capsys.readouterr()
    assert run(["checkpoint", "replay", str(one), str(saved), *asked]) == 0
    printed = capsys.readouterr().out
    assert "Note: --map names nothing, where the injection has no fault" in printed
    assert "Note: --axes names fc, where the injection has no fault" in printed


def test_axes_twice_are_the_product_of_both():
    fault = Fault("file:model/w", "float32", (2, 3, 4), np.array([5, 17]), "xor", np.array([1, 2], np.uint32))
    saved = SavedInjection(fault, np.array([3, 4], np.uint32), np.array([2, 6], np.uint32))
    there = with_axes(saved, (2, 0, 1))
    assert there.fault.shape == (4, 2, 3)
    back = with_axes(there, (1, 2, 0))
    assert back.fault == fault
    assert back.before is not None
    assert back.before.tolist() == [3, 4]
