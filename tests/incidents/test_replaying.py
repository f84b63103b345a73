"""The recorded step of an incident, executed again: what is found, and folders that no monitor wrote."""

from __future__ import annotations

import json

import pytest
import torch

from events.made_incidents import incident, part
from unsilent.cli.main import run
from unsilent.events.incident_folder import write_record
from unsilent.incidents.recorded_steps import replay_incident
from unsilent.incidents.replaying import IncidentReplay
from unsilent.recovery import step_replay
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.recovery.own_step import OwnStep
from unsilent.recovery.tensor_files import host_copy, write_tensors

CODE = """
import torch
from torch import nn

class Half(nn.Module):
    def forward(self, x):
        return x.half().float()

def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch["x"]).square().mean()
    loss.backward()
    optimizer.step()
    return loss

def fails(model, optimizer, batch):
    raise ValueError("no such batch")

def make(step=step, width=4):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.1), Half(), nn.Linear(width, 2))
    return step, model, torch.optim.Adam(model.parameters())

def wider():
    return make(width=5)

def failing():
    return make(fails)

def noisy(calls=[0]):
    def step_with_noise(model, optimizer, batch):
        calls[0] += 1
        step(model, optimizer, batch)
        with torch.no_grad():
            model[0].weight[0, 0] += calls[0]
    return make(step_with_noise)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An incident with two steps of rank 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_replay, "SECONDS", 0.0)  # three executions
    (tmp_path / "own.py").write_text(CODE)
    return write_incident(tmp_path, {"x": torch.randn(8, 6)})


def write_incident(above, batch):
    names: dict = {}
    exec(CODE, names)
    step, model, optimizer = names["make"]()
    step(model, optimizer, batch)
    state = OwnStep(step, model, optimizer, batch).snapshot()
    own = above / "incidents" / "90-ab" / "rank1"
    own.mkdir(parents=True, exist_ok=True)
    write_tensors(own / "state.safetensors", {"model": state["model"], "optimizers": [state["optimizer"]]})
    write_tensors(own / "batch.safetensors", [host_copy(batch), host_copy(batch)])
    write_record(own.parent, incident(step=90, suspect=1))
    return own.parent


def test_a_clean_step_comes_to_the_same_bits(folder, capsys):
    before = torch.get_rng_state()
    evidence = replay_incident(folder, "own.py:make")
    assert torch.equal(torch.get_rng_state(), before)
    assert (evidence.step, evidence.rank, evidence.problem, evidence.tolerance) == (90, 1, "", 0.0)
    assert [(one.is_equal, one.has_alarm) for one in evidence.executions] == [(None, False), *[(True, False)] * 3]
    assert run(["incident", "replay", str(folder), "--code", "own.py:make", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["evidence"]["executions"]) == 4
    headline = IncidentReplay(folder, evidence).report().headline
    assert headline == "3 executions on cpu gave the same bits as the first one, all of them finite"


def test_a_range_that_overflows_is_named(folder):
    write_tensors(folder / "rank1" / "batch.safetensors", [{"x": torch.full((8, 6), 1e6)}])
    result = IncidentReplay(folder, replay_incident(folder, "own.py:make"))
    assert result.exit_code == 1
    headline = result.report().headline
    assert headline == "2#_to_copy.0 is the first operation with finite inputs whose result is finite only in float64"
    assert "3 of 3 executions came to elements that are not finite" in result.report().findings


def test_a_step_that_differs_each_time_is_found(folder):
    result = IncidentReplay(folder, replay_incident(folder, "own.py:noisy"))
    assert result.exit_code == 1
    assert result.report().headline == "3 of 3 executions on cpu gave other bits than the first one"


def test_a_batch_that_is_not_finite_is_named(folder):
    batch = {"x": torch.ones(8, 6)}
    batch["x"][2, 3] = float("inf")
    write_tensors(folder / "rank1" / "batch.safetensors", [batch])
    report = IncidentReplay(folder, replay_incident(folder, "own.py:make")).report()
    assert report.headline == "Element [2, 3] of tensor x of the batch is inf"


def suspecting(rank):
    return lambda folder: write_record(folder, incident(step=90, suspect=rank))


def without(name):
    def spoil(folder):
        (folder / "rank1" / name).unlink()

    return spoil


def not_recorded(problems, verdict=None):
    def spoil(folder):
        without("state.safetensors")(folder)
        write_record(folder / "rank1", part(1, problems=problems))
        write_record(folder, incident(step=90, suspect=1, fault_verdict=verdict))

    return spoil


def cut(name):
    def spoil(folder):
        path = folder / "rank1" / name
        path.write_bytes(path.read_bytes()[:-40])

    return spoil


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def state_of(value):
    return lambda folder: write_tensors(folder / "rank1" / "state.safetensors", value)


HOSTILE = {
    "no incident": (lambda folder: (folder / "incident.json").unlink(), "make", "there is no incident in"),
    "no json": (write("incident.json", b"{"), "make", "is no record of an incident"),
    "deep json": (write("incident.json", b"[" * 100_000), "make", "is no record of an incident"),
    "a list": (write("incident.json", b"[]"), "make", "is no record of an incident"),
    "another rank": (suspecting(3), "make", "has no part of rank 3"),
    "no state": (without("state.safetensors"), "make", "the state of this incident was not recorded: rank.json"),
    "no batch": (without("batch.safetensors"), "make", "the batch of this incident was not recorded"),
    "a state that was too large": (
        not_recorded(("state.safetensors is not written, as it would be 9 GiB",)), "make",
        "the state of this incident was not recorded: state.safetensors is not written, as it would be 9 GiB; "),
    "a loop that cannot be executed again": (
        not_recorded((), FaultVerdict(kind="undetermined", step=90, rank=1, code="UNSILENT-U01", reason="it reads a queue")),
        "make", "the state of this incident was not recorded: it reads a queue; "),
    "truncated": (cut("state.safetensors"), "make", "does not have the tensors of an incident"),
    "truncated batch": (cut("batch.safetensors"), "make", "does not have the tensors of an incident"),
    "a pickle": (write("rank1/state.safetensors", b"\x80\x04K\x01."), "make", "does not have the tensors of an incident"),
    "a number": (state_of(3), "make", "has no state of a model and one optimizer"),
    "empty": (state_of({"model": {}, "optimizers": []}), "make", "has no state of a model and one optimizer"),
    "a tensor alone": (state_of(torch.ones(2)), "make", "has no state of a model and one optimizer"),
    "nonsense": (state_of({"model": {}, "optimizers": [3]}), "make", ""),
    "another model": (lambda folder: None, "wider", "snapshot of"),
    "a step that raises": (lambda folder: None, "failing", "no such batch"),
    "no such code": (lambda folder: None, "missing", "missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_executed_is_said_in_one_line(folder, name, capsys):
    spoil, code, message = HOSTILE[name]
    spoil(folder)
    assert run(["incident", "replay", str(folder), "--code", f"own.py:{code}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 or name == "a step that raises"  # with the lines of the user's code
    assert message in err


def test_the_part_of_another_rank_can_be_chosen(folder, capsys):
    (folder / "rank1").rename(folder / "rank7")
    assert run(["incident", "replay", str(folder), "--code", "own.py:make", "--rank", "7", "--plain"]) == 0
    suspecting(-1)(folder)
    assert replay_incident(folder, "own.py:make").rank == 7
    assert run(["incident", "replay", str(folder), "--code", "own.py:make", "--rank", "1"]) == 2
    assert "has no part of rank 1; it has those of ranks 7" in capsys.readouterr().err


def test_the_code_has_to_be_given(folder, capsys):
    assert run(["incident", "replay", str(folder)]) == 2
    assert "--code FILE.py:NAME" in capsys.readouterr().err
