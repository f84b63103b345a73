"""What the engine says about itself: true on small models, whole in JSON, harmless in the terminal."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import unsilent
from unsilent.engine import PlainEngine
from unsilent.engine.cached import CachedEngine
from unsilent.engine.explain import explain
from unsilent.engine.partial import NOT_CHEAPER, OTHER_BITS
from unsilent.engine.reach import costs
from unsilent.explained import SCHEMA, Explanation, Holding, Reason, Shortcut, Work
from unsilent.faults import Region
from unsilent.render.explain import render_explanation
from unsilent.sites.targets import Target, make_targets


class Net(nn.Module):
    """A trunk, a side branch that joins late, a head, and a parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.side = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.trunk(x) + self.side(x))


COMPONENTS = {"trunk": ["trunk.*"], "side": ["side.*"], "head": ["head.*"], "idle": ["idle.*"]}


def workload():
    torch.manual_seed(0)
    data = [torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) for n in (4, 2)]
    return unsilent.Workload(Net(), data, components=COMPONENTS)


@pytest.fixture(scope="module")
def engine():
    return CachedEngine(workload())


def targets(engine, per="component", at="param:*"):
    return make_targets(engine.parameters.select(at), COMPONENTS, per, "per-element")


def row(said, name, level="component"):
    (found,) = [r for r in said.rows if (r.name, r.level) == (name, level)]
    return found


def test_shares_are_what_depends_on_a_parameter(engine):
    said = explain(engine, targets(engine))
    # addmm, relu, addmm, addmm (side), add, addmm (head)
    assert (said.batches, said.recorded, said.operations) == (2, 2, 12)
    assert row(said, "trunk.0", "layer").operations == pytest.approx(5 / 6)
    assert row(said, "trunk.2", "layer").operations == pytest.approx(3 / 6)
    assert row(said, "trunk").operations == pytest.approx(4 / 6)  # two layers of the same size
    assert row(said, "side").operations == pytest.approx(3 / 6)
    assert row(said, "head").operations == pytest.approx(1 / 6)
    assert (row(said, "idle").operations, row(said, "idle").seconds) == (0, 0)
    elements = {"trunk": 84, "side": 42, "head": 21, "idle": 6}
    assert {r.name: r.elements for r in said.rows if r.level == "component"} == elements
    model = row(said, "model", "model")
    assert (model.elements, model.share) == (153, 1)
    parts = [r for r in said.rows if r.level == "component"]
    assert sum(r.share for r in parts) == pytest.approx(1)
    for field in ("operations", "seconds"):
        assert getattr(model, field) == pytest.approx(sum(r.share * getattr(r, field) for r in parts))


def test_seconds_are_weighed_over_batches(engine):
    tapes = [r.tape for r in engine.replayers]
    before = [[n.seconds for n in t.nodes] for t in tapes]
    try:
        for tape, scale in zip(tapes, (1.0, 3.0), strict=True):
            for node in tape.nodes:
                node.seconds = scale if "head" in node.name else scale * 2
        tapes[1].nodes[-1].seconds = 6.0
        said = explain(engine, targets(engine))
        assert row(said, "head").seconds == pytest.approx((1 + 6) / (11 + 36))
    finally:
        for tape, seconds in zip(tapes, before, strict=True):
            for node, value in zip(tape.nodes, seconds, strict=True):
                node.seconds = value


@pytest.mark.parametrize("per", ["layer", "tensor", "bit"])
def test_levels_of_targets_do_not_change_the_answer(engine, per):
    one, two = explain(engine, targets(engine)), explain(engine, targets(engine, per))
    key = {(r.level, r.name): r for r in one.rows}
    assert len(one.rows) == len(two.rows)
    for found in two.rows:
        assert found == key[found.level, found.name]


