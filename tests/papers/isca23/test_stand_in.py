"""The images that take the place of CIFAR-10 where no file is at hand."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits

from unsilent.papers.isca23.training import SCALE, digits_as_images
from unsilent.workloads.digits import digits


def test_every_digit_once_enlarged_and_grey():
    images, labels = digits_as_images()
    assert (images.dtype, tuple(images.shape), labels.dtype) == (torch.uint8, (1797, 32, 32, 3), torch.int64)
    small = images[:, ::SCALE, ::SCALE, 0].numpy()
    assert np.array_equal(images[..., 0].numpy(), small.repeat(SCALE, 1).repeat(SCALE, 2))
    assert torch.equal(images, images[..., :1].expand(-1, -1, -1, 3))
    bunch = load_digits()
    known = sorted(
        (label, *np.rint(image.ravel() * 255 / 16)) for image, label in zip(bunch.images, bunch.target, strict=True)
    )
    assert sorted((label, *image.ravel()) for image, label in zip(small, labels.tolist(), strict=True)) == known


def test_held_out_digits_come_last():
    _, labels = digits_as_images()
    assert torch.equal(labels[-450:], digits().test_labels)
