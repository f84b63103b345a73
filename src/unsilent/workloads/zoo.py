"""The list of built-in workloads for inference and training, with their options.

Invariant: importing this module imports neither torch nor numpy, so that listing is instant. The modules of the
factories are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Need = Literal["no", "optional", "required"]


@dataclass(frozen=True)
class WorkloadEntry:
    """One entry in the list of built-in workloads."""

    name: str
    factory_path: str
    """``module:function``, imported on use."""
    description: str
    options: Mapping[str, str]
    """Description of each option by its name, with its default."""
    data: Need = "no"
    weights: Need = "no"
    fixed_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that this entry fixes."""


_SEED = {"seed": "training seed (0)"}
_HERE = "unsilent.workloads."


# Long because it is a list, in the order in which it is shown.
def _zoo() -> dict[str, WorkloadEntry]:
    classifiers = {
        "digits-cnn": "small residual CNN with batch norm",
        "digits-vit": "small vision transformer",
        "digits-efficientnet": "small EfficientNet with squeeze-and-excitation and SiLU",
        "digits-mobilenet": "small MobileNetV2 with depthwise convolutions and ReLU6",
    }
    language_models = {
        "chargpt": "small character GPT",
        "llama-chars": "small character Llama of transformers",
    }
    entries = [
        *(
            WorkloadEntry(
                name,
                _HERE + "digits:classifier",
                f"{description} on scikit-learn's 8x8 handwritten digits",
                {"eval": "held-out images per evaluation (128)", **_SEED},
                fixed_options={"name": name},
            )
            for name, description in classifiers.items()
        ),
        *(
            WorkloadEntry(
                name,
                _HERE + "character_models:character_model",
                f"{description} on the Python reference that ships with Python",
                {"eval": "held-out contexts of 64 characters per evaluation (32)", **_SEED},
                fixed_options={"name": name},
            )
            for name, description in language_models.items()
        ),
        WorkloadEntry(
            "dlrm",
            _HERE + "dlrm:dlrm",
            "DLRM (embedding tables, bottom and top MLP) on synthetic click data, or on a CSV of your own",
            {
                "eval": "held-out rows per evaluation (512, or all of a smaller set)",
                "threshold": "click probability from which a click is predicted (0.5; for a CSV its share of positives)",
                "target": "CSV: target column (one named y, label, click or target, else the last)",
                "positive": "CSV: target value that counts as a click (yes, true, 1 …, else the rarer value)",
                "drop": "CSV: columns to leave out, joined by +: a+b+c",
                "rows": "CSV: largest number of rows of an embedding table (10000)",
                "room": "CSV: embedding-table rows per category; rows beyond one per category stay unused (16)",
                **_SEED,
            },
            data="optional",
        ),
    ]
    segmenters = {
        "scenes-unet": "small U-Net with batch norm",
        "scenes-segformer": "small SegFormer of transformers",
    }
    scenes = {"eval": "scenes of held-out digits per evaluation (64)", **_SEED}
    entries += [
        *(
            WorkloadEntry(
                name,
                _HERE + "scenes.segmentation:segmenter",
                f"{description} that labels the pixels of scenes of scikit-learn's digits",
                scenes,
                fixed_options={"name": name},
            )
            for name, description in segmenters.items()
        ),
        WorkloadEntry(
            "scenes-detector",
            _HERE + "scenes.detection:detector",
            "small one-stage detector that finds scikit-learn's digits in scenes",
            scenes,
        ),
    ]
    entries += [
        WorkloadEntry(
            f"cifar-resnet{depth}",
            _HERE + "cifar_resnet:cifar_resnet",
            f"CIFAR ResNet-{depth} of He et al. with your own weights and images",
            {
                "eval": "images per evaluation (64)",
                "batch": "images per batch (64)",
                "min_accuracy": "refuse weights below this accuracy on the data (3 x chance)",
            },
            data="required",
            weights="required",
            fixed_options={"depth": depth},
        )
        for depth in (20, 32, 44, 56)
    ]
    return {entry.name: entry for entry in entries}