def test_shares_agree_with_an_obvious_walk(engine):
    for target in targets(engine, "tensor"):
        said = row(explain(engine, [target]), "model", "model")
        (region,) = target.regions
        tape = engine.replayers[0].tape
        dirty, most = set(), 0
        storage = engine.parameters.sites[target.name].memory.tensor.untyped_storage().data_ptr()
        struck = tape.by_storage.get(storage)
        for node in tape.nodes:
            if struck in node.values or dirty.intersection(node.values):
                most += 1
                dirty.update(node.made)
        assert said.operations == pytest.approx(most / len(tape.nodes)), region.site


def test_operations_inputs_and_places_that_are_not_there(engine):
    def cost(site, step=0, **more):
        return row(
            explain(
                engine, [Target("t", "layer", "c", "l", (Region(site, "float32", (2, 6), step=step, **more),), 1.0)]
            ),
            "model",
            "model",
        ).operations

    name = engine.replayers[0].tape.nodes[0].name
    assert name == "trunk.0#addmm.0"
    assert cost(f"op:{name}/fwd/out") == pytest.approx(4 / 6)  # what has run is not run again
    assert cost(f"op:{name}/fwd/first", step=1) == pytest.approx(5 / 6)
    assert cost("op:head#addmm.0/fwd/out") == 0
    assert cost("op:head#addmm.7/fwd/out") == 1
    assert cost("input:0") == 1
    assert cost("kv:0/key", occurrence=1) == 1


def test_batches_without_a_tape_are_run_plainly():
    made = CachedEngine(workload())
    made.replayers[1] = None
    made.reasons = {1: "reads \x1b[31mback"}
    said = explain(made, targets(made))
    assert (said.recorded, said.reasons) == (1, (Reason(1, "reads \x1b[31mback"),))
    assert row(said, "head").operations == pytest.approx((1 + 6) / 12)
    recording = said.shortcuts[0]
    assert (recording.on, recording.why) == (True, "1 of 2 batches run plainly")


def test_an_evaluation_without_operations():
    made = CachedEngine(unsilent.Workload(Net(), [torch.ones(2, 6)], run=lambda model, batch: batch))
    said = explain(made, targets(made))
    assert (row(said, "model", "model").operations, row(said, "model", "model").seconds) == (0, 0)


def test_the_plain_engine_runs_everything():
    made = PlainEngine(workload())
    said = explain(made, targets(made))
    assert (said.engine, said.recorded, said.operations) == ("plain", 0, 0)
    assert {(r.operations, r.seconds) for r in said.rows} == {(1, 1)}
    assert not any(s.on for s in said.shortcuts)
    assert said.holding == Holding(None, 0, 0, 0)
    shown = text(said)
    assert "the plain engine re-executes everything" in shown
    assert "recording: off" in shown
    assert "at most" not in shown
    assert "tape" not in shown
    assert "golden values" not in shown


def test_a_workload_of_which_nothing_is_recorded_says_so():
    made = CachedEngine(workload())
    made.replayers, made.reasons = [None, None], {0: "no", 1: "no"}
    shown = text(explain(made, targets(made)))
    assert "nothing could be recorded, so everything is re-executed" in shown
    assert "at most" not in shown


def test_what_is_made_again_is_part_of_the_cost_and_the_memory_that_avoids_it_is_named():
    free = CachedEngine(workload())
    tight = CachedEngine(workload(), memory=2 * free.plan.minimum, sharers=2)
    said = explain(tight, targets(tight), "mine.py:net")
    assert said.workload == "mine.py:net"
    model = row(said, "model", "model")
    parts = [r for r in said.rows if r.level == "component"]
    assert 0 < said.remade == model.remade < model.seconds
    assert model.remade == pytest.approx(sum(r.share * r.remade for r in parts))
    for found in said.rows:  # what is not made again depends on the fault as ever
        other = next(r for r in explain(free, targets(free)).rows if (r.level, r.name) == (found.level, found.name))
        assert (found.operations, other.remade) == (other.operations, 0)
    assert (said.holding.sharers, said.holding.enough) == (2, 2 * said.holding.wanted)
    shown = text(said, plain=True)
    assert "held in each of 2 workers of" in shown
    assert "avoids" in shown
    enough = CachedEngine(workload(), memory=said.holding.enough, sharers=2)
    better = explain(enough, targets(enough))
    assert (better.remade, better.holding.enough) == (0, None)
    assert "again" not in text(better, plain=True).partition("\n")[2]


