"""Converts reports in words to vectors, from weighted counts of words and groups of characters.

Numbers and dotted names are masked: the rank or layer that a report mentions is a feature of that candidate only.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unsilent.detectors.series import Floats

COLUMNS = 2**11
"""Number of columns that words are hashed to."""
DIRECTIONS = 16
CHARACTERS = 4
"""Number of characters in a group. Groups still match if a word has a typing error."""
_NUMBER, _DOTTED = re.compile(r"\d[\d.,:e+-]*"), re.compile(r"\w+(?:[./]\w+)+")


def tokens(text: str) -> list[str]:
    """Masked words, pairs of words, and groups of characters in a text."""
    words = re.findall(r"[^\W\d_]+|[#@]", _NUMBER.sub("#", _DOTTED.sub("@", text.lower())))
    pairs = [f"{word} {after}" for word, after in itertools.pairwise(words)]
    padded = [f"<{word}>" for word in words]
    groups = [word[at : at + CHARACTERS] for word in padded for at in range(len(word) - CHARACTERS + 1)]
    return words + pairs + [f"~{group}" for group in groups]


def _counts(texts: Sequence[str]) -> Floats:
    result = np.zeros((len(texts), COLUMNS))
    for row, text in enumerate(texts):
        for token in tokens(text):
            result[row, zlib.crc32(token.encode()) % COLUMNS] += 1
    return np.log1p(result)


@dataclass(frozen=True, eq=False)
class Words:
    """Weights and directions that convert texts to vectors.

    Attributes:
        weights: float64[`COLUMNS`], the rarer the larger.
        directions: float64[`DIRECTIONS`, `COLUMNS`], the directions in which the fitted texts differ most.
    """

    weights: Floats
    directions: Floats

    def vectors(self, texts: Sequence[str]) -> Floats:
        """A vector for each text, float64[n, `DIRECTIONS`], with zeros for a text without words."""
        return _unit(_counts(texts) * self.weights) @ self.directions.T


def fit_words(texts: Sequence[str]) -> Words:
    """Weights by inverse frequency and directions by singular vectors, fitted to the texts."""
    counts = _counts(texts)
    weights = np.log((1 + len(texts)) / (1 + (counts > 0).sum(0))) + 1
    _, sizes, directions_found = np.linalg.svd(_unit(counts * weights), full_matrices=False)
    directions = np.zeros((DIRECTIONS, COLUMNS))
    kept_directions = directions_found[: int((sizes[:DIRECTIONS] > 1e-9).sum())]
    directions[: len(kept_directions)] = kept_directions
    return Words(weights, directions)


def _unit(rows: Floats) -> Floats:
    result: Floats = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return result
