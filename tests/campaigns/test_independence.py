"""Trials depend on nothing but their identity: state that leaks, code that changes, and outputs no judge can read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from conftest import in_process
from unsilent.basics.errors import InjectionError, StoreError, UsageError
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.runner import TrialRunner


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batches():
    return [torch.randn(6, 4, generator=torch.Generator().manual_seed(1))]


class Peak(nn.Module):
    """Keeps state in a plain attribute: golden runs agree, later ones depend on the faults before."""

    def __init__(self, buffer=False):
        super().__init__()
        self.net = net()
        self.register_buffer("peak", torch.zeros(())) if buffer else setattr(self, "peak", torch.zeros(()))

    def forward(self, x):
        y = self.net(x)
        self.peak.copy_(torch.maximum(self.peak, y.abs().max() - 10))
        return y + self.peak


def test_what_a_run_leaves_in_a_buffer_is_put_back(tmp_path):
    def rows(trials):
        path = tmp_path / f"{trials}.sqlite"
        unsilent.pvf(unsilent.Workload(Peak(True), batches()), trials=trials, at="net.*", store=path)
        with PvfStore(path) as store:
            return {r.trial: r.reproducible_values() for r in store.rows()}

    many, few = rows(300), rows(20)
    assert few == {trial: many[trial] for trial in few}
    assert any(0 not in content["outcome_codes"] for content in many.values())


def test_state_that_leaks_from_trial_to_trial_is_refused_and_not_stored(tmp_path, monkeypatch):
    # Proofs are due after 1, 10 and 500 more trials and, on a slow machine, sooner: here by count alone.
    monkeypatch.setattr(TrialRunner, "_proof_due", lambda self: self.unverified_row_count >= (1, 10, 500)[self._proofs])
    workload = unsilent.Workload(Peak(), batches())
    with pytest.raises((UsageError, InjectionError), match="differ|before|not independent"):
        unsilent.pvf(workload, trials=300, at="net.*", store=tmp_path / "s.sqlite")
    with PvfStore(tmp_path / "s.sqlite") as store:
        rows = list(store.rows())
    again = unsilent.pvf(unsilent.Workload(net(), batches()), trials=1)
    assert again.trials_done == 2
    # What was stored before was proven: it must not hold the changed golden output.
    assert all(r.outcome_codes.count(0) == 6 or r.incorrect_batches >= 0 for r in rows)
    assert len(rows) <= 11


def test_a_model_that_writes_into_its_input_is_refused():
    def run(model, batch):
        batch.clamp_(-3, 3)
        y = model(batch)
        if y.abs().max() > 1e3:
            batch.zero_()
        return y

    with pytest.raises(UsageError, match="writes into its own inputs|fault-free run"):
        unsilent.pvf(unsilent.Workload(net(), [torch.randn(6, 4) * 2], run=run), trials=300)


def test_a_judge_that_writes_into_golden_is_refused():
    def judge(golden, faulty, batch):
        wrong = golden.argmax(1) != faulty.argmax(1)
        golden.zero_()
        return wrong

    with pytest.raises(UsageError, match="judge writes into"):
        unsilent.pvf(unsilent.Workload(net(), batches(), judge=judge), trials=5)


def test_a_run_that_ignores_the_model_is_noted():
    memory = {}

    def run(model, batch):
        return memory.setdefault("first", model(batch))

    result = unsilent.pvf(unsilent.Workload(net(), batches(), run=run), trials=30)
    assert any("check that run() uses the model" in note for note in result.notes)


def test_another_judge_or_run_is_another_campaign(tmp_path):
    def make(judge, run=None):
        more = {"run": run} if run else {}
        return unsilent.Workload(net(), batches(), judge=judge, **more)

    unsilent.pvf(make(lambda g, f, b: g.argmax(1) != f.argmax(1)), trials=5, store=tmp_path / "s")
    unsilent.pvf(make(lambda g, f, b: g.argmax(1) != f.argmax(1)), trials=6, store=tmp_path / "s")
    with pytest.raises(StoreError, match="code changed"):
        unsilent.pvf(make(lambda g, f, b: (g != f).any(1)), trials=5, store=tmp_path / "s")
    limit = 3
    unsilent.pvf(make(lambda g, f, b: (g - f).abs().amax(1) > limit), trials=5, store=tmp_path / "t")
    limit = 4
    with pytest.raises(StoreError, match="code changed"):
        unsilent.pvf(make(lambda g, f, b: (g - f).abs().amax(1) > limit), trials=5, store=tmp_path / "t")


@pytest.mark.claim
def test_an_edited_import_of_the_users_file_is_another_campaign(tiny):
    Path("rules.py").write_text("def judge(g, f, b):\n    return g.argmax(1) != f.argmax(1)\n")
    Path("mine.py").write_text(
        "import sys; sys.path.insert(0, '.')\nimport tiny, rules, unsilent\n"
        "def make():\n    return unsilent.Workload(tiny.Tiny().eval(), tiny.batches(), judge=rules.judge)\n"
    )
    for name in ("mine.py:make", "mine:make"):
        ask = ("pvf", name, "--trials", 3, "--quiet", "--store", f"{name[:5]}.sqlite")
        Path("rules.py").write_text("def judge(g, f, b):\n    return g.argmax(1) != f.argmax(1)\n")
        assert in_process(*ask).returncode == 0
        Path("rules.py").write_text("def judge(g, f, b):\n    return (g != f).any(1)\n")
        again = in_process(*ask)
        assert again.returncode == 2
        assert "code changed" in again.stderr


def outcomes(run=None, judge="top1", fault="set:value=1e30"):
    more = {"run": run} if run else {}
    result = unsilent.pvf(unsilent.Workload(net(), batches(), judge=judge, **more), trials=10, fault=fault)
    return result.rows[0]


def test_a_judge_that_cannot_read_a_faulty_output_is_an_outcome():
    def judge(golden, faulty, batch):
        if faulty.abs().max() > 1e6:
            raise ValueError("too large for me")
        return golden.argmax(1) != faulty.argmax(1)

    row = outcomes(judge=judge)
    assert row.due_kinds["exception"] > 0


def test_an_output_of_another_shape_is_incorrect():
    row = outcomes(lambda m, b: (lambda y: y[:, :2] if y.abs().max() > 1e6 else y)(m(b)), "tolerance")
    assert row.sdc > 0
    row = outcomes(
        lambda m, b: (lambda y: y[:3] if y.abs().max() > 1e6 else y)(m(b)),
        unsilent.judge_by_decision(lambda y: y.argmax(1)),
    )
    assert row.sdc > 0


def test_a_model_that_exits_is_an_outcome():
    def run(model, batch):
        y = model(batch)
        if y.abs().max() > 1e6:
            sys.exit(3)
        return y

    assert outcomes(run).due_kinds["exception"] > 0


def test_a_live_model_is_left_as_it_was():
    model = net().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    unsilent.pvf(unsilent.Workload(model, batches()), trials=3, dtype="bfloat16")
    assert all(v.dtype == torch.float32 and torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())


def test_shares_count_what_the_fault_model_can_corrupt():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 3)
            self.a.register_buffer("table", torch.zeros(1000, dtype=torch.int32))

        def forward(self, x):
            return self.b(x) + self.a(x)

    torch.manual_seed(0)
    result = unsilent.pvf(unsilent.Workload(Mixed(), batches()), trials=200, fault="bitflip:bits=exponent")
    rows = {(r.level, r.target): r for r in result.rows}
    expected = (5 * rows["component", "a"].estimate + 15 * rows["component", "b"].estimate) / 20
    assert rows["model", "model"].estimate == pytest.approx(expected)
    assert any("cannot corrupt param:a.table" in note for note in result.notes)
    assert unsilent.pvf(
        unsilent.Workload(Mixed(), batches()), trials=1, fault="bitflip:bits=exponent", per="tensor"
    ).rows


def test_names_with_colons_and_brackets_are_corrupted():
    model = nn.ModuleDict({"a:b": nn.Linear(4, 3), "c[0]": nn.Linear(3, 3)})
    run = lambda m, x: m["c[0]"](m["a:b"](x))  # noqa: E731
    result = unsilent.pvf(unsilent.Workload(model, batches(), run=run), trials=5)
    assert {r.target for r in result.rows if r.level == "component"} == {"a:b", "c[0]"}
    with unsilent.inject(model, "param:a:b.weight", seed=1) as receipt:
        assert receipt.verified_elements == 1


def test_memory_outside_parameters_is_noted():
    model = net()
    model[0].scale = torch.ones(3)
    result = unsilent.pvf(unsilent.Workload(model, batches()), trials=2)
    assert any("no parameter or buffer holds them: 0.scale" in note for note in result.notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"workload": net()}, r"wrap a model and inputs: unsilent.Workload\(model, batches\)"),
        ({"flips": "one"}, r"expected whole numbers separated by ',', like 2,8"),
        ({"judge": lambda g, f, b: None}, "pass a judge object or a function to the Workload instead"),
        ({"jobs": 2}, "jobs must be 1"),
        ({"at": "2"}, r"'2' is a module, not a parameter; select its parameters with '2\.\*'"),
    ],
)
def test_python_arguments_that_do_not_fit(arguments, said):
    with pytest.raises(UsageError, match=said):
        unsilent.pvf(**{"workload": unsilent.Workload(net(), batches()), "trials": 1, **arguments})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: unsilent.Workload(batches(), net()),
            "the first argument of Workload is list; expected a torch.nn.Module",
        ),
        (lambda: unsilent.Workload(net(), torch.zeros(3, 4)), r"put a single batch into a list, \[batch\]"),
        (lambda: unsilent.Workload(net(), batches(), labelled=True).batches(), "give tuples like"),
        (
            lambda: unsilent.pvf(unsilent.Workload(net(), batches(), components={"x": "layres.*"})),
            "matches no parameter",
        ),
        (
            lambda: unsilent.pvf(unsilent.Workload(net(), batches(), components={"x": "*", "y": "2.*"})),
            "all parameters that it matches belong to an earlier component",
        ),
        (lambda: unsilent.pvf(unsilent.Workload(net(), [(torch.zeros(2, 4), torch.zeros(2))])), "labelled=True"),
        (lambda: unsilent.pvf(unsilent.Workload(net(), [torch.zeros(0, 4)])), "no samples"),
        (lambda: unsilent.inject({}, "param:x"), "the first argument of inject is dict; expected a torch.nn.Module"),
    ],
)
def test_workloads_that_do_not_fit(make, said):
    with pytest.raises(UsageError, match=said):
        make()


def test_everything_of_this_type_is_accepted():
    workload = unsilent.Workload(net(), batches())
    result = unsilent.pvf(workload, trials=3, flips=4, fault=unsilent.fault_model("bitflip"))
    assert [r.flips for r in result.rows if r.level == "model"] == [4]
    assert result.command == "unsilent.pvf(workload, trials=3, flips=[4], seed=0)"
    assert result.report().headline in str(result)