def test_cost_of_making_again_agrees_with_an_obvious_walk():
    tight = CachedEngine(workload(), memory=0 + CachedEngine(workload()).plan.minimum)
    for target in targets(tight, "tensor"):
        expected = total = 0.0
        for replayer in tight.replayers:
            tape, again = replayer.tape, set()
            storage = tight.parameters.sites[target.name].memory.tensor.untyped_storage().data_ptr()
            dirty = {tape.by_storage[storage]} if storage in tape.by_storage else set()

            def ask(value, tape=tape, again=again, kept=replayer.kept):
                producer = tape.values[value].producer
                if producer is not None and value not in kept and producer not in again:
                    again.add(producer)
                    for read in tape.nodes[producer].values:
                        ask(read)

            for node in tape.nodes:
                if dirty & node.values:
                    for read in node.values - dirty:
                        ask(read)
                    dirty.update(node.made)
            expected += sum(costs(tape)[n] for n in again)
            total += costs(tape).sum()
        assert row(explain(tight, [target]), "model", "model").remade == pytest.approx(expected / total)


def test_rows_come_in_the_order_of_the_table(engine):
    levels = [(r.level, r.name, r.parent) for r in explain(engine, targets(engine)).rows]
    assert levels == [
        ("component", "trunk", ""),
        ("layer", "trunk.0", "trunk"),
        ("layer", "trunk.2", "trunk"),
        ("component", "side", ""),
        ("layer", "side", "side"),
        ("component", "head", ""),
        ("layer", "head", "head"),
        ("component", "idle", ""),
        ("layer", "idle", "idle"),
        ("model", "model", ""),
    ]


def test_why_nothing_is_computed_in_blocks():
    assert CachedEngine(workload()).partial_kernels == "no operation is of a kind that can be computed in blocks"
    wide = unsilent.Workload(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), [torch.ones(4, 32)])
    made = CachedEngine(wide, memory=CachedEngine(wide).plan.minimum)
    assert not made.replayers[0].blocks
    assert made.partial_kernels == "operations: 2 with golden values not held (memory)"
    made.replayers[0].whole = Counter({OTHER_BITS: 1, NOT_CHEAPER: 2})
    said = {s.name: s for s in explain(made, []).shortcuts}["partial kernels"]
    assert (said.on, said.why) == (
        False,
        "operations: 1 with other bits in blocks, 2 not cheaper in blocks (measured; may vary)",
    )


def test_bytes_and_shortcuts_are_told(engine):
    said = explain(engine, targets(engine))
    assert said.holding.minimum < said.holding.held
    assert said.holding.wanted >= said.holding.minimum
    assert said.remade == 0
    assert [s.name for s in said.shortcuts] == ["recording", "early exit", "partial kernels", "stacking"]
    held = dict(engine.replayers[0].kept)
    try:
        engine.replayers[0].kept.clear()
        less = explain(engine, targets(engine))
        assert less.holding.held < said.holding.held
        assert 0 < less.remade < 1
    finally:
        engine.replayers[0].kept.update(held)
    assert float(costs(engine.replayers[0].tape).sum()) > 0


def test_json_is_whole(engine):
    said = explain(engine, targets(engine))
    plain = json.loads(json.dumps(said.to_json(), allow_nan=False))
    assert plain["schema"] == SCHEMA == "unsilent/explain/1"
    assert Explanation.from_json(plain) == said
    with pytest.raises(ValueError, match="unsilent/explain/1"):
        Explanation.from_json(plain | {"schema": "unsilent/pvf/1"})


# -- in the terminal ---------------------------------------------------------------------------------------------------


