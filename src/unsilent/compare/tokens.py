"""Batches of token ids: their padding, and the scores at other positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unsilent.outcomes.base import Judge
from unsilent.outcomes.decision_judges import ExactSequence, NextToken, decision_tensor

_MASKS = {"decoder_input_ids": "decoder_attention_mask", "input_ids": "attention_mask"}
"""Names of token ids in a batch, and of their masks."""


def tokens_of(batch: Any, output: Any) -> Tensor | None:
    """The tokens int64 [n, t] of a batch if the output is scores [n, t, classes], otherwise None."""
    tokens = _token_ids(batch)
    if tokens is None or tokens.shape[1] < 2:
        return None
    scores = decision_tensor(output, NextToken(), 0)
    return tokens if scores.is_floating_point() and scores.ndim == 3 and scores.shape[:2] == tokens.shape else None


def are_next_tokens(batches: Iterable[Any], output: Any) -> bool:
    """Whether an output may be scores of next tokens.

    They are if there is a class for every token id in all batches. A token classifier, for example one that tags names, has only
    as many scores as classes.
    """
    token_rows = [_token_ids(batch) for batch in batches]
    if tokens_of(token_rows[0] if token_rows else None, output) is None:
        return False
    highest = max(int(tokens.max()) for tokens in token_rows if tokens is not None and tokens.numel())
    return highest < decision_tensor(output, NextToken(), 0).shape[2]


def real_positions(batch: Any, tokens: Tensor) -> Tensor:
    """Whether each position is not padding, by the mask of the batch, bool[n, t]."""
    name = _name(batch)
    mask = None if name is None else batch.get(_MASKS[name])
    fits = isinstance(mask, Tensor) and mask.shape == tokens.shape
    return mask.bool() if fits else torch.ones_like(tokens, dtype=torch.bool)  # type: ignore[union-attr]


def scores_at_tokens(scores: Tensor, batch: Any) -> Tensor:
    """Scores at the real tokens of a batch, [positions, k], or all scores without padding."""
    mask = _mask_of_real_positions(scores, batch)
    return scores if mask is None else scores[mask]


def without_padding(judge: Judge, output: Any, batch: Any) -> Any:
    """The output without scores at padding, for judges of tokens.

    For ``next-token``, only the scores of the last real token; for ``exact-sequence``, 0 at padding.
    """
    if not isinstance(judge, (NextToken, ExactSequence)):
        return output
    scores = decision_tensor(output, judge, judge.DIMENSIONS)
    if (mask := _mask_of_real_positions(scores, batch)) is None:
        return output
    if isinstance(judge, ExactSequence):
        return scores.masked_fill(~mask[:, :, None], 0)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return scores[torch.arange(len(scores), device=scores.device), last][:, None]


def with_tokens(batch: Any, tokens: Tensor) -> Any:
    """A copy of the batch with other tokens, none of which is padding."""
    name = _name(batch)
    if name is None:
        return tokens
    masks = {_MASKS[name]: torch.ones_like(tokens)} if _MASKS[name] in batch else {}
    return {**batch, name: tokens, **masks}


def _name(batch: Any) -> str | None:
    return next((name for name in _MASKS if name in batch), None) if isinstance(batch, Mapping) else None


def _token_ids(batch: Any) -> Tensor | None:
    """Token ids int64 [n, t] of a batch, or None if it has none."""
    name = _name(batch)
    tokens = batch if name is None else batch[name]
    return tokens if isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.ndim == 2 else None


def _mask_of_real_positions(scores: Tensor, batch: Any) -> Tensor | None:
    """Mask of the real positions if the scores [n, t, k] belong to a padded batch, otherwise None."""
    tokens = _token_ids(batch)
    if tokens is None or not scores.is_floating_point() or scores.ndim != 3 or scores.shape[:2] != tokens.shape:
        return None
    mask = real_positions(batch, tokens).to(scores.device)
    return None if bool(mask.all()) else mask
