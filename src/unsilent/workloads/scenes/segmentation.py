"""`scenes-unet` and `scenes-segformer`: models that label each pixel of a scene with its digit.

`UNet` has the encoder, decoder and skip connections of Ronneberger et al. (MICCAI 2015), with batch norm and two levels. The
SegFormer (Xie et al., NeurIPS 2021) is `SegformerForSemanticSegmentation` of transformers, built from a small
configuration; its scores have half the resolution and are enlarged to the size of the image, as in the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from unsilent.workloads.base import call_model
from unsilent.workloads.model_fitting import Goal, Progress, Schedule, import_transformers, no_progress
from unsilent.workloads.scenes.composing import CANVAS, PIXEL_LABELS, Scenes, ScenesWorkload
from unsilent.workloads.scenes.models import SceneModel, scenes_workload


class DoubleConvolution(nn.Sequential):
    """Two 3x3 convolutions, each with batch norm and ReLU: [n, c_in, h, w] -> [n, c_out, h, w]."""

    def __init__(self, c_in: int, c_out: int) -> None:
        layers: list[nn.Module] = []
        for c in (c_in, c_out):
            layers += [nn.Conv2d(c, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """A U-Net: images [n, 1, h, w] -> scores [n, 11, h, w].

    Height and width must be multiples of 4.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1 = DoubleConvolution(1, width)
        self.down2 = DoubleConvolution(width, 2 * width)
        self.middle = DoubleConvolution(2 * width, 4 * width)
        self.enlarge2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = DoubleConvolution(4 * width, 2 * width)
        self.enlarge1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up1 = DoubleConvolution(2 * width, width)
        self.head = nn.Conv2d(width, PIXEL_LABELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        deep = self.middle(self.pool(coarse))
        coarse = self.up2(torch.cat([self.enlarge2(deep), coarse], 1))
        fine = self.up1(torch.cat([self.enlarge1(coarse), fine], 1))
        out: Tensor = self.head(fine)
        return out


def segformer() -> nn.Module:
    """A SegFormer with three stages and no dropout, for images [n, 1, 32, 32].

    Raises:
        UsageError: transformers is not installed.
    """
    transformers = import_transformers("scenes-segformer")
    config = transformers.SegformerConfig(
        num_channels=1, num_labels=PIXEL_LABELS, num_encoder_blocks=3, depths=[1, 1, 1], hidden_sizes=[24, 48, 96],
        num_attention_heads=[1, 2, 4], sr_ratios=[4, 2, 1], patch_sizes=[5, 3, 3], strides=[2, 2, 2], mlp_ratios=[2, 2, 2],
        decoder_hidden_size=64, drop_path_rate=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.SegformerForSemanticSegmentation(config)
    return model


def pixel_scores(output: Any) -> Tensor:
    """Scores [n, 11, 32, 32] from a model's output, enlarged bilinearly if the output is smaller."""
    scores: Tensor = getattr(output, "logits", output)
    if scores.shape[-1] == CANVAS:
        return scores
    return interpolate(scores, size=(CANVAS, CANVAS), mode="bilinear", align_corners=False)


def run(model: nn.Module, batch: Tensor) -> Tensor:
    """The scores [n, 11, 32, 32] of a model for images [n, 1, 32, 32]."""
    return pixel_scores(call_model(model, batch))


def mean_iou(decided: Tensor, labels: Tensor) -> float:
    """Mean intersection over union of the pixels of each label, over all scenes together.

    Args:
        decided: int64, any shape.
        labels: int64, the same shape. Labels that occur in neither are left out.
    """
    pairs = torch.bincount((decided * PIXEL_LABELS + labels).flatten(), minlength=PIXEL_LABELS**2)
    table = pairs.view(PIXEL_LABELS, PIXEL_LABELS).double()
    both = table.diagonal()
    either = table.sum(0) + table.sum(1) - both
    return float((both[either > 0] / either[either > 0]).mean())


def _score(model: nn.Module, scenes: Scenes) -> float:
    return mean_iou(run(model, scenes.images).argmax(1), scenes.labels)


_segmenter = partial(
    SceneModel, targets=lambda scenes: scenes.labels, loss=lambda output, labels: cross_entropy(pixel_scores(output), labels),
    score=_score, run=run, goal=Goal("mean IoU", 0.70), judge="segmentation:background=0",
)  # fmt: skip
SEGMENTERS = {
    "scenes-unet": _segmenter(
        version=1,
        description="small U-Net with batch norm that labels the pixels of scenes of handwritten digits",
        build=UNet,
        scenes=6000,
        schedule=Schedule(epochs=2, batch=32, rate=0.01),
        components={
            "encoder": ("down1.*", "down2.*", "middle.*"),
            "decoder": ("enlarge2.*", "up2.*", "enlarge1.*", "up1.*"),
            "head": ("head.*",),
        },
    ),
    "scenes-segformer": _segmenter(
        version=1,
        description="small SegFormer of transformers that labels the pixels of scenes of handwritten digits",
        build=segformer,
        scenes=8000,
        schedule=Schedule(epochs=4, batch=16, rate=0.004),
        components={
            "patches": ("segformer.*.patch_embeddings.*",),
            "attention": ("segformer.*.attention.*",),
            "mlp": ("segformer.*.mlp.*",),
            # Norms of blocks and of stages; transformers 4 and 5 name them differently.
            "norm": ("segformer.*[0-9r].layer*norm*",),
            "decoder": ("decode_head.*",),
        },
    ),
}


def segmenter(*, name: str, eval: int = 64, seed: int = 0, progress: Progress = no_progress) -> ScenesWorkload:  # noqa: A002 - option name
    """The workload of a trained segmentation model on ``eval`` scenes of held-out digits.

    Images are [eval, 1, 32, 32]; the answer of the model is the label of every pixel.
    """
    return scenes_workload(name, SEGMENTERS[name], eval, seed, progress)
