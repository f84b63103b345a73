"""Which workloads are built in: one line each, with the options they take.

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
            _HERE + "digits_cnn:digits_cnn",
            "small residual CNN with batch norm on scikit-learn's 8x8 handwritten digits",
            {"eval": "held-out images per evaluation (128)", **_SEED},
        ),
        Entry(
            "digits-vit",
            _HERE + "digits_vit:digits_vit",
            "small vision transformer on the same digits",
            {"eval": "held-out images per evaluation (128)", **_SEED},
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
"""The built-in workloads by name, in the order they are listed."""

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
