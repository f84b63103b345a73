"""A user's own loop as a training: five lines, every kind of batches, and one clear line where something is wrong."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import unsilent
from unsilent.basics.errors import UsageError, UserCodeError
from unsilent.workloads import load, load_training
from unsilent.workloads.trainings import Evaluation, Seeds
from unsilent.workloads.trainings.randomness import stream_seed
from unsilent.workloads.trainings.restore_check import check_restorable
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

from .conftest import data, loss, make_own


def test_five_lines():
    training = unsilent.Training(
        model=lambda: nn.Linear(6, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        batches=data(),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        evaluate=data(),
    )
    state = training.start(0)
    before = training.evaluate(state)
    records = [training.step(state) for _ in range(50)]
    after = training.evaluate(state)
    assert after.loss < before.loss / 2
    assert after.metrics["accuracy"] > 0.95
    assert [r.step for r in records] == list(range(50))
    # The mean over all samples of all batches, by hand.
    x, y = (torch.cat(part) for part in zip(*data(), strict=True))
    with torch.no_grad():
        assert after.loss == pytest.approx(float(cross_entropy(state.model(x), y)), rel=1e-5)
        assert (after.predictions == state.model(x).argmax(1).numpy()).all()
    assert {name: int(mask.sum()) for name, mask in after.groups.items()} == {
        "class 0": int((y == 0).sum()),
        "class 1": int((y == 1).sum()),
    }


class Noisy(torch.utils.data.Dataset):
    """Augments with three global generators, as users' transforms do."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.full((6,), float(i)) + torch.rand(6) + np.random.rand() + random.random()
        return x / 10, i % 3


def shuffled():
    return DataLoader(Noisy(), batch_size=8, shuffle=True)


def own_generator():
    return DataLoader(Noisy(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))


def workers():
    return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)


def replaced():
    return DataLoader(Noisy(), batch_size=8, sampler=RandomSampler(Noisy(), replacement=True, num_samples=24))


def weighted():
    return DataLoader(Noisy(), batch_size=8, sampler=WeightedRandomSampler(range(1, 25), 24))


def yielded():
    rows = torch.randperm(24).tolist()
    for i in range(3):
        items = [Noisy()[j] for j in rows[8 * i : 8 * i + 8]]
        yield torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def by_step(step):
    rows = torch.randint(24, (8,))
    return torch.rand(8, 6) + rows[:, None] / 10 + step / 100, rows % 3


KINDS = {
    "list": data(),
    "loader": shuffled(),
    "function giving a loader": shuffled,
    "loader with a generator": own_generator(),
    "loader with workers": workers,
    "with replacement": replaced(),
    "weighted": weighted(),
    "yield": yielded,
    "by step": by_step,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_batches_come_back(kind):
    """Over the ends of several epochs, and with two trainings that share one loader side by side."""
    workload = make_own(batches=KINDS[kind], evaluate=data()[:1])
    assert len(check_restorable(workload, steps=2 if kind == "loader with workers" else 5).ways_checked) == 3
    alone = workload.start(1)
    for _ in range(5):
        workload.step(alone)
    one, two = workload.start(1), workload.start(2)
    for _ in range(5):
        workload.step(one)
        workload.step(two)
    assert first_snapshot_difference(workload.snapshot(alone), workload.snapshot(one)) is None


@pytest.mark.parametrize("kind", ["loader", "loader with a generator", "with replacement", "weighted"])
def test_order_and_augmentation_of_a_loader_are_two_streams(kind):
    def rows(seeds):
        taken = []
        workload = make_own(batches=KINDS[kind], augment=None, loss=lambda m, b: (taken.append(b), loss(m, b))[1])
        state = workload.start(seeds)
        for _ in range(4):
            workload.step(state)
        return [b[1] for b in taken], [b[0] for b in taken]

    labels, images = rows(Seeds())
    other_labels, other_images = rows(Seeds(augment=1))
    assert first_snapshot_difference(labels, other_labels) is None
    assert all(not torch.equal(a, b) for a, b in zip(images, other_images, strict=True))
    assert first_snapshot_difference(labels, rows(Seeds(order=1))[0]) is not None
    assert first_snapshot_difference(images, rows(Seeds(init=1, dropout=1))[1]) is None


def test_order_of_a_list_is_new_in_each_epoch_and_complete():
    taken = []
    workload = make_own(augment=None, loss=lambda m, b: (taken.append(float(b[0][0, 0])), loss(m, b))[1])
    state = workload.start(0)
    for _ in range(15):
        workload.step(state)
    epochs = [taken[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == sorted(float(x[0, 0]) for x, _ in data()) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (state.step, state.epoch, state.cursor) == (15, 2, 5)


@given(cuts=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["fresh", "into", "back"])), max_size=4))
@settings(derandomize=True)
def test_any_cuts_give_the_same_bits(cuts):
    workload = make_own(amp="bfloat16", growth=3, clip=1.0, batches=KINDS["loader"])
    straight = workload.start(6)
    for _ in range(9):
        workload.step(straight)
    state = workload.start(6)
    for at, way in sorted(cuts):
        while state.step < at:
            workload.step(state)
        snapshot = workload.snapshot(state)
        if way == "fresh":
            state = workload.restore(snapshot)
        else:
            for _ in range(way == "back"):
                workload.step(state)
            workload.restore_into(state, snapshot)
    while state.step < 9:
        workload.step(state)
    assert first_snapshot_difference(workload.snapshot(state), workload.snapshot(straight)) is None
    assert straight.scaler.get_scale() == 65536 * 8


