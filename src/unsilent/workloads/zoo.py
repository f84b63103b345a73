"""Which workloads are built in, for inference and training: one line each, with the options they take.

Invariant: importing this module imports neither torch nor numpy, so that listing is instant; the factories live in
modules that are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Need = Literal["no", "optional", "required"]


@dataclass(frozen=True)
class Entry:
    """One line of the list of built-in workloads."""

    name: str
    target: str
    """``module:function``, imported on use."""
    description: str
    options: Mapping[str, str]
    """Option -> what it does, with its default."""
    data: Need = "no"
    weights: Need = "no"
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments this entry fixes."""


_SEED = {"seed": "training seed (0)"}
_HERE = "unsilent.workloads."


def _zoo() -> dict[str, Entry]:
    entries = [
        Entry(
            "digits-cnn",
            _HERE + "digits:classifier",
            "small residual CNN with batch norm on scikit-learn's 8x8 handwritten digits",
            {"eval": "held-out images per evaluation (128)", **_SEED},
            preset={"name": "digits-cnn"},
        ),
        Entry(
            "digits-vit",
            _HERE + "digits:classifier",
            "small vision transformer on the same digits",
            {"eval": "held-out images per evaluation (128)", **_SEED},
            preset={"name": "digits-vit"},
        ),
        Entry(
            "chargpt",
            _HERE + "chargpt:chargpt",
            "small character GPT on the Python reference that ships with Python",
            {"eval": "held-out contexts of 64 characters per evaluation (32)", **_SEED},
        ),
        Entry(
            "dlrm",
            _HERE + "dlrm:dlrm",
            "DLRM (embedding tables, bottom and top MLP) on synthetic click data, or on a CSV of your own",
            {
                "eval": "held-out rows per evaluation (512, or all of a smaller set)",
                "threshold": "click probability from which the answer is yes (0.5; for a CSV its share of positives)",
                "target": "CSV: target column (one named y, label, click or target, else the last)",
                "positive": "CSV: target value that counts as a click (yes, true, 1 …, else the rarer value)",
                "drop": "CSV: columns to leave out, a+b+c",
                "rows": "CSV: most rows of an embedding table (10000)",
                "room": "CSV: table rows per category, the others stay cold (16)",
                **_SEED,
            },
            data="optional",
        ),
    ]
    entries += [
        Entry(
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
            preset={"depth": depth},
        )
        for depth in (20, 32, 44, 56)
    ]
    return {entry.name: entry for entry in entries}


ZOO: Mapping[str, Entry] = _zoo()
"""The built-in inference workloads by name, in the order they are listed."""

_TRAINED = {
    "optimizer": "adam, adamw or sgd (with momentum)",
    "rate": "highest learning rate",
    "amp": "forward passes in bfloat16 or float16, with a loss scaler (none)",
    "device": "cpu, cuda or cuda:N (cpu)",
}
_CLIPPED = {**_TRAINED, "clip": "largest norm of all gradients together, 0 for none (1.0)"}
_STEPS = "steps of a full run, over which the learning rate goes up and down"


def _trainings() -> dict[str, Entry]:
    here = _HERE + "trainings."
    shift = {"shift": "move each training image by up to one pixel (yes)"}
    resnets = {
        "train-resnet": "a residual network with batch norm on scikit-learn's digits, with Adam",
        "train-resnet-nobn": "the same without batch norm",
        "train-resnet-sgd": "the same with batch norm and SGD with momentum",
    }
    entries = [
        Entry(
            name,
            here + "images:train_resnet",
            what,
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "images per step (32)",
                "width": "digits: channels of the first layer (8)",
                "depth": "own images: layers, 6 k + 2 (8)",
                "dropout": "share that is dropped before the last layer (0.15)",
                **shift,
                **_CLIPPED,
            },
            data="optional",
            preset={"variant": name},
        )
        for name, what in resnets.items()
    ]
    entries += [
        Entry(
            "train-vit",
            here + "images:train_vit",
            "a vision transformer on the same digits, with AdamW",
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "images per step (32)",
                "width": "numbers per token (32)",
                "depth": "blocks (2)",
                "dropout": "share that is dropped at the end of each MLP (0.1)",
                **shift,
                **_CLIPPED,
            },
        ),
        Entry(
            "train-chargpt",
            here + "text:train_chargpt",
            "a character GPT on the Python reference that ships with Python, with AdamW",
            {
                "steps": f"{_STEPS} (1200)",
                "batch": "contexts of 64 characters per step (8)",
                "width": "numbers per token (32)",
                "depth": "blocks (2)",
                "dropout": "share that is dropped at the end of each MLP (0.1)",
                **_CLIPPED,
            },
        ),
        Entry(
            "train-dlrm",
            here + "clicking:train_dlrm",
            "DLRM on synthetic click data, with Adam",
            {
                "steps": f"{_STEPS} (1000)",
                "batch": "rows per step (64)",
                "dropout": "share that is dropped after the first layer of the top MLP (0.1)",
                **_TRAINED,
            },
        ),
    ]
    return {entry.name: entry for entry in entries}


TRAININGS: Mapping[str, Entry] = _trainings()
"""The built-in training workloads by name, in the order they are listed."""

HF = Entry(
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

EXPORTED = Entry(
    "FILE.pt2",
    _HERE + "exported:exported",
    "a program of torch.export; the file is code",
    {},
    data="optional",
)
"""The entry behind every ``FILE.pt2``."""
