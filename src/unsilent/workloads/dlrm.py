"""`dlrm`: click prediction with embedding tables and MLPs, the model of the PVF paper's first case study.

Trained on teacher-labelled synthetic clicks, or on a CSV file. The answer to a request is "click" if the predicted
probability reaches ``threshold``. For the synthetic data, whose labels are balanced, the default is 0.5. For a CSV the
default is the share of positives among the training rows: with rare positives and a threshold of 0.5, nearly every
answer would be "no" and faults would seem harmless. Both are stated in ``info``.

Architecture and module names of `Dlrm` (``bot_l``, ``emb_l``, ``top_l``) after Naumov et al., "Deep Learning Recommendation Model
for Personalization and Recommendation Systems", arXiv 1906.00091; own code.
Invariant: the sigmoid is applied once, after the last layer of the top MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from unsilent.basics.errors import UsageError
from unsilent.workloads.base import CLEAN_PARTS, SHIFTED, CleanSource, Workload
from unsilent.workloads.cache import TrainedWeightsRecipe, load_or_train
from unsilent.workloads.clean_inputs import CleanInputs, split_originals
from unsilent.workloads.click_csv import ROOM, from_csv
from unsilent.workloads.clicks import POPULARITY, Clicks, more_synthetic_requests, synthetic_clicks
from unsilent.workloads.model_fitting import (
    Goal,
    Progress,
    Schedule,
    auc,
    check_option_range,
    fit,
    no_progress,
    outputs,
    parameter_count,
)

WIDTH = 16
"""Width of an embedding row and of the bottom MLP's output."""
COMPONENTS = {"embedding": ("emb_l.*",), "bottom_mlp": ("bot_l.*",), "top_mlp": ("top_l.*",)}


def mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them and ``last`` at the end."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layer = nn.Linear(before, after)
        nn.init.normal_(layer.weight, std=(2 / (before + after)) ** 0.5)
        nn.init.normal_(layer.bias, std=(1 / after) ** 0.5)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


def embedding_table(rows: int) -> nn.EmbeddingBag:
    """One embedding table that adds up the rows looked up for a sample."""
    bag = nn.EmbeddingBag(rows, WIDTH, mode="sum")
    nn.init.uniform_(bag.weight, -((1 / rows) ** 0.5), (1 / rows) ** 0.5)
    return bag


