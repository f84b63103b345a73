"""Traces of training steps against a network in numpy; what must not differ does not, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from oracles import trace_oracle as oracle
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.basics.fault_trace import BEFORE_FIRST_ROW
from unsilent.engine import trace_step
from unsilent.engine.trace import trace
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.training.step import StepInjection


def draw(site, value=7.5, **more):
    return UnresolvedFault(site, fault_model(f"set:value={value}"), **more)


class Net(nn.Module):
    """What `trace_oracle.step` computes; the ReLU writes over the convolution's output."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(3 * 16, 4, bias=False)
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return self.fc(self.act(self.conv(x)).flatten(1))


X = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
ARRAYS = (X.numpy(), *(p.detach().numpy().copy() for p in Net().parameters()))


def squares(model):
    def step():
        model.zero_grad()
        model(X).square().sum().backward()

    return step


def by_label(found, micro_step=0):
    return {row.label: row for row in found.rows if row.micro_step == micro_step}


def changed(found):
    return [found.rows[i].label for i in found.changed_rows]


def nothing_left(model):
    assert not _get_current_dispatch_mode_stack()
    assert not module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_pre_hooks
    assert all(p._post_accumulate_grad_hooks is None and not p._backward_hooks for p in model.parameters())


# -- against numpy -----------------------------------------------------------------------------------------------------

CORRUPTED = {
    "op:conv#convolution.0/fwd/out": "conv#convolution.0",
    "op:act#relu.0/fwd/out": "act#relu.0",
    "op:fc#mm.0/fwd/out": "fc#mm.0",
    "op:(run)#pow.0/fwd/out": "(run)#pow.0",
}


@pytest.mark.parametrize("memory", [1 << 30, 100])
@pytest.mark.parametrize("site", CORRUPTED)
def test_every_number_is_that_of_loops_in_numpy(site, memory):
    model = Net()
    found = trace_step(model, [], squares(model), [draw(site, index="1")], memory=memory)
    place, rows = CORRUPTED[site], by_label(found)
    assert found.rows[found.faults[0].row].label == place

    def spoil(name, array):
        if name == place:
            array.reshape(array.shape[0], -1).ravel()[1] = 7.5
        return array

    golden, faulty = oracle.step(*ARRAYS), oracle.step(*ARRAYS, spoil=spoil)
    for label, expected in golden.items():
        row = rows[label]
        n, relative, absolute, from_zero, nonfinite = oracle.numbers(expected, faulty[label])
        assert (row.shape, row.dtype, row.elements) == (expected.shape, "float64", expected.size), label
        assert (row.change.changed, row.change.from_zero, row.change.nonfinite) == (n, from_zero, nonfinite), label
        for mine, theirs in ((row.change.relative, relative), (row.change.absolute, absolute)):
            assert mine == (theirs if theirs is None else pytest.approx(theirs, rel=1e-6)), label
    passed_on = {"fc.weight > accumulated", "conv.weight > accumulated", "conv.bias > accumulated"}
    known = set(golden) | passed_on | {"(run)#ones_like.0", "(run)#pow.0 > pow.0", "(run)#pow.0 > mul.0"}
    assert set(rows) == known
    kernels = ("fc#mm.0 > mm.0", *(f"conv#convolution.0 > convolution_backward.0{e}" for e in ("", "/out.1")))
    assert [rows[k].change for k in kernels] == [
        rows[f"{p} > accumulated"].change for p in ("fc.weight", "conv.weight", "conv.bias")
    ]


def test_one_channel_stays_one_channel():
    """A fault in channel 2 of the second sample: the gradients of the other channels' weights are golden in a linear loss."""
    model = Net()

    def step():
        model.zero_grad()
        model(X).sum().backward()

    found = by_label(trace_step(model, [], step, [draw("op:conv#convolution.0/fwd/out", value=9, index="1,2,1,1")]))
    assert found["conv#convolution.0"].change.changed == 1
    assert found["act#relu.0"].change.changed == 1
    assert found["fc#mm.0"].change.changed == 4  # the outputs of that sample
    assert found["fc#mm.0 > mm.0"].change.changed == 4  # each class, for that one feature
    assert found["fc#mm.0 > mm.1"].change.changed == 0