def test_a_step_with_infinite_gradients_is_left_out():
    """The scaler halves its scale, and neither the weights nor the schedule go on; also in the very first step."""
    workload = make_own(amp="bfloat16", augment=None, loss=lambda m, b: loss(m, b)[0] * float("inf"))
    state = workload.start(0)
    before, weights = workload.snapshot(state), [p.detach().clone() for p in state.model.parameters()]
    workload.step(state)
    assert state.scaler.get_scale() == 32768
    assert first_snapshot_difference(workload.snapshot(state)["schedulers"], before["schedulers"]) is None
    assert all(torch.equal(p, q) for p, q in zip(state.model.parameters(), weights, strict=True))


def test_threads_that_a_function_sets_are_put_back():
    threads = torch.get_num_threads()
    workload = make_own(loss=lambda m, b: (torch.set_num_threads(threads + 1), loss(m, b))[1])
    workload.step(workload.start(0))
    assert torch.get_num_threads() == threads


def test_frozen_norms_stay_frozen():
    def frozen():
        model = make_own()._model()
        model.norm.eval()
        return model

    workload = make_own(model=frozen)
    state = workload.start(0)
    workload.step(state)
    workload.evaluate(state)
    workload.step(state)
    assert not state.model.norm.training
    assert state.model.drop.training
    assert int(state.model.norm.num_batches_tracked) == 0


