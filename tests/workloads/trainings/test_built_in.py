"""What is particular to the built-in trainings: options, groups, augmentation, dropout, own images."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from conftest import in_process
from unsilent.basics.errors import UsageError
from unsilent.workloads import TRAININGS, ZOO, load_training
from unsilent.workloads.clicks import synthetic_clicks
from unsilent.workloads.help_texts import encode
from unsilent.workloads.trainings import Seeds
from unsilent.workloads.trainings.clicking import RARE
from unsilent.workloads.trainings.dropout import ChosenRows, RowDropout, rows_chosen_by
from unsilent.workloads.trainings.recipes import randomly_shifted_images, schedule_factory
from unsilent.workloads.trainings.text import character_groups


def test_optimizers_and_norms():
    kinds_of = {
        name: type(load_training(name).start(0).optimizers[0]).__name__
        for name in (
            "train-resnet",
            "train-resnet-nobn",
            "train-resnet-sgd",
            "train-vit",
            "train-chargpt",
            "train-llama",
            "train-dlrm",
        )
    }
    assert list(kinds_of.values()) == ["Adam", "Adam", "SGD", "AdamW", "AdamW", "AdamW", "Adam"]
    norms = {
        name: sum(isinstance(m, nn.BatchNorm2d) for m in load_training(name).start(0).model.modules())
        for name in ("train-resnet", "train-resnet-nobn", "train-resnet-sgd")
    }
    assert norms == {"train-resnet": 5, "train-resnet-nobn": 0, "train-resnet-sgd": 5}
    assert load_training("train-resnet-sgd").start(0).optimizers[0].param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("train-resnet", {"batch": "0"}, "option 'batch' is 0; expected 1 to 1347 (training images)"),
        ("train-resnet", {"depth": "8"}, "the digits' network has no option 'depth'; set 'width' instead"),
        (
            "train-resnet",
            {"optimizer": "adm"},
            "unknown optimizer of workload 'train-resnet' 'adm'; did you mean 'adam'?",
        ),
        ("train-resnet", {"dropout": "1"}, "option 'dropout' is 1; expected a probability of at least 0 and below 1"),
        ("train-resnet", {"amp": "int8"}, "amp is 'int8'; expected none, bfloat16, float16"),
        ("train-resnet", {"steps": "0"}, "steps is 0; expected at least 1"),
        ("train-resnet", {"wdth": "4"}, "unknown option of workload 'train-resnet' 'wdth'; did you mean 'width'?"),
        ("train-vit", {"width": "30"}, "option 'width' is 30; expected a multiple of its 4 heads"),
        ("train-vit", {"depth": "0"}, "option 'depth' is 0; expected 1 to 64 (transformer blocks)"),
        ("train-chargpt", {"width": "30"}, "option 'width' is 30; expected a multiple of its 4 heads"),
        ("train-chargpt", {"dropout": "-0.1"}, "option 'dropout' is -0.1"),
        ("train-llama", {"dtype": "fp16"}, "unknown dtype of workload 'train-llama' 'fp16'; did you mean 'bf16'?"),
        ("train-dlrm", {"batch": "70000"}, "option 'batch' is 70000; expected 1 to 64000 (training rows)"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(UsageError) as caught:
        load_training(name, options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_images(own_images, tmp_path):
    workload = load_training("train-resnet-nobn", {"batch": "8", "depth": "14", "dropout": "0"}, data=own_images)
    assert workload.streams == ("init", "order", "augment", "within")
    state = workload.start(0)
    assert sum(isinstance(m, nn.Conv2d) for m in state.model.modules()) == 13
    assert len(workload.evaluate(state).labels) == 72 // 6
    with pytest.raises(UsageError, match="the CIFAR network has no option 'width'; set 'depth' instead"):
        load_training("train-resnet", {"width": "4"}, data=own_images)
    with pytest.raises(UsageError, match="option 'depth' is 9; expected 8, 14"):
        load_training("train-resnet", {"depth": "9"}, data=own_images)
    with pytest.raises(UsageError, match="'train-vit' brings its own data"):
        load_training("train-vit", data=own_images)
    np.savez(tmp_path / "few.npz", images=np.zeros((9, 32, 32, 3), np.uint8), labels=np.zeros(9, int))
    with pytest.raises(UsageError, match="has 9 images; a training needs at least 60"):
        load_training("train-resnet", data=str(tmp_path / "few.npz"))


def test_switches_can_be_left_out():
    workload = load_training("train-vit", {"shift": "no", "dropout": "0"})
    assert workload.streams == ("init", "order", "within")
    assert load_training("train-dlrm").streams == ("init", "order", "dropout", "within")


def test_shift_moves_each_image_by_at_most_one_pixel():
    images = torch.arange(1.0, 1 + 40 * 2 * 5 * 4).view(40, 2, 5, 4)
    moved = randomly_shifted_images(images, torch.Generator().manual_seed(0), -7.0)
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=-7.0)
    seen = set()
    for before, after in zip(padded, moved, strict=True):
        places = [(i, j) for i in range(3) for j in range(3) if torch.equal(before[:, i : i + 5, j : j + 4], after)]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == 9


def test_schedule_goes_up_and_down_and_stays():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = schedule_factory(100)(optimizer)
    rates = []
    for _ in range(120):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[10] == 1
    assert rates[10:101] == sorted(rates[10:101], reverse=True)
    assert rates[100:] == pytest.approx([0.01] * 20)


def test_dropout_goes_with_the_row():
    drop = RowDropout(0.5)
    x = torch.rand(6, 3, 4) + 1
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.manual_seed(0)
    plain = drop(x)
    torch.manual_seed(0)
    with rows_chosen_by(ChosenRows(order, len(order))):
        permuted = drop(x[order])
    torch.manual_seed(0)
    assert torch.equal(drop(x.transpose(1, 2).contiguous().transpose(1, 2)), plain)
    assert torch.equal(permuted, plain[order])
    assert set((plain / x).flatten().tolist()) == {0.0, 2.0}
    assert drop.eval()(x) is x
    big = RowDropout(0.2)(torch.ones(200, 500))
    assert float((big == 0).float().mean()) == pytest.approx(0.2, abs=0.01)
    assert float(big.mean()) == pytest.approx(1, abs=0.01)


def test_ranks_share_the_rows_and_each_row_keeps_its_mask():
    drop, x, numbers = RowDropout(0.5), torch.rand(6, 3) + 1, torch.tensor([1, 3, 5])
    torch.manual_seed(0)
    every = drop(x)
    torch.manual_seed(0)
    with rows_chosen_by(ChosenRows(numbers, 6)):
        assert torch.equal(drop(x[numbers]), every[numbers])


def test_the_losses_of_two_ranks_average_to_that_of_one_process():
    """With dropout and augmentation; a batch norm would make them differ."""
    losses = {}
    for shard in (None, (0, 2), (1, 2)):
        training = load_training("train-resnet-nobn", {"batch": "8", "width": "4"})
        training.shard = shard
        state = training.start(dataclasses.replace(Seeds.same_for_all(1), within=3))
        losses[shard] = training.step(state).loss
    assert (losses[0, 2] + losses[1, 2]) / 2 == pytest.approx(losses[None], rel=1e-6)
    assert losses[0, 2] != losses[1, 2]


def test_a_batch_that_ranks_cannot_share_is_an_error():
    training = load_training("train-resnet-nobn", {"batch": "9", "width": "4"})
    training.shard = 0, 2
    with pytest.raises(UsageError, match="a batch has 9 rows; expected a multiple of the 2 ranks"):
        training.step(training.start(0))


def test_kinds_of_characters():
    text = "Ab 3.\n\t"
    found = character_groups(encode(text).numpy())
    assert {name: mask.tolist().index(True) for name, mask in found.items()} == {
        "capital": 0,
        "small letter": 1,
        "space": 2,
        "digit": 3,
        "punctuation": 4,
    }
    # A tab is none of the known characters.
    assert sum(mask.astype(int) for mask in found.values()).tolist() == [1, 1, 1, 1, 1, 1, 0]


def test_listed_by_the_command_line():
    listed = {w["name"]: w for w in json.loads(in_process("workloads", "--json").stdout)}
    assert {name for name, w in listed.items() if w["kind"] == "training"} == set(TRAININGS)
    assert {name for name, w in listed.items() if w["kind"] == "inference"} == set(ZOO)
    assert listed["train-resnet"]["data"] == "optional"
    shown = in_process("workloads").stdout
    assert all(name in shown for name in TRAININGS)


def test_a_training_given_to_an_inference_verb_is_one_line(tmp_path):
    done = in_process("pvf", "train-vit", "--trials", 1, "--store", "s.sqlite", cwd=tmp_path)
    assert done.returncode == 2
    assert "workload 'train-vit' is a training; expected a workload for inference" in done.stderr
    assert "Traceback" not in done.stderr


def test_rare_categories():
    workload, data = load_training("train-dlrm"), synthetic_clicks()
    found = workload.evaluate(workload.start(0)).groups["rare category"]
    for row in (0, 1, 2, 17, 1999):
        sparse = data.sparse[data.training_row_count + row]
        counts = [int((data.sparse[: data.training_row_count, i] == sparse[i]).sum()) for i in range(len(sparse))]
        assert found[row] == (min(counts) < RARE)
