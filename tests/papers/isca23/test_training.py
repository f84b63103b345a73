"""The published network and its step of eight workers, against the same done by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unsilent.basics.errors import UsageError
from unsilent.faults import Fault
from unsilent.papers.isca23.layer_lists import convolutions
from unsilent.papers.isca23.networks import SameConv2d
from unsilent.papers.isca23.training import PublishedTraining, split_and_normalise, untrained_network

WIDTH, BATCH = 4, 32


def pictures(count=60):
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (count, 32, 32, 3), np.uint8))
    return split_and_normalise(images, torch.from_numpy(rng.integers(0, 10, count)), count - 12)


def training(name="resnet18", **more):
    return PublishedTraining(name, pictures()[0], rate=1e-3, width=WIDTH, batch=BATCH, **more)


def bits(training):
    return [p.detach().clone() for p in training.model.parameters()], copy.deepcopy(training.moving)


def flat(kept):
    parameters, moving = kept
    return [*parameters, *(x for worker in moving for pair in worker for x in pair)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


@pytest.mark.parametrize(
    ("name", "norms", "dropout"),
    [
        ("resnet18", 20, {0.15}),
        ("resnet18_nobn", 0, {0.15}),
        ("resnet18_sgd", 20, {0.0}),
        ("densenet", 1 + 2 * 58 + 3, {0.5}),
        ("effnet", 2 + 3 * 16, set()),
    ],
)
def test_the_convolutions_are_where_and_what_the_geometry_says(name, norms, dropout):
    model, seen = untrained_network(name, width=WIDTH), {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            module.register_forward_hook(
                lambda m, a, y, path=path: seen.update({path: (a[0].shape, m.weight.shape, y.shape)})
            )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    there = convolutions(2, WIDTH, name)
    prefix = "densenet_" if name == "densenet" else ""
    assert {c.module for c in there.values()} == set(seen)
    for layer, c in there.items():
        assert layer == prefix + c.module.replace(".", "_")
        x, w, y = map(tuple, seen[c.module])
        assert x == (2, c.channels, c.size, c.size)
        assert w == (c.kernels, c.channels, c.kernel, c.kernel)
        assert y == (2, c.kernels, c.out, c.out)
        assert c.operand_padding[0] + c.own_padding == c.padding[0]
    seen_norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(seen_norms) == norms
    assert all((m.eps, m.momentum) == (1e-3, 0.1) for m in seen_norms)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == dropout


def test_the_full_width_has_the_parameters_of_a_resnet18():
    model = untrained_network()
    kernels = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    by_hand = 3 * 64 * 49 + 4 * 64 * 64 * 9
    for c in (64, 128, 256):
        by_hand += c * 2 * c + c * 2 * c * 9 + 3 * (2 * c) ** 2 * 9
    assert kernels == by_hand
    channels = 64 * 5 + 128 * 5 + 256 * 5 + 512 * 5
    assert sum(p.numel() for p in model.parameters()) == by_hand + 3 * channels + 512 * 10 + 10
    weight = model.get_submodule("basicblock_3.basic_1.conv2").weight
    assert abs(weight.std().item() / math.sqrt(2 / (9 * 512)) - 1) < 0.01
    assert weight.abs().max().item() < 2 * math.sqrt(2 / (9 * 512)) / 0.8796


@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 2, 8), (7, 2, 32), (1, 2, 8), (3, 1, 5), (3, 2, 7)])
def test_same_padding_puts_the_odd_zero_last(kernel, stride, size):
    conv = SameConv2d(1, 1, kernel, stride)
    x = torch.randn(1, 1, size, size)
    outputs = math.ceil(size / stride)
    total = max((outputs - 1) * stride + kernel - size, 0)
    padded = F.pad(x, (total // 2, total - total // 2) * 2)
    torch.testing.assert_close(conv(x), F.conv2d(padded, conv.weight, stride=stride), rtol=1e-5, atol=1e-6)
    assert conv(x).shape[-1] == outputs


def test_a_step_is_eight_passes_whose_gradients_add_up():
    done = training("resnet18_sgd")
    by_hand = copy.deepcopy(done.model)
    images, labels = done._batch(2, 3)
    total, stats = 0.0, []
    for worker in range(8):
        part = slice(worker * 4, worker * 4 + 4)
        alone = copy.deepcopy(done.model)
        x = done._augmented(images[part], 2, 3, worker)
        loss = F.cross_entropy(alone(x), labels[part], reduction="sum") / BATCH
        loss.backward()
        total += loss.item()
        stats.append(alone.get_submodule("bn1").running_var)
        for p, q in zip(by_hand.parameters(), alone.parameters(), strict=True):
            p.grad = q.grad if p.grad is None else p.grad + q.grad
    rate = (1e-3 - 1e-3) * (1 - 101 / 2000) + 1e-3
    record = done.step(2, 3)
    assert record.loss == pytest.approx(total, rel=1e-6)
    assert record.receipt is None
    for p, q in zip(done.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q - rate * q.grad, rtol=1e-5, atol=1e-7)
    assert [torch.equal(done.moving[w][0][1], stats[w]) for w in range(8)] == [True] * 8
    assert len({float(s.sum()) for s in stats}) == 8


def test_a_fault_with_a_micro_step_corrupts_that_worker_alone():
    golden, corrupted = training(), training()
    golden.step(0, 0)
    word = np.array([1 << 30], np.uint32)
    shape = (4, WIDTH, 16, 16)
    fault = Fault("op:conv1#convolution.0/fwd/out", "float32", shape, np.array([7]), "set", word, micro_step=5)
    record = corrupted.step(0, 0, [fault])
    assert record.receipt.verified_elements == 1
    differs = [not torch.equal(golden.moving[w][0][0], corrupted.moving[w][0][0]) for w in range(8)]
    assert differs == [w == 5 for w in range(8)]


def test_a_snapshot_brings_back_every_bit():
    done = training()
    done.step(0, 0)
    state, before = done.snapshot(), bits(done)
    first = done.step(0, 1), done.step(0, 2), bits(done)
    assert not same(before, first[2])
    for _ in range(2):
        done.restore(state)
        assert same(bits(done), before)
        again = done.step(0, 1), done.step(0, 2), bits(done)
        assert again[:2] == first[:2]
        assert same(again[2], first[2])


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    random = torch.random.get_rng_state()
    runs = []
    for seed in (1, 1, 2):
        done = training(seed=seed)
        runs.append((done.step(0, 0), bits(done)))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert same(runs[0][1], runs[1][1])
    assert torch.equal(torch.random.get_rng_state(), random)


def test_an_epoch_shows_every_image_once_before_any_twice():
    done = training()
    found = torch.cat([done._batch(1, step)[0] for step in range(3)])  # 96 of 48 images
    ids = [float(image.double().sum()) for image in found]
    assert len(set(ids[:48])) == len(set(ids[48:])) == 48
    assert ids[:48] != ids[48:]
    assert not torch.equal(done._batch(2, 0)[0], done._batch(1, 0)[0])


def test_augmentation_flips_and_shifts_and_nothing_else():
    done = training()
    plain = torch.arange(1.0, 32 * 32 + 1).reshape(32, 32)
    ways = [F.pad(way, (6,) * 4) for way in (plain, plain.flip(1), plain.flip(0), plain.flip(0, 1))]
    flips, shifts = set(), set()
    for worker in range(8):
        seen = done._augmented(plain.expand(20, 3, 32, 32), 0, 0, worker)[:, 0]
        top, left = (int((seen[0] == 0).all(axis).sum()) for axis in (1, 0))  # rows and columns of zeros
        places = [(t, s) for t in (6 - top, 6 + top) for s in (6 - left, 6 + left)]
        fits = [
            {
                (way, place)
                for way in range(4)
                for place in places
                if torch.equal(ways[way][place[0] :, place[1] :][:32, :32], one)
            }
            for one in seen
        ]
        assert all(len(found) == 1 for found in fits)
        flips |= {way for found in fits for way, _ in found}
        here = {place for found in fits for _, place in found}
        assert len(here) == 1  # one crop for all images of a worker
        shifts |= here
    assert flips == {0, 1, 2, 3}
    assert len(shifts) > 4


def test_the_rate_decays_as_published():
    done = training()
    assert done.rate(0) == 1e-3
    assert done.rate(2000) == pytest.approx(5.5e-4)
    assert done.rate(4000) == done.rate(9999) == pytest.approx(1e-4)
    done.step(40, 40)
    assert {g["lr"] for g in done.optimizer.param_groups} == {done.rate(40 * 49 + 40)}
    assert isinstance(done.optimizer, torch.optim.Adam)
    assert isinstance(training("resnet18_sgd").optimizer, torch.optim.SGD)


def test_each_worker_evaluates_its_share_with_its_own_statistics():
    done = training()
    held = pictures()[1]
    loss, right = done.evaluate(held)
    with torch.no_grad():
        scores = copy.deepcopy(done.model).eval()(held.rows(torch.arange(12))[0])
    assert loss == pytest.approx(F.cross_entropy(scores, held.labels).item(), rel=1e-5)
    assert right == pytest.approx((scores.argmax(1) == held.labels).double().mean().item())
    kept = done.moving[7]  # with 12 images for 8 workers, the last one has one
    done.moving[7] = [(mean, torch.full_like(variance, math.nan)) for mean, variance in kept]
    assert math.isnan(done.evaluate(held)[0])
    done.moving[7] = [(mean + 9.0, variance) for mean, variance in kept]
    other = done.evaluate(held)[0]
    done.moving[6] = done.moving[7]
    assert len({loss, other, done.evaluate(held)[0]}) == 3


def test_images_are_normalised_by_the_training_set_alone():
    known, held = pictures()
    assert (len(known), len(held)) == (48, 12)
    ready, labels = known.rows(torch.arange(48))
    assert ready.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert ready.double().std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(labels, known.labels)
    values = known.images.double()
    one, _ = held.rows(torch.tensor([3]))
    by_hand = (held.images[3].double() - values.mean()) / values.std(correction=0)
    torch.testing.assert_close(one[0].double(), by_hand.permute(2, 0, 1), rtol=0, atol=1e-6)


def test_weights_must_fit_and_reach_all_workers():
    done, other = training(), training(seed=9)
    other.step(0, 0)
    other._use_worker_statistics(3)
    state = other.model.state_dict()
    done.load(state, "w.pt")
    assert all(torch.equal(v, done.model.state_dict()[k]) for k, v in state.items())
    assert all(torch.equal(done.moving[w][0][0], other.moving[3][0][0]) for w in range(8))
    done.step(0, 0)
    assert not torch.equal(done.moving[0][0][0], done.moving[1][0][0])
    for wrong, why in (
        ({k: v for k, v in state.items() if k != "fc.bias"}, "w.pt lacks 'fc.bias'"),
        ({**state, "fc.bias": torch.zeros(3)}, r"has 'fc.bias' as \[3\], expected \[10\]"),
        ({**state, "more": torch.zeros(3)}, "has 'more', which the published network lacks"),
    ):
        with pytest.raises(UsageError, match=why):
            done.load(wrong, "w.pt")


def test_unknown_networks_and_batches():
    with pytest.raises(UsageError, match="unknown published network 'resnet50'"):
        untrained_network("resnet50")
    with pytest.raises(UsageError, match="width is 0"):
        untrained_network(width=0)
    with pytest.raises(UsageError, match="batch is 20; expected a multiple of 8"):
        PublishedTraining("resnet18", pictures()[0], rate=1e-3, width=WIDTH, batch=20)
