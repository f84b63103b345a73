"""The deep learning recommendation model (DLRM): embedding tables, two MLPs and a dot interaction.

Architecture and module names (``bot_l``, ``emb_l``, ``top_l``) after Naumov et al., "Deep Learning Recommendation Model
for Personalization and Recommendation Systems", arXiv 1906.00091; own code.
Invariant: the sigmoid comes once, after the last layer of the top MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

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
    """Dense [n, m] and k tables' rows [n, m] each -> [n, m + k(k+1)/2].

    All dot products between two different ones of the k + 1 vectors (strict lower triangle), after the dense vector.
    """
    vectors = torch.stack([dense, *embedded], 1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    return torch.cat([dense, products[:, rows, columns]], 1)


class Dlrm(nn.Module):
    """Dense features [n, d] and one category index per table int64 [n, k] -> click probability [n].

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