def test_a_fault_that_relu_masks_ends_there():
    model = Net()
    y = oracle.step(*ARRAYS)["conv#convolution.0"]
    place = ",".join(map(str, np.argwhere(y < 0)[0]))
    found = trace_step(model, [], squares(model), [draw("op:conv#convolution.0/fwd/out", value=-9, index=place)])
    assert changed(found) == ["conv#convolution.0"]
    assert len(found.rows) > 10
    (fault,) = found.faults
    assert (fault.row, fault.bits > 0) == (0, True)


# -- phases ------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, drop=0.0, again=None):
        super().__init__()
        torch.manual_seed(1)
        self.again = again
        self.fc1, self.norm, self.fc2, self.fc3 = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(drop)

    def middle(self, h):
        return torch.tanh(self.fc2(h))  # its output is saved, so that checkpointing runs all of it again

    def forward(self, x):
        h = self.drop(self.norm(self.fc1(x)))
        h = self.middle(h) if self.again is None else checkpoint(self.middle, h, use_reentrant=self.again)
        return self.fc3(h)


INPUT = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def trained(optimizer="sgd", steps=2, times=1, **settings):
    """A model, its optimizer and its step, some steps into a training."""
    model = Mlp(**settings)
    optimizer = OPTIMIZERS[optimizer](model.parameters())

    def step():
        optimizer.zero_grad()
        for k in range(times):
            model(INPUT + k).square().sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    return model, optimizer, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_wrong_weight_gradient_reaches_that_weight_alone(name):
    model, optimizer, step = trained(name)
    found = trace_step(model, [optimizer], step, [draw("op:fc2#addmm.0/grad_wt/out", seed=3)])
    names = {found.rows[i].name for i in found.changed_rows}
    assert changed(found)[0] == "fc2.weight > accumulated"
    assert all(n.startswith("fc2.weight") for n in names)
    assert {found.rows[i].phase for i in found.changed_rows} == {"bwd", "update"}
    assert found.rows[found.faults[0].row].name == "fc2#addmm.0"
    owners = {row.name.partition("#")[0] for row in found.rows if row.phase == "update"}
    assert owners == {n for n, _ in model.named_parameters()}


def test_a_wrong_input_gradient_reaches_what_lies_below():
    model, optimizer, step = trained()
    found = trace_step(model, [optimizer], step, [draw("op:fc2#addmm.0/grad_in/out")])
    below = ("fc1", "norm", "(root)#tanh.0", "drop")
    assert all(found.rows[i].name.startswith(below) for i in found.changed_rows)
    updated = {found.rows[i].name.partition("#")[0] for i in found.changed_rows if found.rows[i].phase == "update"}
    assert {"fc1.weight", "norm.weight", "norm.bias"} <= updated


@pytest.mark.parametrize("again", [False, True])
def test_what_is_run_again_is_told_apart(again):
    model, optimizer, step = trained(again=again)
    other, its_optimizer, its_step = trained()
    plain = trace_step(other, [its_optimizer], its_step, [])
    found = trace_step(model, [optimizer], step, [draw("op:fc2#addmm.0/fwd/out", occurrence=1)])
    place = found.rows[found.faults[0].row]
    assert (place.label, place.phase) == ("fc2#addmm.0", "recomputed")
    assert not any(found.rows[i].phase == "fwd" for i in found.changed_rows)
    golden = trace_step(model, [optimizer], step, [])
    assert not list(golden.changed_rows)
    assert {r.label for r in plain.rows if r.phase == "fwd"} == {r.label for r in golden.rows if r.phase == "fwd"}


