"""Published injections replayed: a narrow network, small batches, and the log as it should be."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.engine.trace import trace
from unsilent.papers.isca23.injections import parse_injection
from unsilent.papers.isca23.replay import InjectionReplay, replay_injection
from unsilent.papers.isca23.training import untrained_network

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar10-test-a.npz"
"""Real images beside the repository; the test that uses them skips where they are absent."""
SMALL = {"width": 4, "batch": 16}

STUFFED = """model,resnet18
stage,bkwd_inject
fmodel,INPUT
target_worker,3
target_layer,basicblock_4_basic_0_downsample_grad_in
target_epoch,2
target_step,6
inj_pos,1/3/2/5
inj_values,6.5e+17
learning_rate,0.001
seed,123
"""


def given(**changed):
    rows = dict(row.split(",", 1) for row in STUFFED.splitlines())
    return parse_injection("".join(f"{k},{v}\n" for k, v in {**rows, **changed}.items()), "fault.csv")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "images.npz"
    rng = np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 256, (60, 32, 32, 3), np.uint8), labels=rng.integers(0, 10, 60))
    return path


def test_the_log_of_a_stuffed_zero(images, tmp_path):
    done = replay_injection(given(), images, steps_before=2, steps=3, log=tmp_path / "log.txt", **SMALL)
    number = r"\d+\.\d{5}"
    expected = [
        "Inject to epoch: 2",
        "Inject to step: 6",
        r"Load weights from none \(a fresh network with seed 123; the epochs before the fault are not trained\)",
        rf"Epoch: 2/80, step: 4/49, loss: {number}, accuracy: {number}",
        rf"Epoch: 2/80, step: 5/49, loss: {number}, accuracy: {number}",
        "Inject worker: 3",
        "Inject layer: basicblock_4_basic_0_downsample_grad_in",
        r"Shape for target layer is \(2, 4, 4, 32\)",
        r"Position is \(1, 3, 2, 5\), Golden data is 0\.0, inject data is 6\.5e\+17",
        *(rf"Epoch: 2/80, step: {s}/49, loss: {number}, accuracy: {number}" for s in (6, 7, 8, 9)),
    ]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert (done.elements_corrupted, done.fault.layout, len(done.records_before), len(done.records_after)) == (
        1,
        "stuffed",
        2,
        3,
    )
    assert math.isfinite(done.held_out_loss_and_accuracy[0])
    assert done.golden_step.loss == done.faulty_step.loss  # the fault is in the backward pass
    assert "with the fault: Epoch: 2/80, step: 6/49" in str(done)
    assert json.loads(json.dumps(done.to_json(), allow_nan=False))["faulty"][0]["step"] == 6


@pytest.mark.parametrize("order", ["sorted", "shuffled", "few"])
def test_held_out_images_of_a_file_sorted_by_class_are_noted(tmp_path, order):
    rng = np.random.default_rng(0)
    labels = {"sorted": np.arange(60) // 6, "shuffled": rng.permutation(60) // 6, "few": np.arange(10)}[order]
    np.savez(tmp_path / "x.npz", images=rng.integers(0, 256, (len(labels), 32, 32, 3), np.uint8), labels=labels)
    done = replay_injection(given(), tmp_path / "x.npz", steps=0, log=tmp_path / "log.txt", **SMALL)
    assert ("Note: the images of" in str(done)) is (order == "sorted")
    assert len(done.to_json()["notes"]) == (order == "sorted")


def test_a_golden_twin_from_the_same_state(images):
    replay = InjectionReplay(given(), images, **SMALL)
    list(replay.train_before_target(1))
    golden = replay.run_target_step(faulty=False)
    after = [p.detach().clone() for p in replay.model.parameters()]
    corrupted = replay.run_target_step()
    assert corrupted.loss == golden.loss  # the fault is in the backward pass
    assert corrupted.receipt.verified_elements == 1
    assert golden.receipt is None
    changed = [not torch.equal(p, q) for p, q in zip(after, replay.model.parameters(), strict=True)]
    names = [name for name, _ in replay.model.named_parameters()]
    # A wrong gradient of the input of stage 4 changes all in front of it, and nothing of stage 4 or the head.
    assert {n.split(".")[0] for n, c in zip(names, changed, strict=True) if c} == {
        *("conv1", "bias1", "bn1", "basicblock_1", "basicblock_2", "basicblock_3")
    }
    again = replay.run_target_step(faulty=False)
    assert again == golden
    assert all(torch.equal(p, q) for p, q in zip(after, replay.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        (
            {"model": "densenet", "target_layer": "densenet_transition_2_conv_p_grad_in", "inj_pos": "1/3/3/2"},
            {
                "conv",
                "bias",
                "bn",
                "conv_p",
                "bias_p",
                "dense_block_1",
                "transition_1",
                "dense_block_2",
                "transition_2",
            },
        ),
        (
            {"model": "effnet", "target_layer": "block3_mbconv_0_conv1_grad_in", "inj_pos": "1/3/3/2"},
            {"conv1", "bn1", "block1", "block2"},
        ),
    ],
)
def test_a_wrong_gradient_reaches_what_is_in_front_of_it(images, changed, reached):
    replay = InjectionReplay(given(**changed), images, width=8, batch=16)
    golden = replay.run_target_step(faulty=False)
    before = {name: p.detach().clone() for name, p in replay.model.named_parameters()}
    corrupted = replay.run_target_step()
    assert (corrupted.loss, corrupted.receipt.verified_elements) == (golden.loss, 1)
    now = replay.model.named_parameters()
    assert {name.split(".")[0] for name, p in now if not torch.equal(p, before[name])} == reached


@pytest.mark.slow
def test_the_step_can_be_traced(images):
    replay = InjectionReplay(given(), images, **SMALL)
    picture = trace(replay.model, replay.run_target_step)
    first = picture.rows[next(picture.changed_rows)]
    assert (first.name, first.phase, first.micro_step) == ("basicblock_4.basic_0.downsample#convolution.0", "bwd", 3)
    assert first.change.changed == 16  # a 1x1 kernel: one pixel, all 16 channels of the input


LANDING = [
    {"stage": "fwrd_inject", "fmodel": "RD", "target_layer": "basicblock_2_basic_0_conv2", "inj_pos": "1/5/2/7"},
    {"stage": "fwrd_inject", "fmodel": "WT", "target_layer": "basicblock_4_basic_0_conv2", "inj_pos": "1/0/20/7"},
    {"stage": "fwrd_inject", "fmodel": "N64_INPUT", "target_layer": "conv1", "inj_pos": "1/31/31/2"},
    {"fmodel": "RBFLIP", "target_layer": "conv1_grad_in", "inj_pos": "1/31/31/2"},
    {"fmodel": "WT", "target_layer": "conv1_grad_wt", "inj_pos": "1/31/1/2"},
    {
        "fmodel": "ZERO",
        "target_layer": "basicblock_1_basic_1_conv2_grad_wt",
        "inj_pos": "3/2/0/1",
        "inj_values": "0",
    },
    {
        "model": "resnet18_nobn",
        "fmodel": "WT",
        "target_layer": "basicblock_2_basic_1_conv2_grad_in",
        "inj_pos": "0/0/6/4",
    },
    {
        "model": "resnet18_sgd",
        "fmodel": "WT",
        "target_layer": "basicblock_1_basic_0_conv1_grad_in",
        "inj_pos": "2/2/3/1",
    },
    {
        "model": "densenet",
        "fmodel": "N16_RD",
        "target_layer": "densenet_dense_block_1_bottleneck_5_conv2_grad_in",
        "inj_pos": "1/6/6/3",
    },
    {
        "model": "effnet",
        "fmodel": "N16_RD",
        "target_layer": "block4_mbconv_0_se_expand_conv_grad_in",
        "inj_pos": "1/0/0/2",
    },
    {"model": "effnet", "fmodel": "WT", "target_layer": "conv1_grad_in", "inj_pos": "2/0/1/2"},
]


@pytest.mark.parametrize("changed", few(LANDING, *LANDING[::3], LANDING[8]))
def test_every_kind_lands(images, tmp_path, changed):
    one = {"inj_values": "0.75", **changed}
    done = replay_injection(given(**one), images, steps=0, log=tmp_path / "log", **SMALL)
    assert done.elements_corrupted == 1
    assert done.records_before == done.records_after == ()
    place = tuple(map(int, one["inj_pos"].split("/")))
    assert f"Position is {place}, Golden data is " in (tmp_path / "log").read_text()


def test_many_victims_are_told_in_the_order_of_the_file(images, tmp_path):
    where = [f"1/{i // 8}/1/{i % 8}" for i in range(12)]
    victims = {"fmodel": "N16_RD", "target_layer": "basicblock_2_basic_0_conv2_grad_in", "inj_pos": ",".join(where)}
    values = [f"{i}.5" for i in range(12)]
    replay_injection(given(**victims, inj_values=",".join(values)), images, steps=0, log=tmp_path / "log", **SMALL)
    told = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("Position")]
    found = [
        re.fullmatch(r"Position is \((.*)\), Golden data is .*, inject data is (.*)", line).groups() for line in told
    ]
    assert found == [(w.replace("/", ", "), v) for w, v in zip(where, values, strict=True)]


def test_a_training_that_is_no_longer_finite_stops(images, tmp_path):
    broken = given(
        model="resnet18_nobn", stage="fwrd_inject", fmodel="RD", target_layer="basicblock_4_basic_1_conv2", inj_pos="0/1/1/5",
        inj_values="3e+38",
    )  # fmt: skip
    done = replay_injection(broken, images, steps=4, log=tmp_path / "log", **SMALL)
    lines = (tmp_path / "log").read_text().splitlines()
    end = [i for i, line in enumerate(lines) if line == "Encounter NaN! Terminate training!"]
    assert end == [len(lines) - 1]
    last = (done.faulty_step, *done.records_after)[-1]
    assert not last.finite
    assert done.held_out_loss_and_accuracy is None
    assert "the training stopped" in str(done)
    json.dumps(done.to_json(), allow_nan=False)


def test_an_activation_that_overflows_batch_norm_is_no_nan_here(images):
    """What the published run reports at once stays silent with torch's kernel, but for one worker's moving variance."""
    huge = {
        "stage": "fwrd_inject",
        "fmodel": "RD",
        "target_layer": "basicblock_2_basic_0_conv2",
        "inj_values": "2.9e+24",
    }
    replay = InjectionReplay(given(**huge, inj_pos="1/5/2/7"), images, **SMALL)
    corrupted = replay.run_target_step()
    assert corrupted.finite

    def infinite():
        return [any(variance.isinf().any() for _, variance in worker) for worker in replay.training.moving]

    assert infinite() == [worker == 3 for worker in range(8)]
    assert all(record.finite for record in replay.train_after_target(2))
    assert infinite() == [worker == 3 for worker in range(8)]
    x = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    x[5] = 2.9e24
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan((x * x).mean(dtype=np.float32) - x.mean(dtype=np.float32) ** 2)


def test_epochs_end_where_published_ones_do(images, tmp_path):
    replay_injection(given(target_step="47"), images, steps=2, log=tmp_path / "log", **SMALL)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines if line.startswith("Epoch")] == [
        ["Epoch: 2/80", " step: 47/49"],
        ["Epoch: 2/80", " step: 48/49"],
        ["Epoch: 3/80", " step: 0/49"],
    ]
    assert lines[-2].startswith("End of epoch: 2/80, train loss: ")
    losses = [float(re.search(r"loss: ([\d.]+)", line)[1]) for line in lines if line.startswith("Epoch: 2")]
    assert float(re.search(r"train loss: ([\d.]+)", lines[-2])[1]) == pytest.approx(sum(losses) / 2, abs=2e-5)


def test_weights_are_the_start(images, tmp_path):
    model = untrained_network(width=4, seed=77)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    start = InjectionReplay(given(), images, tmp_path / "w.pt", **SMALL)
    assert all(torch.equal(v, start.model.state_dict()[k]) for k, v in model.state_dict().items())
    done = replay_injection(given(target_step="1"), images, tmp_path / "w.pt", steps=0, log=tmp_path / "log", **SMALL)
    assert [r.step for r in done.records_before] == [0]  # as published: the steps of the epoch before
    assert f"Load weights from {tmp_path / 'w.pt'}" in (tmp_path / "log").read_text()
    with pytest.raises(UsageError, match="expected"):
        InjectionReplay(given(), images, tmp_path / "w.pt", width=8, batch=16)


def test_what_cannot_be_replayed(images, tmp_path):
    wanted = given()
    for more, why in (
        ({"steps": -1}, "steps is -1; expected 0 or more"),
        ({"steps_before": -1}, "steps_before is -1"),
        ({"images": 3}, "3 images were requested of .*, which has 60; expected 6 to 60"),
        ({"images": 61}, "61 images were requested"),
        ({"batch": 12}, "batch is 12; expected a multiple of 8"),
        ({"batch": 8}, r"row 8, column 2: index 1/3/2/5 is outside \(1, 4, 4, 32\)"),
        ({"log": tmp_path / "no" / "log"}, "cannot write"),
    ):
        with pytest.raises(UsageError, match=why):
            replay_injection(wanted, images, **{"log": tmp_path / "log", **SMALL, **more})
    with pytest.raises(UsageError, match="row 6, column 2: expected an epoch below 80"):
        replay_injection(replace(wanted, target_epoch=80), images, log=tmp_path / "log", **SMALL)
    with pytest.raises(UsageError, match="row 7, column 2: expected an epoch below 80 and a step below 49"):
        replay_injection(replace(wanted, target_step=49), images, log=tmp_path / "log", **SMALL)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model": "densenet", "target_layer": "densenet_conv_p_grad_in", "inj_pos": "1/3/2/1"},
        {"model": "effnet", "target_layer": "block2_mbconv_0_conv1_grad_in", "inj_pos": "1/0/7/0"},
    ],
)
def test_real_images(tmp_path, changed):
    if not SHARED.exists():
        pytest.skip("the shared images are not here")
    done = replay_injection(given(**changed), SHARED, steps=1, images=200, log=tmp_path / "log", **SMALL)
    assert done.elements_corrupted == 1
    assert math.isfinite(done.records_after[0].loss)
