"""On a CUDA device: campaigns, faults that the device itself refuses, and the guard, which reads its magnitudes late there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unsilent
from conftest import unsilent_cli
from engine.test_graphed import CASES, assert_same, draws, seeded
from unsilent.engine.graphed import GraphedEngine
from unsilent.engine.plain import PlainEngine
from unsilent.guard import Guard

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*no current CUDA context:UserWarning")]


WORKLOADS = ["digits-cnn", "digits-vit", "digits-efficientnet", "chargpt", "dlrm", "scenes-unet"]


@pytest.mark.parametrize("at", ["param:*", "op:*", "input:*"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_both_engines_give_the_same_rows(tmp_path, workload, at):
    exports = []
    for engine in ("plain", "auto"):
        store = tmp_path / f"{engine}.sqlite"
        done = unsilent_cli(
            "pvf", workload, "--device", "cuda", "--at", at, "--trials", 20, "--samples", "all", "--engine", engine,
            "--store", store, "--quiet", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        exports.append(unsilent_cli("export", store, "--canonical").stdout)
    assert exports[0] == exports[1]
    assert exports[0].count("\n") > 20


@pytest.mark.parametrize("at", ["param:*", "op:*", "input:*"])
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_outcomes_of_the_plain_engine(monkeypatch, case, at):
    monkeypatch.setattr("unsilent.engine.graphed.is_cheapest", lambda *_: True)
    make, batches, name, dtype = CASES[case]
    workload = unsilent.Workload(seeded(make()), batches, judge=name)
    graphed, plain = (kind(workload, device="cuda", dtype=dtype) for kind in (GraphedEngine, PlainEngine))
    assert not graphed.graph_refusals, graphed.graph_refusals
    many = draws(plain, at, "bitflip", 40)
    ours = list(graphed.trials(many))
    for faults, outcome in zip(many, ours, strict=True):
        assert outcome.graphed == all(fault.dtype not in ("int64", "bool") for fault in faults)
        assert_same(outcome, plain.trial(faults))
    graphed.check_intact()


def test_a_run_that_waits_for_the_device_leaves_it_usable():
    """A capture that fails must not disturb what comes after it."""

    class Waiting(nn.Linear):
        def forward(self, x):
            torch.cuda.synchronize()
            return super().forward(x)

    workload = unsilent.Workload(Waiting(4, 3).eval(), [torch.ones(5, 4)], judge="top1")
    engine = GraphedEngine(workload, device="cuda")
    assert not engine.graphs
    many = draws(engine, "param:*", "bitflip", 10)
    assert not any(outcome.graphed for outcome in engine.trials(many))
    assert torch.rand(3, device="cuda").sum() > 0
    assert GraphedEngine(
        unsilent.Workload(nn.Linear(4, 3).eval(), [torch.ones(5, 4)], judge="top1"), device="cuda"
    ).graphs


def test_a_faulty_index_that_poisons_the_device_is_an_outcome(tmp_path):
    store = tmp_path / "s.sqlite"
    done = unsilent_cli(
        "pvf", "dlrm", "--device", "cuda", "--at", "input:*", "--fault", "bitflip:bits=40-62", "--trials", 20, "--store", store,
        "--quiet", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "crash" in unsilent_cli("export", store).stdout


def test_a_fault_is_undone_bit_for_bit():
    model = nn.Linear(64, 64, device="cuda")
    before = model.weight.detach().clone()
    with unsilent.inject(model, "param:weight", "bitflip"):
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


def trained(guarded: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    batches = list(torch.randn(30, 8, 16, device="cuda"))
    guard = Guard(model, optimizer, strict=True) if guarded else None
    for i, x in guard.iterate(enumerate(batches)) if guard else enumerate(batches):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if guard and i == 17 and not guard.recoveries:
            optimizer.state[model[0].weight]["exp_avg"][0, 0] = 1e9
    if guard:
        assert guard.recoveries == 1
        guard.close()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def test_a_guarded_training_ends_with_the_bits_of_a_fault_free_one():
    assert all(map(torch.equal, trained(True), trained(False)))