def test_micro_steps_and_what_is_between_them():
    model, optimizer, _ = trained()
    batches = INPUT, INPUT + 1

    def step():
        optimizer.zero_grad()
        for batch in batches:
            model(batch).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    found = trace_step(model, [optimizer], step, [draw("op:fc2#addmm.0/grad_wt/out", micro_step=1)])
    first, second = by_label(found, 0), by_label(found, 1)
    assert not first["fc2.weight > accumulated"].change.changed
    assert second["fc2.weight > accumulated"].change.changed == 1
    outside = [row for row in found.rows if row.phase == "outside"]
    assert any("norm" in row.name for row in outside)
    assert all(row.name.startswith("(run)#") for row in outside)
    assert [p for p, _ in itertools.groupby(r.phase for r in found.rows)] == [
        *("fwd", "bwd", "fwd", "bwd", "outside", "update")
    ]
    fault = draw(f"op:{outside[0].name}/fwd/out", micro_step=1)
    corrupted = trace_step(model, [optimizer], step, [fault])
    assert corrupted.rows[corrupted.faults[0].row].name == outside[0].name


@pytest.mark.parametrize(
    ("site", "label"),
    [
        ("param:fc2.weight", None),
        ("optim:fc2.weight/momentum_buffer", None),
        ("saved:fc2#addmm.0/first", "bwd"),
        ("op:fc2.weight#mul.0/optim/out", "fc2.weight#mul.0"),
    ],
)
def test_faults_in_memory_and_updates_have_their_place(site, label):
    model, optimizer, step = trained()
    found = trace_step(model, [optimizer], step, [draw(site)])
    row = found.faults[0].row
    if label is None:
        assert row == BEFORE_FIRST_ROW
    else:
        assert (found.rows[row].phase if label == "bwd" else found.rows[row].label) == label
    assert changed(found)
    assert "fc2" in changed(found)[0]


# -- state -------------------------------------------------------------------------------------------------------------


def bits(model, optimizer):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*tensors, torch.random.get_rng_state())]


def same(one, two):
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_as_before_and_dropout_the_same_in_all_runs(name):
    model, optimizer, step = trained(name, drop=0.5)
    before = bits(model, optimizer)
    assert not list(trace_step(model, [optimizer], step, []).changed_rows)
    assert same(before, bits(model, optimizer))
    found = trace_step(model, [optimizer], step, [draw("op:fc3#addmm.0/fwd/out")])
    assert not any(
        row.name.startswith("drop") and row.phase == "fwd" for i in found.changed_rows for row in [found.rows[i]]
    )
    assert same(before, bits(model, optimizer))
    nothing_left(model)


def test_the_first_step_makes_state_that_is_gone_again():
    model, optimizer, step = trained("adam", steps=0)
    found = trace_step(model, [optimizer], step, [draw("op:fc3#addmm.0/fwd/out")])
    assert changed(found)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_state_is_not_rounded_to_the_dtype_of_its_parameter():
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    third = {p: torch.full(p.shape, 1 / 3) for p in model.parameters()}
    for p, value in third.items():
        optimizer.state[p]["momentum_buffer"] = value

    def step():
        for p in model.parameters():
            p.grad = None
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].mul(0.9).add(p.grad)

    trace_step(model, [optimizer], step, [])
    for p, value in third.items():
        assert optimizer.state[p]["momentum_buffer"] is value
        assert torch.equal(value, torch.full(p.shape, 1 / 3))


def test_schedulers_are_put_back():
    model, optimizer, step = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def both():
        step()
        scheduler.step()

    found = trace_step(model, [optimizer], both, [draw("op:fc3#addmm.0/fwd/out")], stateful_objects=[scheduler])
    assert changed(found)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)


def test_a_traced_run_has_the_bits_of_one_that_is_not():
    """The tracer reads: what a step leaves is the same with it, for golden and for faulty runs."""
    for faults in ([], [draw("op:fc1#addmm.0/fwd/out")]):
        model, optimizer, step = trained("adam", drop=0.3)
        twin, twins, twin_step = trained("adam", drop=0.3)
        torch.manual_seed(5)
        with StepInjection(twin, faults, [twins]):
            twin_step()
        want = bits(twin, twins)
        left = []

        def run(faulty, tracer, faults=faults, model=model, optimizer=optimizer, step=step, left=left):
            fresh, other, _ = trained("adam", drop=0.3)
            model.load_state_dict(fresh.state_dict())
            optimizer.load_state_dict(other.state_dict())
            torch.manual_seed(5)
            with StepInjection(model, faults if faulty else [], [optimizer]), tracer:
                step()
            if faulty:
                left.append(bits(model, optimizer))

        trace(model, run)
        assert left
        assert all(same(want, found) for found in left)