def interact(dense: Tensor, embedded: Sequence[Tensor]) -> Tensor:
    """The interaction of dense features [n, m] with k embeddings [n, m] each: [n, m + k(k+1)/2].

    The dense vector, followed by the dot products of all pairs of the k + 1 vectors (strict lower triangle).
    """
    vectors = torch.stack([dense, *embedded], 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    return torch.cat([dense, products[:, rows, columns]], 1)


class Dlrm(nn.Module):
    """A DLRM: dense features [n, d] and table indices int64 [n, k] -> click probability [n].

    Args:
        dense: Number of dense features d.
        tables: Number of rows of each of the k embedding tables.
    """

    def __init__(self, dense: int, tables: Sequence[int]) -> None:
        super().__init__()
        self.bot_l = mlp([dense, 64, 32, WIDTH], nn.ReLU())
        self.emb_l = nn.ModuleList(embedding_table(rows) for rows in tables)
        self.top_l = mlp([WIDTH + len(tables) * (len(tables) + 1) // 2, 64, 32, 1], nn.Sigmoid())

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        embedded = [bag(sparse[:, i : i + 1]) for i, bag in enumerate(self.emb_l)]
        out: Tensor = self.top_l(interact(self.bot_l(dense), embedded)).squeeze(1)
        return out


# The dense features of unusual requests are 1.5 times as far from their mean. Synthetic unusual requests contain rare
# categories more often; those of a CSV combine categories of different rows.

BATCH = 512
SPREAD = 1.5
"""Factor on the dense features of unusual requests."""
FLATTER = 0.7
"""Exponent of Zipf's law for the categories of unusual requests."""
LARGEST = 10.0
"""Largest distance of a dense feature of a CSV from its mean, in standard deviations."""


def clean_requests(clicks: Clicks, first_free: int) -> CleanSource:
    """A source of clean requests, for the argument ``clean`` of the workload.

    Rows from ``first_free`` on are neither trained on nor evaluated.
    """
    return _further_requests if clicks.by_popularity else _held_out_requests(clicks, first_free)


def _further_requests(part: str, samples: int) -> list[dict[str, Tensor]]:
    """Batches of new synthetic requests with ``samples`` requests in total."""
    popularity, spread = (FLATTER, SPREAD) if part == SHIFTED else (POPULARITY, 1.0)
    batches = []
    for start in range(0, samples, BATCH):
        seed = CLEAN_PARTS.index(part), start
        dense, sparse = more_synthetic_requests(seed, BATCH, popularity=popularity, spread=spread)
        count = min(BATCH, samples - start)
        batches.append({"dense": dense[:count].clone(), "sparse": sparse[:count].clone()})
    return batches


def _held_out_requests(clicks: Clicks, first_free: int) -> CleanInputs:
    originals = split_originals(range(first_free, len(clicks.labels)))

    def make(part: str, original: int, copies: int) -> dict[str, Tensor]:
        row = slice(original, original + 1)
        if part != SHIFTED:
            return {"dense": clicks.dense[row], "sparse": clicks.sparse[row]}
        tables = len(clicks.tables)
        others = np.random.default_rng(original).choice(originals[SHIFTED].numpy(), tables)
        dense = (SPREAD * clicks.dense[row]).clamp(-LARGEST, LARGEST)
        return {"dense": dense, "sparse": clicks.sparse[torch.from_numpy(others), torch.arange(tables)][None]}

    return CleanInputs("dlrm", originals.__getitem__, make, batch=BATCH, most_copies=1)


NAME = "dlrm"
VERSION = 1
GOAL = Goal("AUC", 0.78)
OWN_DATA_GOAL = Goal("AUC", 0.55, "the columns hardly predict the target; check target= and drop=", UsageError)
SCHEDULE = Schedule(epochs=1, batch=256, rate=0.005, decay=0.0)
"""One pass over the data, as is usual for DLRM: a second pass would overfit the rows of rare categories."""
FEWEST_STEPS = 400
"""Approximate minimum number of steps; a smaller data set is passed over several times."""
MOST_ROWS = 10_000
CITATION = "Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091"


# Long because the options of a CSV are checked together, and because of the entries of ``info``.
def dlrm(
    *,
    eval: int | None = None,  # noqa: A002 - option name
    threshold: float | None = None,
    target: str = "",
    positive: str = "",
    drop: tuple[str, ...] = (),
    rows: int = MOST_ROWS,
    room: int = ROOM,
    seed: int = 0,
    data: str | None = None,
    progress: Progress = no_progress,
) -> Workload:
    """The workload of a trained DLRM on ``eval`` held-out rows.

    The inputs are ``dense`` float32 [eval, d] and ``sparse`` int64 [eval, k].

    Args:
        eval: Number of held-out rows; default: 512, or all if there are fewer.
        threshold: Click probability from which the answer is yes, strictly between 0 and 1; for the default see the
            module.
        target, positive, drop, rows, room: How to read ``data``; see `click_csv.from_csv`.
        data: CSV file of the user.
    """
    if data is None and (target or positive or drop or (rows, room) != (MOST_ROWS, ROOM)):
        raise UsageError(
            f"workload {NAME!r}: options target, positive, drop, rows and room describe a CSV; give --data FILE.csv"
        )
    check_option_range(NAME, "rows", rows, 10_000_000, "rows of a table")
    check_option_range(NAME, "room", room, 1000, "rows per category")
    if data is None:
        clicks = synthetic_clicks()
    else:
        clicks = from_csv(data, target=target, positive=positive, drop=drop, rows=rows, room=room)
    available = len(clicks.labels) - clicks.training_row_count
    samples = min(512, available) if eval is None else eval
    check_option_range(NAME, "eval", samples, available, "held-out rows")
    rate = round(float(clicks.labels[: clicks.training_row_count].double().mean()), 3)
    at = threshold if threshold is not None else 0.5 if data is None else rate
    if not 0 < at < 1:
        raise UsageError(f"workload {NAME!r}: option 'threshold' is {at:g}; expected a probability between 0 and 1")
    recipe = TrainedWeightsRecipe(NAME, VERSION, {"seed": seed}, clicks.hash)
    build = partial(Dlrm, clicks.dense.shape[1], clicks.tables)
    train = partial(_train, clicks=clicks, seed=seed, progress=progress)
    model, score = load_or_train(recipe, build, train, GOAL if data is None else OWN_DATA_GOAL, seed=seed)
    held_out = slice(clicks.training_row_count, clicks.training_row_count + samples)
    return Workload(
        model,
        [{"dense": clicks.dense[held_out].clone(), "sparse": clicks.sparse[held_out].clone()}],
        labels=[clicks.labels[held_out]],
        judge=f"threshold:at={at:g}",
        name=NAME,
        components=COMPONENTS,
        clean=clean_requests(clicks, held_out.stop),
        info={
            "description": "DLRM click prediction, dot interaction",
            "data": clicks.description,
            "accuracy": {"name": GOAL.metric, "value": score},
            "parameters": parameter_count(model),
            "samples": samples,
            "threshold": at,
            "positive_share": rate,
            "tables": list(clicks.tables),
            "citation": CITATION,
        },
    )


def _train(model: nn.Module, clicks: Clicks, seed: int, progress: Progress) -> float:
    """Train on the training rows and return the AUC on the held-out rows."""

    def sample(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"dense": clicks.dense[rows], "sparse": clicks.sparse[rows]}, clicks.labels[rows]

    count, description = clicks.training_row_count, f"training {NAME}"
    schedule = replace(SCHEDULE, epochs=max(1, min(10, FEWEST_STEPS * SCHEDULE.batch // count)))
    fit(model, sample, count, binary_cross_entropy, schedule, seed=seed, description=description, progress=progress)
    held_out = torch.arange(count, len(clicks.labels)).split(4096)
    scores = outputs(model, [sample(rows)[0] for rows in held_out])
    return auc(clicks.labels[count:].numpy(), scores.numpy())