ZOO: Mapping[str, WorkloadEntry] = _zoo()
"""The built-in inference workloads by name, in the order they are listed."""

_TRAINED = {
    "optimizer": "adam, adamw or sgd (with momentum)",
    "rate": "highest learning rate",
    "amp": "forward passes in bfloat16 or float16, with a loss scaler (none)",
    "device": "cpu, cuda or cuda:N (cpu)",
}
_CLIPPED = {**_TRAINED, "clip": "clip the norm of all gradients together to this value; 0: no clipping (1.0)"}
_STEPS = "steps of a full run, over which the learning rate rises and falls"


# Long because it is a list, in the order in which it is shown.
def _trainings() -> dict[str, WorkloadEntry]:
    here = _HERE + "trainings."
    shift = {"shift": "move each training image by up to one pixel (yes)"}
    resnets = {
        "train-resnet": "a residual network with batch norm on scikit-learn's digits, with Adam",
        "train-resnet-nobn": "a residual network without batch norm on scikit-learn's digits, with Adam",
        "train-resnet-sgd": "a residual network with batch norm on scikit-learn's digits, with SGD and momentum",
    }
    entries = [
        WorkloadEntry(
            name,
            here + "images:train_resnet",
            description,
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "images per step (32)",
                "width": "digits: channels of the first layer (8)",
                "depth": "own images (--data): number of layers, 6 k + 2 (8)",
                "dropout": "dropout probability before the last layer (0.15)",
                **shift,
                **_CLIPPED,
            },
            data="optional",
            fixed_options={"variant": name},
        )
        for name, description in resnets.items()
    ]
    entries += [
        WorkloadEntry(
            "train-vit",
            here + "images:train_vit",
            "a vision transformer on scikit-learn's digits, with AdamW",
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "images per step (32)",
                "width": "embedding size (32)",
                "depth": "transformer blocks (2)",
                "dropout": "dropout probability at the end of each MLP (0.1)",
                **shift,
                **_CLIPPED,
            },
        ),
        WorkloadEntry(
            "train-chargpt",
            here + "text:train_chargpt",
            "a character GPT on the Python reference that ships with Python, with AdamW",
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "contexts of 64 characters per step (8)",
                "width": "embedding size (32)",
                "depth": "transformer blocks (2)",
                "dropout": "dropout probability at the end of each MLP (0.1)",
                **_CLIPPED,
            },
        ),
        WorkloadEntry(
            "train-llama",
            here + "text:train_llama",
            "a small bfloat16 Llama of transformers on the Python reference that ships with Python, with AdamW",
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "contexts of 64 characters per step (4)",
                "width": "embedding size (64)",
                "depth": "transformer blocks (2)",
                "dtype": "of parameters and moments: bf16 or fp32 (bf16)",
                **_CLIPPED,
            },
        ),
        WorkloadEntry(
            "train-dlrm",
            here + "clicking:train_dlrm",
            "DLRM on synthetic click data, with Adam",
            {
                "steps": f"{_STEPS} (1000)",
                "batch": "rows per step (64)",
                "dropout": "dropout probability after the first layer of the top MLP (0.1)",
                **_TRAINED,
            },
        ),
    ]
    return {entry.name: entry for entry in entries}


TRAININGS: Mapping[str, WorkloadEntry] = _trainings()
"""The built-in training workloads by name, in the order they are listed."""

HF = WorkloadEntry(
    "hf:DIR",
    _HERE + "hf_folder:hf_folder",
    "a local transformers folder (nothing is downloaded)",
    {
        "eval": "samples per evaluation when inputs are synthetic (16)",
        "batch": "samples per batch (all)",
        "length": "tokens per synthetic sample (32)",
        "seed": "seed of the synthetic inputs (0)",
        "generate": "new tokens, generated greedily with a key/value cache (none: one call of the model)",
    },
    data="optional",
)
"""The entry behind every ``hf:DIR``."""

EXPORTED = WorkloadEntry(
    "FILE.pt2",
    _HERE + "exported:exported",
    "a program saved by torch.export; the file contains code that is run",
    {},
    data="optional",
)
"""The entry behind every ``FILE.pt2``."""
