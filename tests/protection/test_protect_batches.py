"""Protected models whose inputs are lists, one tensor per sample, and other batches that can be read in two ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.protection.profile import load_profile, make_profile
from unsilent.protection.protect import ProtectedModel, protect


class Detector(nn.Module):
    """A dict with boxes for each image of a list, as many as there happen to be."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.box = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images):
        maps = self.body(torch.stack(list(images))).relu().flatten(2).transpose(1, 2)
        return [{"boxes": self.box(one[one.sum(-1) > one.sum(-1).median()])} for one in maps]


class TwoInputs(nn.Module):
    """One answer for each row of both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, one, other):
        return self.head(one + other)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def listed(count, batches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(3, 8, 8, generator=generator) for _ in range(count)] for _ in range(batches)]


def pairs(kind, batches=12):
    generator = torch.Generator().manual_seed(0)
    return [kind(torch.randn(32, 8, generator=generator) for _ in range(2)) for _ in range(batches)]


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("detector", ["ranger", "dr-dna+weight-integrity", "golden-test:samples=2", "duplication"])
def test_a_list_of_images_has_one_sample_per_image(count, detector, tmp_path):
    model = made(Detector)
    profile = make_profile(model, [(images,) for images in listed(count, 280 // count)], detector)
    profile.save(tmp_path / "p")
    images = listed(count, 1, seed=9)[0]
    for known in (profile, load_profile(tmp_path / "p", model)):
        with ProtectedModel(model, known) as guarded, torch.no_grad():
            guarded(images)
            assert guarded.verdict.flagged.shape == (count,)
    assert profile.samples >= 99


def test_a_corrupted_image_of_a_list_is_flagged_alone():
    model = made(Detector)
    with protect(model, listed(7, 40), "ranger", run=lambda model, batch: model(batch)) as guarded, torch.no_grad():
        images = listed(7, 1, seed=9)[0]
        images[4] = images[4] * 1e6
        guarded(images)
    assert guarded.verdict.flagged.tolist() == [number == 4 for number in range(7)]
    assert guarded.verdict.layer == "body"


def test_a_list_of_images_that_the_model_is_called_with_one_by_one_is_refused():
    with pytest.raises(UsageError, match=r"raised TypeError for a clean batch of float32\[3, 8, 8\], .*or give run="):
        protect(made(Detector), listed(20, 14))


def test_images_in_a_tuple_are_refused():
    with pytest.raises(UsageError, match="read as 3 samples, but the model answers with 7; .*or the samples as a list"):
        protect(made(Detector), [(tuple(images),) for images in listed(7, 40)])


@pytest.mark.parametrize("kind", [tuple, list])
def test_two_inputs_have_one_sample_per_row(kind):
    model = made(TwoInputs)
    with protect(model, pairs(kind)) as guarded, torch.no_grad():
        guarded(*pairs(kind)[0])
    assert guarded.verdict.flagged.shape == (32,)


def test_two_inputs_in_a_list_of_which_one_cannot_tell_are_refused():
    def run(model, batch):
        return model(batch[0], batch[1])

    with pytest.raises(UsageError, match="read as 2 samples, but the model answers with 32; give the inputs"):
        protect(made(TwoInputs), pairs(list), run=run)
    with protect(made(TwoInputs), pairs(tuple), run=run) as guarded, torch.no_grad():
        guarded(*pairs(tuple)[0])
    assert guarded.verdict.flagged.shape == (32,)
