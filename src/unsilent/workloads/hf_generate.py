"""Greedy generation with a transformers model, which gives the same tokens at every run.

The folder's settings for sampling, beams and penalties are ignored; only the numbers of its special tokens are used. A
sample ends with the end token of the model; the rest of its row is padding.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.workloads.model_fitting import check_option_range

SEQUENCES = "exact-sequence"
"""Judge of generated sequences."""
LONGEST = 100_000
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")


def prepare(ref: str, model: Any, tokens: int, length: int) -> int:
    """Set a model up to generate ``tokens`` tokens and return the largest allowed prompt length.

    A prompt has at most ``length`` tokens. Raises ``UsageError`` if the model cannot generate, or cannot generate so
    many tokens.
    """
    if not getattr(model, "can_generate", bool)():
        raise UsageError(
            f"workload {ref!r}: {type(model).__name__} cannot generate text; leave --with generate={tokens} out"
        )
    shared = getattr(model.config, "is_encoder_decoder", False)  # separate parts of the model take prompt and output
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = positions - 1 if isinstance(positions, int) else LONGEST
    check_option_range(
        ref, "generate", tokens, most, "new tokens; prompt and new tokens must fit into the model's positions"
    )
    transformers: Any = importlib.import_module("transformers")
    known = {name: getattr(model.generation_config, name, None) for name in SPECIAL}
    if known["pad_token_id"] is None:
        end = known["eos_token_id"]
        known["pad_token_id"] = end[0] if isinstance(end, (list, tuple)) else end
    model.generation_config = transformers.GenerationConfig(**known)
    return length if shared or not isinstance(positions, int) else min(length, positions - tokens)


def run_generate(model: Any, batch: Mapping[str, Tensor], tokens: int) -> Tensor:
    """The generated tokens without the prompt, int64 [n, at most ``tokens``]."""
    prompt = _Prompt()
    sequences: Tensor = model.generate(
        **batch, do_sample=False, num_beams=1, max_new_tokens=tokens, use_cache=True, logits_processor=[prompt]
    )
    return sequences[:, prompt.length :]


class _Prompt:
    """Hook of ``generate`` that measures the length of the prompt.

    It is measured because some models insert a token of their own.
    """

    def __init__(self) -> None:
        self.length = 0
        self._seen = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._seen:
            self.length, self._seen = input_ids.shape[1], True
        return scores