FILE = """
import torch
from torch import nn
import unsilent

def make(width: int = 2, steps: int = 1000, data=None):
    return unsilent.Training(
        model=lambda: nn.Linear(width, 2),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        batches=[(torch.ones(3, width), torch.tensor([0, 1, 1]))],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=[(torch.ones(3, width), torch.tensor([0, 1, 1]))],
        steps=steps, name="mine", info={"data": data},
    )

ready = make()
inference = unsilent.Workload(nn.Linear(2, 2), [torch.ones(3, 2)])
number = 7
net = nn.Linear(2, 2)

class Protocol:
    name, steps, world_size, info = "by hand", 10, 1, {}
    def __init__(self): self.inner = make()
    def start(self, seeds): return self.inner.start(seeds)
    def step(self, state): return self.inner.step(state)
    def evaluate(self, state): return self.inner.evaluate(state)
    def snapshot(self, state): return self.inner.snapshot(state)
    def restore(self, snapshot): return self.inner.restore(snapshot)
    def restore_into(self, state, snapshot): self.inner.restore_into(state, snapshot)

class Partial:
    name, steps, world_size, info = "partial", 10, 1, {}
    def start(self, seeds): pass
    def step(self, state): pass
    def evaluate(self, state): pass

partial = Partial()
def boom(): return 1 / 0
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "loops.py").write_text(FILE)
    yield tmp_path
    sys.modules.pop("_unsilent_user_loops", None)


def test_from_a_file(here):
    workload = load_training("loops.py:make", {"width": "4", "steps": "9"}, data="file")
    assert (workload.steps, workload.info["data"]) == (9, "file")
    assert workload.start(0).model.weight.shape == (2, 4)
    assert load_training("loops.py:ready").name == "mine"
    assert load_training("loops.py:Protocol").name == "by hand"


@pytest.mark.parametrize("ref", ["loops.py:make", "loops.py:Protocol"])
@pytest.mark.slow
def test_a_file_of_ones_own_comes_back_in_a_new_process(here, ref):
    assert check_restorable(load_training(ref), steps=2).why_not_new_process is None


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("digits-cnn", "workload 'digits-cnn' is for inference; expected a training: train-resnet, "),
        ("hf:folder", "workload 'hf:folder' is for inference"),
        ("model.pt2", "workload 'model.pt2' is for inference"),
        ("loops.py:inference", "workload 'loops.py:inference' is for inference; expected a training"),
        ("train-resnt", "unknown workload 'train-resnt'; did you mean 'train-resnet'?"),
        ("loops.py:number", "workload 'loops.py:number' is int; expected a training: make one with unsilent.Training("),
        ("loops.py:net", "expected a training"),
        ("loops.py:partial", "is _unsilent_user_loops.Partial without snapshot, restore, restore_into"),
        ("loops.py:none", "loops.py has no 'none'"),
    ],
)
def test_what_is_no_training_is_refused(here, ref, message):
    with pytest.raises(UsageError) as caught:
        load_training(ref)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_training_is_no_inference_workload(here):
    for ref in ("train-vit", "loops.py:ready", "loops.py:make", "loops.py:Protocol"):
        with pytest.raises(
            UsageError, match=f"workload '{ref}' is a training; expected a workload for inference: digits-cnn, "
        ):
            load(ref)
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        load_training("loops.py:boom")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": nn.Linear(1, 1)}, "model is Linear; expected a function that returns a model"),
        ({"optimizer": None}, "optimizer is NoneType; expected a function that takes the model"),
        ({"batches": torch.ones(3)}, "batches is a Tensor; expected several batches: put a single batch into a list"),
        ({"batches": []}, "found an empty list"),
        ({"batches": iter(data())}, "can be read only once"),
        ({"batches": 5}, "batches is int; expected a list of batches"),
        ({"evaluate": None}, "evaluate is NoneType; expected a list of batches (inputs, labels)"),
        ({"amp": "int8"}, "amp is 'int8'; expected none, bfloat16, float16"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"device": "toaster"}, "device is 'toaster'; expected cpu, cuda"),
    ],
)
def test_bad_parts(changed, message):
    with pytest.raises(UsageError) as caught:
        make_own(**changed)
    assert message in str(caught.value)


def summed(model, batch):
    return model(batch[0]).sum()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": lambda: 3}, "expected a torch.nn.Module, got int"),
        ({"loss": lambda m, b: m(b[0])}, "loss returned a tensor [8, 3]; expected a tensor with one element"),
        ({"batches": list}, "the batches are empty"),
        ({"evaluate": lambda m: 0.5}, "evaluate returned a float; expected an Evaluation"),
        ({"evaluate": [torch.ones(4, 6)]}, "a held-out batch is a Tensor; expected (inputs, labels)"),
        (
            {"evaluate": [(torch.ones(4, 6), torch.ones(3))], "loss": summed},
            "returns one row of scores (logits) for each label",
        ),
    ],
)
def test_what_functions_give_is_checked(changed, message):
    workload = make_own(**{"augment": None, **changed})

    def run():
        state = workload.start(0)
        workload.step(state)
        workload.evaluate(state)

    with pytest.raises(UsageError) as caught:
        run()
    assert message in str(caught.value)


def test_evaluation_of_ones_own():
    whole = np.arange(4)
    mine = Evaluation(0.5, {"BLEU": 3.0}, whole, whole, {"odd": whole % 2 == 1})
    workload = make_own(evaluate=lambda model: mine)
    assert workload.evaluate(workload.start(0)) is mine
    with pytest.raises(UsageError, match="evaluation: group 'odd' is int64"):
        Evaluation(0.5, {}, whole, whole, {"odd": whole})
    with pytest.raises(UsageError, match=r"predictions is int64 \(3,\); expected int64 \[4\]"):
        Evaluation(0.5, {}, whole[:3], whole)


@pytest.mark.parametrize("bad", [{"init": -1}, {"order": 1.5}, {"within": "x"}, {"dropout": None}, {"augment": True}])
def test_seeds_are_whole_numbers(bad):
    with pytest.raises(UsageError, match=f"seed '{next(iter(bad))}' is .*expected a whole number, 0 or more"):
        Seeds(**bad)


def test_generators_of_one_stream_and_large_seeds_are_apart():
    """Noise in a data set is not the noise in its augmentation; one stream's seed does not run into another's."""
    drawn = {}

    def augment(batch, generator):
        drawn["generator"] = torch.rand(3, generator=generator).tolist()
        drawn["global"] = torch.rand(3).tolist()
        return batch

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            drawn["data"] = torch.rand(3).tolist()
            return torch.ones(6), torch.tensor(1)

    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4)
    workload = make_own(batches=loader, augment=augment)
    state = workload.start(0)
    workload.step(state)
    assert len({tuple(values) for values in drawn.values()}) == 3
    seeds = [
        stream_seed(Seeds(init=5 + 2**32), "init"),
        stream_seed(Seeds(order=5), "order", 0),
        stream_seed(Seeds(init=5), "init"),
    ]
    assert len(set(seeds)) == 3
