"""Where tokens are padding, and what models answer there."""

from __future__ import annotations

import torch

from unsilent.compare.tokens import real_positions, scores_at_tokens, with_tokens, without_padding
from unsilent.outcomes import judge

TOKENS = torch.tensor([[5, 6, 0], [0, 7, 8], [1, 2, 3]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
SCORES = torch.arange(36.0).view(3, 3, 4)


def test_next_tokens_are_judged_at_the_last_real_token_also_with_padding_on_the_left():
    read = without_padding(judge("next-token"), SCORES, {"input_ids": TOKENS, "attention_mask": MASK})
    assert torch.equal(read, torch.stack([SCORES[0, 1], SCORES[1, 2], SCORES[2, 2]])[:, None])


def test_outputs_without_padding_are_read_as_they_are():
    for batch in (TOKENS, {"input_ids": TOKENS}, {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}):
        assert without_padding(judge("next-token"), SCORES, batch) is SCORES
    batch = {"input_ids": TOKENS, "attention_mask": MASK}
    assert without_padding(judge("next-token"), SCORES[:, :2], batch).shape == (3, 2, 4)  # no scores of these tokens
    assert without_padding(judge("tolerance"), SCORES, batch) is SCORES


def test_the_mask_is_that_of_the_tokens_that_are_answered():
    batch = {"input_ids": TOKENS[:, :2], "attention_mask": MASK[:, :2], "decoder_input_ids": TOKENS}
    assert real_positions(batch, TOKENS).all()
    batch["decoder_attention_mask"] = MASK
    assert torch.equal(real_positions(batch, TOKENS), MASK.bool())
    assert scores_at_tokens(SCORES, batch).shape == (7, 4)
    longer = with_tokens(batch, torch.ones(3, 5, dtype=torch.int64))
    assert longer["decoder_input_ids"].shape == longer["decoder_attention_mask"].shape == (3, 5)
    assert torch.equal(longer["attention_mask"], MASK[:, :2])
