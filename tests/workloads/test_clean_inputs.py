"""Clean inputs for detectors: the parts are disjoint, repeatable and as large as asked, for every workload that has them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import affine_transform
from torch import nn

from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.outcomes.tensors import leaves
from unsilent.workloads import ZOO, Workload, help_texts, load
from unsilent.workloads.base import CLEAN_PARTS, CalibratedWorkload
from unsilent.workloads.clean_inputs import CleanInputs, ImageAlteration, altered_copies, split_originals
from unsilent.workloads.clicks import synthetic_clicks
from unsilent.workloads.digits import digits

from .conftest import QUICK, fresh

NAMES = few(sorted(ZOO), *QUICK)
STILL = ImageAlteration(rotation=0, shift=0, brightness=0, noise=0)


def samples_of(batches):
    """Each sample as bytes, in order."""
    result = []
    for batch in batches:
        tensors = list(batch.values()) if isinstance(batch, dict) else [batch]
        result += [b"".join(t[i].numpy().tobytes() for t in tensors) for i in range(len(tensors[0]))]
    return result


@pytest.mark.parametrize("name", NAMES)
def test_contract(zoo, name, cifar_files):
    workload, again = zoo(name), fresh(name, cifar_files)
    assert isinstance(workload, CalibratedWorkload)
    wanted = 60 if name.startswith("cifar") else 1000
    evaluated = workload.batches()
    parts = {part: workload.clean_batches(part, wanted) for part in CLEAN_PARTS}
    for part, batches in parts.items():
        samples = samples_of(batches)
        assert len(samples) == wanted
        assert samples == samples_of(again.clean_batches(part, wanted))
        assert not set(samples) & set(samples_of(evaluated))
        originals = workload.clean_originals(part, wanted)
        assert [len(one) for one in originals] == [len(samples_of([batch])) for batch in batches]
        assert sum(len(set(one)) for one in originals) == len({name for one in originals for name in one})
        for other in CLEAN_PARTS:
            assert other == part or not set(samples) & set(samples_of(parts[other]))
        with torch.no_grad():
            output = workload.run(workload.model(), batches[0])
        assert all(torch.isfinite(leaf).all() for leaf in leaves(output))
        first = next(iter(batches[0].values())) if isinstance(batches[0], dict) else batches[0]
        model_input = next(iter(evaluated[0].values())) if isinstance(evaluated[0], dict) else evaluated[0]
        assert (first.dtype, first.shape[1:]) == (model_input.dtype, model_input.shape[1:])


@given(st.lists(st.integers(0, 10**6), unique=True))
def test_every_original_is_in_one_part(free):
    parts = split_originals(free)
    assert list(parts) == list(CLEAN_PARTS)
    assert sorted(torch.cat(list(parts.values())).tolist()) == sorted(free)
    assert 0 <= len(parts["calibration"]) - len(parts["test"]) <= 1
    assert len(parts["shifted"]) == len(free) // 5


@given(st.integers(1, 20), st.integers(1, 100), st.integers(1, 30), st.integers(1, 8))
def test_copies_are_in_one_batch_and_the_same_at_every_call(originals, samples, batch, most):
    def make(part, original, copies):
        return torch.tensor([[original, j] for j in range(copies)])

    clean = CleanInputs("w", lambda part: torch.arange(originals) * 7, make, batch, most)
    batches = clean("test", samples)
    pairs = [tuple(pair) for b in batches for pair in b.tolist()]
    assert len(pairs) == len(set(pairs)) == min(samples, originals * most)
    for original in {pair[0] for pair in pairs}:
        copies = [j for o, j in pairs if o == original]
        assert copies == list(range(len(copies)))
        assert sum(original in b[:, 0] for b in batches) == 1
    assert all(0 < len(b) <= max(batch, most) for b in batches)
    assert clean.originals_of_samples("test", samples) == [b[:, 0].tolist() for b in batches]


def test_no_original_left():
    with pytest.raises(UsageError, match=r"workload 'digits-cnn': no held-out originals are left .* 'shifted'; lower"):
        load("digits-cnn", {"eval": "450"}).clean_batches("shifted", 1)


def test_few_samples_are_held_out_images_themselves(zoo):
    data, seen = digits(), {}
    place = {image.numpy().tobytes(): i for i, image in enumerate(data.test)}
    for part in ("calibration", "test"):
        seen[part] = [place[sample] for sample in samples_of(zoo("digits-cnn").clean_batches(part, 100))]
    assert min(seen["calibration"] + seen["test"]) >= 128
    assert len(set(seen["calibration"]) | set(seen["test"])) == 200


def test_digits_keep_their_levels(zoo):
    for part in CLEAN_PARTS:
        images = torch.cat(list(zoo("digits-cnn").clean_batches(part, 1000)))
        levels = (images + 1) * 8
        assert torch.equal(levels, levels.round())
        assert (levels.min(), levels.max()) == (0, 16)


@pytest.mark.parametrize("picks", [[0], [0, 3, 660], list(range(0, 661, 3))])
def test_clean_contexts_are_of_blocks_that_are_not_evaluated(picks):
    text = help_texts.load_help_texts().test
    clean = help_texts.clean_contexts("w", torch.stack([text[64 * pick : 64 * pick + 64] for pick in picks]))
    evaluated = {place for pick in picks for place in range(64 * pick, 64 * pick + 64)}
    used = {}
    for part in ("calibration", "test"):
        originals = clean.originals(part).tolist()
        assert len(originals) > 30
        used[part] = {place for o in originals for place in range(128 * o, 128 * o + 128)}
        assert not used[part] & evaluated
        contexts = torch.cat(clean(part, len(originals) * 16)).view(len(originals), 16, 64)
        for original, copies in zip(originals, contexts, strict=True):
            block = text[128 * original : 128 * original + 128].unfold(0, 64, 1)
            assert all((block == copy).all(1).any() for copy in copies)
    assert not used["calibration"] & used["test"]


@pytest.mark.slow
def test_clean_contexts_are_new():
    data = help_texts.load_help_texts()
    training, evaluated = ("".join(map(chr, part.flatten().tolist())) for part in (data.train, data.test[:64]))
    clean = help_texts.clean_contexts("w", data.test[None, :64])
    parts = {part: samples_of(clean(part, 300)) for part in CLEAN_PARTS}
    texts = ["".join(map(chr, np.frombuffer(sample, np.int64))) for part in parts.values() for sample in part]
    assert len(texts) == 900
    assert not [text for text in texts if text in training or text == evaluated]
    assert not set(parts["calibration"]) & set(parts["test"])


def test_synthetic_requests_are_new(zoo):
    data = synthetic_clicks()
    known = {row.numpy().tobytes() for row in data.dense}
    for part in CLEAN_PARTS:
        (batch,) = zoo("dlrm").clean_batches(part, 300)
        assert not {row.numpy().tobytes() for row in batch["dense"]} & known
        assert (batch["sparse"].amax(0) < torch.tensor(data.tables)).all()
    usual, unusual = (torch.cat([b["sparse"] for b in zoo("dlrm").clean_batches(p, 5000)]) for p in ("test", "shifted"))
    most_popular = torch.tensor([names[0] for names in data.by_popularity])
    assert (usual == most_popular).float().mean() == pytest.approx(
        np.mean([1 / np.sum(1 / np.arange(1, size + 1) ** 1.3) for size in data.tables]), abs=0.01
    )
    assert (unusual == most_popular).float().mean() < 0.15


def test_csv_rows(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(-1000, 1000, 1500).tolist()
    lines = [f"{v},{'ab'[v > 0]},{'cde'[i % 3]},{int(v > 0)}" for i, v in enumerate(x)]
    path = tmp_path / "clicks.csv"
    path.write_text("x,y1,y2,label\n" + "\n".join(lines) + "\n")
    workload = load("dlrm", {"eval": "100"}, data=str(path))
    sizes = {part: len(samples_of(workload.clean_batches(part, 1000))) for part in CLEAN_PARTS}
    assert sizes == {"calibration": 80, "test": 80, "shifted": 40}
    with pytest.raises(UsageError, match="no held-out originals are left"):
        load("dlrm", {"eval": "300"}, data=str(path)).clean_batches("test", 1)


def test_unaltered_copies():
    image = torch.arange(48).view(3, 4, 4) / 48
    copies = altered_copies(image, 3, STILL, 48, [0], plain_first=False)
    assert torch.equal(copies, image.expand(3, 3, 4, 4))
    mirrored = altered_copies(image, 4, ImageAlteration(0, 0, 0, 0, mirrored=True), 48, [0], plain_first=True)
    assert torch.equal(mirrored, torch.stack([image, image.flip(2)] * 2))


def test_copies_do_not_depend_on_their_number():
    image, how = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0)), ImageAlteration(20, 1, 0.2, 0.1)
    few_copies, many = (altered_copies(image, n, how, 16, [5], plain_first=True) for n in (3, 9))
    assert torch.equal(few_copies, many[:3])
    assert len(torch.unique(many, dim=0)) == 9


@pytest.mark.parametrize("seed", range(5))
def test_rotation_and_shift_against_scipy(seed):
    image = torch.rand(1, 9, 9, generator=torch.Generator().manual_seed(seed))
    angle, right, down, *_ = np.random.default_rng([seed]).uniform(-1, 1, 5) * [30, 2, 2, 0, 0]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    matrix, middle = np.array([[cos, sin], [-sin, cos]]), np.full(2, 4.0)
    offset = middle - matrix @ middle + [down, right]
    expected = affine_transform(image[0].double().numpy(), matrix, offset, order=1, mode="grid-constant")
    (copy,) = altered_copies(image, 1, ImageAlteration(30, 2, 0, 0), 10**6, [seed], plain_first=False)
    np.testing.assert_allclose(copy[0].numpy(), expected, atol=1e-5)


def test_brightness_and_noise_stay_within_limits():
    image = torch.full((1, 40, 40), 0.5)
    brighter = altered_copies(image, 50, ImageAlteration(0, 0, 0.2, 0), 10**6, [0], plain_first=False)
    factors = brighter[:, 0, 20, 20] / 0.5
    assert 0.8 <= factors.min() < 0.9 < 1.1 < factors.max() <= 1.2
    noisy = altered_copies(image, 50, ImageAlteration(0, 0, 0, 0.1), 10**6, [0], plain_first=False)
    deviations = noisy.flatten(1).std(1)
    assert deviations.max() == pytest.approx(0.1, rel=0.15)
    assert deviations.min() < 0.02


def own(**options):
    return Workload(nn.Linear(2, 3), [torch.zeros(4, 2)], **options)


def test_clean_batches_of_a_dict():
    rows = [torch.full((3, 2), float(i)) for i in range(4)]
    workload = own(clean={"calibration": iter(rows), "test": [(rows[0], 1)]})
    assert [len(workload.clean_batches("calibration", n)) for n in (1, 3, 4, 12, 99, 1)] == [1, 1, 2, 4, 4, 1]
    assert workload.clean_batches("calibration", 5)[1] is rows[1]
    with pytest.raises(UsageError, match=r"workload 'custom' has no clean inputs 'shifted'; give them as Workload"):
        workload.clean_batches("shifted", 1)


def test_clean_batches_of_a_function():
    workload = own(
        labelled=True, clean=lambda part, samples: ((torch.full((1, 2), float(len(part))), 0) for _ in range(samples))
    )
    assert [b.tolist() for b in workload.clean_batches("test", 2)] == [[[4.0, 4.0]], [[4.0, 4.0]]]


def test_wrong_clean_inputs():
    with pytest.raises(UsageError, match="workload 'custom' has no clean inputs 'test'"):
        own().clean_batches("test", 1)
    with pytest.raises(UsageError, match="unknown part of clean inputs 'tests'; did you mean 'test'"):
        own(clean={"tests": []})
    with pytest.raises(UsageError, match="unknown part of clean inputs 'x'"):
        own(clean=lambda part, samples: []).clean_batches("x", 1)
    with pytest.raises(UsageError, match="clean is a list; expected a dict like"):
        own(clean=[1])
