"""A recorded step: the same bits when it is executed again, and planted faults found."""

from __future__ import annotations

import re

import pytest
import torch

from selftest.faulty_device import FAULTS, rounds
from unsilent.basics.errors import UsageError, UserCodeError
from unsilent.selftest import record_step, record_training, run_selftest
from unsilent.selftest.recording import load_recording
from unsilent.selftest.running import execute_tests
from unsilent.sites.faulty_device import PRODUCTS, FaultyDevice

CODE = """
import torch
from torch import nn

def step(model, optimizer, batch):
    images, labels = batch["images"], batch["labels"]
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

def make():
    torch.manual_seed(1)  # other weights than the recorded ones
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    return step, model, torch.optim.Adam(model.parameters(), betas=(0.8, 0.99))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "resnet.recording"
    record_training(path, "train-resnet")
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    names: dict = {}
    exec(CODE, names)
    step, model, optimizer = names["make"]()
    torch.manual_seed(0)
    batch = {"images": torch.randn(8, 16), "labels": torch.arange(8) % 4}
    step(model, optimizer, batch)
    return step, model, optimizer, batch


def test_a_recorded_training_gives_the_same_bits_again(trained):
    (count,) = execute_tests([load_recording(trained, "cpu")], rounds(3))
    assert (count.executions, count.wrong) == (3, 0)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("probability", [1.0, 0.3])
def test_a_planted_fault_is_found_by_the_recorded_step(trained, fault, probability):
    step = load_recording(trained, "cpu")
    with FaultyDevice(FAULTS[fault], probability, PRODUCTS) as device:
        (count,) = execute_tests([step], rounds(2))
    assert device.hits
    assert count.wrong
    assert count.mismatch.operation.startswith("recorded step, ")
    assert count.mismatch.got != count.mismatch.expected
    (clean,) = execute_tests([step], rounds(1))
    assert clean.wrong == 0


def test_a_step_of_ones_own_is_recorded_and_found_again_by_its_code(own):
    step, model, optimizer, batch = own
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps = optimizer.state[model[0].weight]["step"].clone()
    random = torch.get_rng_state()
    record_step("own.recording", step, model, optimizer, batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert optimizer.state[model[0].weight]["step"] == steps
    assert torch.equal(torch.get_rng_state(), random)
    result = run_selftest("cpu", 0, "own.recording", "own.py:make")
    assert (result.exit_code, result.counts[-1].operation, result.counts[-1].executions) == (0, "recorded step", 1)
    with pytest.raises(UsageError, match="a step of your own; give a function that returns step, model and optimizer"):
        load_recording("own.recording", "cpu")


def test_code_that_has_changed_is_said_to_look_the_same(own, tmp_path):
    record_step("own.recording", *own)
    (tmp_path / "changed.py").write_text(CODE.replace("return loss", "return 2 * loss"))
    result = run_selftest("cpu", 0, "own.recording", "changed.py:make")
    assert result.exit_code == 17
    assert any("a step whose code or settings have changed" in text for text in result.report().findings)
    assert "recorded step, loss" in result.report().headline


def test_swapped_elements_and_a_changed_bit_are_other_answers(own):
    step = own[0]
    record_step("own.recording", *own)

    def swapping(model, optimizer, batch):
        loss = step(model, optimizer, batch)
        weight = model[0].weight.data
        weight[[0, 1]] = weight[[1, 0]]
        return loss

    recorded = load_recording("own.recording", "cpu", "own.py:make")
    recorded.step.step = swapping
    found = recorded.execute()
    assert (found.operation, found.layout) == ("recorded step, model/0.weight", "all in rows 0 and 1")


def test_a_step_that_differs_each_time_is_refused(own):
    step, model, optimizer, batch = own
    calls = iter(range(9))

    def counting(model, optimizer, batch):
        return step(model, optimizer, batch) + next(calls)

    with pytest.raises(
        UsageError, match=r"two executions of the step from the same state differ: loss .*deterministic"
    ):
        record_step("own.recording", counting, model, optimizer, batch)


def test_a_recording_of_another_device_or_version_is_refused(trained, monkeypatch):
    monkeypatch.setattr("unsilent.selftest.recording.environment", lambda device: "another device")
    with pytest.raises(
        UsageError, match=r"resnet.recording: it was recorded on CPU .*, and bits differ on another device"
    ):
        load_recording(trained, "cpu")


def test_what_is_no_recording_is_refused_in_one_line(trained, tmp_path):
    damaged = tmp_path / "damaged"
    content = bytearray(trained.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(UsageError, match="content of the recording differs from what was written"):
        load_recording(damaged, "cpu")
    torch.save({}, tmp_path / "c.pt")
    with pytest.raises(UsageError, match="is not a recorded step"):
        load_recording(tmp_path / "c.pt", "cpu")


def test_code_that_returns_something_else_is_refused(own, tmp_path):
    record_step("own.recording", *own)
    (tmp_path / "wrong.py").write_text("def make():\n    return 3\n")
    with pytest.raises(UsageError, match=r"--code wrong.py:make returned int; expected \(step, model, optimizer\)"):
        load_recording("own.recording", "cpu", "wrong.py:make")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("nn.Linear(32, 4)", "nn.Linear(32, 5)"), "has '3.weight' as float32 [4, 32], this model has float32 [5, 32]"),
        (("optim.Adam(", "optim.AdamW("), "has optimizers Adam, this training has AdamW"),
    ],
)
def test_code_of_another_step_is_refused(own, tmp_path, change, said):
    record_step("own.recording", *own)
    (tmp_path / "other.py").write_text(CODE.replace(*change))
    with pytest.raises(UsageError, match=re.escape(said)):
        load_recording("own.recording", "cpu", "other.py:make")


def test_code_that_raises_is_named(own, tmp_path):
    record_step("own.recording", *own)
    (tmp_path / "raising.py").write_text(CODE.replace("    optimizer.zero_grad()", "    raise KeyError('x')"))
    with pytest.raises(UserCodeError, match="raising.py:make"):
        run_selftest("cpu", 0, "own.recording", "raising.py:make")


def test_a_batch_that_cannot_be_stored_is_refused(own):
    _, model, optimizer, _ = own

    def ignoring(model, optimizer, batch):
        return 0.0

    with pytest.raises(UsageError, match="has a object; expected tensors, numbers"):
        record_step("own.recording", ignoring, model, optimizer, [object()])
