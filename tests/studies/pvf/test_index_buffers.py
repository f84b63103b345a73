"""Buffers of indices and counters (int64) are memory, but no weights: they are in a campaign only where they are named."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import unsilent
from unsilent.campaigns.spec import TrialId
from unsilent.sites import Parameters
from unsilent.sites.targets import INDEX_BUFFERS
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec

COUNTER = "norm.num_batches_tracked"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class Packed(nn.Module):
    """As quantised layers hold their weights: integers of every width, in buffers and in parameters; and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("int8", torch.ones(3, 3, dtype=torch.int8))
        self.register_buffer("nibbles", torch.ones(3, 3, dtype=torch.uint8))
        self.register_buffer("qweight", torch.ones(3, 3, dtype=torch.int32))  # GPTQ and AWQ: eight weights in each
        self.long = nn.Parameter(torch.ones(3, 3, dtype=torch.int64), requires_grad=False)
        self.register_buffer("order", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x):
        every = (self.int8, self.nibbles, self.qweight, self.long)
        return x[:, self.order] @ sum(part.float() for part in every) * self.mask


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config)


def workload(model, *batch, **more):
    torch.manual_seed(0)
    run = (lambda m, b: m(b).logits) if "Bert" in type(model).__name__ else (lambda m, b: m(b))
    return unsilent.Workload(model.eval(), list(batch) or [torch.randn(4, 4)], run=run, **more)


def bert_workload():
    torch.manual_seed(0)
    return workload(bert(), torch.randint(0, 20, (2, 6)))


def runner(work, *at, **more):
    spec = PvfSpec("live", at=at or ("param:*",), **more)
    return TrialRunner(spec, work)


def sites(targets):
    return {r.site.removeprefix("param:") for t in targets for r in t.regions}


def names(runner):
    return sites(runner.targets.values())


# -- which are meant ----------------------------------------------------------------------------------------------------


def test_only_int64_buffers_are_no_weights():
    packed = Parameters(Packed())
    assert packed.index_buffers == ("order",)
    assert {r.site for r in packed.select("param:*")} == {"param:int8", "param:nibbles", "param:qweight", "param:long"}
    assert Parameters(Normed()).index_buffers == (COUNTER,)
    assert set(Parameters(bert()).index_buffers) == {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}


@pytest.mark.parametrize(
    ("at", "found"),
    [
        (("norm.*",), {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}),
        ((COUNTER,), {COUNTER}),
        (("*num_batches*",), {COUNTER}),
        (("norm.n*",), {COUNTER}),
        (("last.bias", COUNTER), {"last.bias", COUNTER}),
        (("norm.*", "*tracked"), {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", COUNTER}),
    ],
)
def test_an_address_means_them_where_it_matches_nothing_else(at, found):
    assert {r.site.removeprefix("param:") for r in Parameters(Normed()).select(*at)} == found


def test_a_model_of_nothing_else_is_still_addressed_by_a_star():
    model = nn.Module()
    model.register_buffer("ids", torch.arange(3))
    assert [r.site for r in Parameters(model).select("param:*")] == ["param:ids"]


# -- what a campaign is about -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["component", "layer", "tensor", "bit"])
@pytest.mark.parametrize("law", ["per-element", "per-tensor"])
@pytest.mark.parametrize("strata", ["none", "bits", "dtype"])
@pytest.mark.slow
def test_they_hold_no_share_unasked(per, law, strata):
    if per == "bit" and strata != "none":
        pytest.skip("bits are no strata of bits")
    made = runner(workload(Normed()), per=per, law=law, strata=strata)
    assert COUNTER not in names(made)
    assert {r.dtype for t in made.targets.values() for r in t.regions} == {"float32"}
    assert sum(t.share for t in made.targets.values()) == pytest.approx(1)
    (note,) = [n for n in made.establish_baseline().notes if COUNTER in n]
    assert "--at" in note


def test_a_campaign_on_bert_is_about_its_weights():
    result = unsilent.pvf(bert_workload(), trials=4)
    targets = {r.target for r in result.rows if r.level == "component"}
    assert INDEX_BUFFERS not in targets
    rows = [r for r in result.rows if r.level == "component"]
    (model,) = [r for r in result.rows if r.level == "model"]
    assert model.n == sum(r.n for r in rows)
    assert any("position_ids" in note for note in result.notes)


def test_they_are_a_component_of_their_own_where_they_are_named():
    made = runner(bert_workload(), "param:*", "*position_ids", "*token_type_ids")
    target = made.targets[INDEX_BUFFERS]
    assert sites([target]) == {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}
    assert target.elements == 32
    assert sum(t.share for t in made.targets.values()) == pytest.approx(1)
    assert not any("position_ids" in note for note in made.establish_baseline().notes)
    alone = runner(bert_workload(), "bert.embeddings.position_ids")
    assert [(t.name, t.share) for t in alone.targets.values()] == [(INDEX_BUFFERS, 1)]


def test_a_component_that_holds_nothing_else_keeps_its_name():
    made = runner(workload(Normed(), components={"counters": "*tracked", "rest": "*"}), "param:*", COUNTER)
    assert sites([made.targets["counters"]]) == {COUNTER}
    assert set(made.targets) == {"counters", "rest"}
    made = runner(workload(Normed(), components={"norm": "norm.*", "rest": "*"}), "param:*", COUNTER)
    assert set(made.targets) == {"norm", "rest", INDEX_BUFFERS}


def test_an_exhaustive_campaign_leaves_them_out():
    made = runner(workload(Normed()), exhaustive=True)
    floats = 4 * 4 + 4 + 4 * 4 + 4 * 3 + 3
    assert sum(made._slots(t) for t in made.targets.values()) == 32 * floats
    made = runner(workload(Normed()), COUNTER, exhaustive=True)
    assert made._slots(made.targets[INDEX_BUFFERS]) == 64


def test_operations_are_as_before():
    made = runner(workload(Normed()), "op:*")
    assert {"first", "norm", "last"} <= set(made.targets)
    assert INDEX_BUFFERS not in made.targets
    assert not any(COUNTER in note for note in made.establish_baseline().notes)


def test_a_given_fault_may_be_in_one(tmp_path):
    """A list names its sites one by one."""
    (fault,) = runner(workload(Normed()), COUNTER).draw(TrialId(INDEX_BUFFERS, 1, 0))
    (tmp_path / "list.jsonl").write_text(json.dumps(fault.to_json()) + "\n")
    made = runner(workload(Normed()), faults=str(tmp_path / "list.jsonl"), flips=(None,))
    assert set(made.targets) == {INDEX_BUFFERS}


def test_inject_goes_by_the_same_rule():
    model = Normed()
    with unsilent.inject(model, "param:norm.*", bit=0) as receipt:
        assert COUNTER not in str(receipt)
        assert int(model.norm.num_batches_tracked) == 0
    with unsilent.inject(model, f"param:{COUNTER}", bit=0):
        assert int(model.norm.num_batches_tracked) == 1