def text(said, plain=False, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=not plain, color_system=None)
    render_explanation(said, console, plain)
    return console.file.getvalue()


def example(rows=(), **more):
    rows = rows or (
        Work("emb", "component", "", 9000, 0.9, 0.5, 0.123),
        Work("emb.table", "layer", "emb", 9000, 0.9, 0.5, 0.123),
        Work("head", "component", "", 1000, 0.1, 0.01, 0.00001),
        Work("head", "layer", "head", 1000, 0.1, 0.01, 0.00001),
        Work("model", "model", "", 10000, 1.0, 0.451, 0.1107, 0.031),
    )
    said = Explanation(
        workload="dlrm",
        engine="auto",
        batches=5,
        recorded=2,
        operations=1234,
        golden_seconds=1.5,
        setup_seconds=3.25,
        remade=0.031,
        rows=tuple(rows),
        holding=Holding(1 << 30, 1 << 29, 100, 3 << 30, enough=3 << 30),
        shortcuts=(Shortcut("recording", True, "3 of 5 batches run plainly"), Shortcut("stacking", False, "no")),
        reasons=(Reason(0, "a"), Reason(1, "a"), Reason(4, "b")),
        notes=("mind this",),
    )
    return replace(said, **more)


def test_plain_is_stable():
    assert text(example(), plain=True, width=40).splitlines() == [
        "# dlrm: what a fault makes the engine run again",
        "# on average over elements, a fault re-executes at most 45 % of the operations and takes at most 11 % of the "
        "CPU time of a plain run (1.5 s), 3.1 of these 11 % to make golden values again that are not held",
        "# 2 of 5 batches on tape, 1,234 operations, recorded and checked in 3.25 s CPU",
        "level      target     parent  elements  faults%  operations%  cpu%",
        "component  emb        -       9000      90       50           12",
        "layer      emb.table  emb     9000      90       50           12",
        "component  head       -       1000      10       1            <0.01",
        "model      model      -       10000     100      45           11",
        "# golden values: 512 MiB held of 1 GiB allowed, 3 GiB wanted; making the rest again takes 3.1 % of a run a trial, "
        "which --memory '3 GiB' avoids",
        "# recording: on (3 of 5 batches run plainly)",
        "# stacking: off (no)",
        "# batches 0-1 plainly: a",
        "# batch 4 plainly: b",
        "# note: mind this",
    ]


def test_names_are_no_markup_and_no_control_characters():
    bad = "[red]x\x1b[31m\u202e\n| y"
    rows = [
        Work(bad, "component", "", 1, 1.0, 1.0, 1.0),
        Work(bad + "l", "layer", bad, 1, 1.0, 1.0, 1.0),
        Work("model", "model", "", 1, 1.0, 1.0, 1.0),
    ]
    said = example(rows, workload=bad, reasons=(Reason(0, bad),), notes=(bad,), shortcuts=(Shortcut(bad, True, bad),))
    for plain in (False, True):
        shown = text(said, plain)
        assert not {"\x1b", "\u202e", "\r"} & set(shown)
        assert "[red]x\\x1b[31m" in shown
    columns = {len(line.split()) for line in text(said, plain=True).splitlines() if line[0] != "#"}
    assert columns == {7}


def test_many_layers_are_cut_and_counted():
    layers = [Work(f"net.{i}", "layer", "net", 1, 0.01, 0.5, i / 100) for i in range(50)]
    said = example([Work("net", "component", "", 50, 1.0, 0.5, 0.5), *layers])
    shown = text(said)
    assert "net.49" in shown
    assert "net.5 " not in shown
    assert "… and 30 more layers" in shown
    assert len(text(said, width=50).splitlines()) < 60


def test_many_reasons_are_cut_and_counted():
    said = example(reasons=tuple(Reason(i, f"why {i % 12}") for i in range(60)))
    shown = text(said, plain=True)
    assert "# batches 0, 12, 24, 36, 48 plainly: why 0" in shown
    assert "… and 4 more reasons" in shown