def test_nothing_is_kept():
    refs = []

    class Loud(Mlp):
        def middle(self, h):
            h = super().middle(h)
            refs.append(weakref.ref(h))
            return h

    model = Loud()

    def step():
        model.zero_grad()
        model(INPUT).square().sum().backward()

    trace_step(model, [], step, [draw("op:fc2#addmm.0/fwd/out")])
    nothing_left(model)
    gc.collect()
    assert refs
    assert all(ref() is None for ref in refs)


# -- passes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_little_memory_takes_more_runs_and_gives_the_same():
    model, optimizer, step = trained("adam")
    fault = draw("op:fc1#addmm.0/fwd/out")
    whole = trace_step(model, [optimizer], step, [fault])
    assert whole.runs == 3
    runs = []
    for memory in (1 << 12, 1 << 9, 1):
        found = trace_step(model, [optimizer], step, [fault], memory=memory)
        assert (found.rows, found.faults) == (whole.rows, whole.faults)
        runs.append(found.runs)
    assert 3 < runs[0] < runs[1] < runs[2]
    with pytest.raises(UsageError, match="memory is 0 bytes; expected 1 or more"):
        trace_step(model, [optimizer], step, [fault], memory=0)


@pytest.mark.parametrize("memory", [1 << 30, 1])
def test_runs_that_cannot_be_repeated_are_told(memory):
    model, optimizer, _ = trained()
    count = itertools.count()

    def counting():
        optimizer.zero_grad()
        model.fc3(model.fc2(torch.ones(2, 8)) * (1 + next(count))).sum().backward()

    with pytest.raises(
        UsageError, match=r"two golden runs differ, first at \(run\)#mul.0, so a fault cannot be distinguished"
    ):
        trace_step(model, [optimizer], counting, [], memory=memory)
    nothing_left(model)

    def growing():
        for _ in range(1 + next(count) % 5):
            model.fc2(torch.ones(2, 8))

    with pytest.raises(UsageError, match="two golden runs differ, first at"):
        trace_step(model, [optimizer], growing, [], memory=memory)


def test_a_faulty_run_that_cannot_be_repeated_is_told():
    """Only where it is repeated, for lack of memory."""
    model, _, _ = trained()
    numbers = iter(range(10))

    def run(faulty, tracer):
        value = 5.0 + next(numbers) if faulty else 1.0
        with tracer, torch.no_grad():
            model.fc3(model.fc2(torch.ones(2, 8)) * value)

    assert changed(trace(model, run))
    with pytest.raises(UsageError, match=r"two faulty runs differ, first at \(run\)#mul.0"):
        trace(model, run, memory=1)


def test_scratch_memory_is_left_out_and_said():
    """A kernel with a further output that nobody reads, and that is never the same."""
    library = torch.library.Library("unsilenttest", "DEF")
    library.define("scratchy(Tensor x) -> (Tensor, Tensor)")
    count = itertools.count()
    library.impl("scratchy", lambda x: (x * 2, torch.full((3,), float(next(count)))), "CPU")
    model, one = nn.Linear(4, 4), torch.ones(2, 4)

    def run(faulty, tracer):
        with torch.no_grad(), tracer:
            y, _ = torch.ops.unsilenttest.scratchy(model(one))
            y + (1 if faulty else 0)

    found = trace(model, run)
    assert [row.label for row in found.rows] == ["(root)#addmm.0", "(run)#unsilenttest.scratchy.0", "(run)#add.0"]
    assert changed(found) == ["(run)#add.0"]
    assert "scratchy.0/out.1" in found.notes[0]
    library._destroy()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers(kind):
    layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](4, 5, batch_first=True)
    head = nn.Linear(5, 2)
    model = nn.ModuleDict({"layer": layer, "head": head})

    def step():
        model.zero_grad()
        head(layer(torch.ones(2, 3, 4))[0]).sum().backward()

    found = trace_step(model, [], step, [draw("op:head#mm.0/fwd/first")])
    assert changed(found)[0] == "head#mm.0"
    assert not any(label.startswith("layer") for label in changed(found))


