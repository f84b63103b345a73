"""`train-dlrm`: a DLRM trained on synthetic clicks that a teacher model labels; see `workloads.clicks`.

A full run is one pass over the rows, as is usual for DLRM. Categories are Zipf-distributed, so some rows of the tables
occur in few steps. The held-out requests with such a category are a group of their own, because run-to-run variation
may occur there that the overall accuracy does not show.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from unsilent.workloads.base import call_model
from unsilent.workloads.clicks import Clicks, synthetic_clicks
from unsilent.workloads.dlrm import Dlrm
from unsilent.workloads.model_fitting import auc, check_option_range
from unsilent.workloads.trainings.base import Bools, Evaluation
from unsilent.workloads.trainings.evaluating import make_evaluation
from unsilent.workloads.trainings.loop import Training
from unsilent.workloads.trainings.recipes import BuiltInTrainingOptions, add_dropout, make_training

NAME = "train-dlrm"
EVALUATED = 2000
RARE = 3
"""Number of training rows below which a category is rare; held-out requests with a rare category are a group."""


def train_dlrm(
    *,
    steps: int = 1000,
    batch: int = 64,
    optimizer: str = "adam",
    rate: float = 0.005,
    dropout: float = 0.1,
    amp: str = "none",
    device: str = "cpu",
) -> Training:
    """The training of a DLRM with dropout after the first layer of its top MLP."""
    data = synthetic_clicks()
    check_option_range(NAME, "batch", batch, data.training_row_count, "training rows")
    held_out = slice(data.training_row_count, data.training_row_count + EVALUATED)
    dense, sparse, labels = data.dense[held_out], data.sparse[held_out], data.labels[held_out]
    groups = {"rare category": has_rare_category(data, held_out)}

    def take(rows: Tensor) -> dict[str, Tensor]:
        return {"dense": data.dense[rows], "sparse": data.sparse[rows], "labels": data.labels[rows]}

    def build() -> nn.Module:
        model = Dlrm(data.dense.shape[1], data.tables)
        # Without the last sigmoid, the loss is exact for scores of any size, and under autocast.
        model.top_l[-1] = nn.Identity()
        add_dropout(model.top_l, dropout)
        return model

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = call_model(model, {"dense": batch["dense"], "sparse": batch["sparse"]})
        right = (scores.detach() > 0) == (batch["labels"] > 0.5)
        return binary_cross_entropy_with_logits(scores, batch["labels"]), {"accuracy": right.float().mean()}

    def evaluate(model: nn.Module) -> Evaluation:
        place = next(model.parameters()).device
        scores = call_model(model, {"dense": dense.to(place), "sparse": sparse.to(place)}).cpu()
        result = float(binary_cross_entropy_with_logits(scores, labels))
        # If a fault has made scores NaN or infinite, they have no order.
        area = auc(labels.numpy(), scores.numpy()) if bool(torch.isfinite(scores).all()) else float("nan")
        return make_evaluation(result, (scores > 0).long(), labels.long(), groups, AUC=area)

    return make_training(
        NAME,
        BuiltInTrainingOptions(steps, batch, optimizer, rate, dropout, amp, device),
        rows=data.training_row_count,
        take=take,
        settings={"data": data.hash},
        model=build,
        loss=loss,
        evaluate=evaluate,
        info={
            "description": "DLRM click prediction, dot interaction",
            "data": data.description,
            "citation": "Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091",
        },
    )


def has_rare_category(data: Clicks, rows: slice) -> Bools:
    """Whether each row has a rare category in any table.

    Rare: fewer than `RARE` training rows have it.
    """
    array = np.zeros(len(data.labels[rows]), np.bool_)
    for i, size in enumerate(data.tables):
        met = np.bincount(data.sparse[: data.training_row_count, i].numpy(), minlength=size)
        array |= met[data.sparse[rows, i].numpy()] < RARE
    return array