def test_runs_that_part_are_compared_up_to_there():
    class Forks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.first, self.small, self.large = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x):
            h = self.first(x)
            return (self.large(h.exp()) if h.abs().max() > 1e6 else self.small(h)).sum()

    model, one = Forks(), torch.ones(1, 3)

    def step():
        model.zero_grad()
        model(one).backward()

    found = trace_step(model, [], step, [draw("op:first#addmm.0/fwd/out", value=1e9)])
    assert found.divergence.row == len(found.rows)
    assert (found.divergence.golden, found.divergence.faulty) == ("small#addmm.0", "(root)#exp.0")
    assert [row.label for row in found.rows][:2] == ["first#addmm.0", "(root)#abs.0"]
    assert changed(found)[0] == "first#addmm.0"
    assert (
        found.divergence.text
        == "the runs diverge: the golden run continues with small#addmm.0, the faulty run with (root)#exp.0"
    )


def test_another_shape_is_told_and_the_trace_goes_on():
    model = nn.Linear(4, 4)

    def step():
        y = model(torch.ones(2, 4))
        torch.masked_select(y, y > 1e6).sum()

    found = trace_step(model, [], step, [draw("op:(root)#addmm.0/fwd/out", value=1e9)])
    assert found.divergence is not None  # nothing selected: no output at all, so one row less

    def some():
        y = model(torch.ones(2, 4))
        torch.masked_select(y, y < 1e6).sum()

    found = trace_step(model, [], some, [draw("op:(root)#addmm.0/fwd/out", value=1e9)])
    row = by_label(found)["(run)#masked_select.0"]
    assert (row.shape, row.faulty_type, row.share) == ((8,), "float32[7]", 1)
    assert found.divergence is None
    assert changed(found)[-1] == "(run)#sum.0"


def test_a_faulty_run_that_raises_is_compared_up_to_there():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))

    def step():
        model.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()

    found = trace_step(model, [], step, [draw("op:0#embedding.0/fwd/first", value=99)])
    assert found.divergence.error.startswith("IndexError: index out of range")
    assert (found.divergence.row, found.divergence.golden, found.rows) == (0, "0#embedding.0", ())
    assert found.divergence.text.startswith("the faulty run raised IndexError")
    nothing_left(model)


def test_mistakes_are_told():
    model, optimizer, step = trained()
    with pytest.raises(UsageError, match="unknown module with operations in this step 'fc9'"):
        trace_step(model, [optimizer], step, [draw("op:fc9#addmm.0/fwd/out")])
    with pytest.raises(InjectionError, match="no call 1"):
        trace_step(model, [optimizer], step, [draw("op:fc2#addmm.0/fwd/out", occurrence=1)])
    with pytest.raises(UsageError, match="did not enter its tracer"):
        trace(model, lambda faulty, tracer: step())
    with pytest.raises(ZeroDivisionError):  # a golden run that raises is no result
        trace_step(model, [optimizer], lambda: 1 / 0, [])
    nothing_left(model)


def test_a_job_of_several_ranks_is_refused(monkeypatch):
    model, _, step = trained()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match="possible only in a job with one rank"):
        trace(model, lambda faulty, tracer: step())


def test_a_gradient_that_is_added_to_another_has_its_place_before_the_sum():
    """Autograd adds up what comes to an activation by several ways, behind the kernels of the last of them."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.entry, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.entry(x)
            return h + self.side(h)

    model, one = Residual(), torch.ones(2, 4)

    def step():
        model.zero_grad()
        model(one).square().sum().backward()

    found = trace_step(model, [], step, [draw("op:side#addmm.0/grad_in/out")])
    rows = by_label(found)
    assert found.rows[found.faults[0].row].name == "side#addmm.0"
    assert not found.rows[found.faults[0].row].kernel.startswith("add.")
    assert rows["side#addmm.0 > add.0"].change.changed == 1
    assert changed(found)[0] == "side#addmm.0 > add.0"
