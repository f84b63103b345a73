"""`llama-chars`: a small Llama of transformers on the help texts that ship with Python; see `help_texts`.

Architecture: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (arXiv 2302.13971), as ``LlamaForCausalLM``
implements it: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases. Built from its configuration; nothing is
downloaded.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.workloads.base import Workload
from unsilent.workloads.help_texts import (
    ALPHABET,
    CONTEXT,
    CharacterModel,
    character_workload,
    loss,
    unigram_cross_entropy,
)
from unsilent.workloads.model_fitting import Goal, Progress, no_progress

NAME = "llama-chars"
HEADS = 4


def character_llama(name: str, width: int, depth: int, key_value_heads: int = HEADS) -> nn.Module:
    """A ``LlamaForCausalLM`` with fresh weights: token ids int64 [n, t], t <= 64 -> an output with ``logits`` [n, t, 97].

    Raises:
        UsageError: transformers is not installed; ``name`` is the workload that needs it.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise UsageError(f"workload {name!r} needs transformers; pip install 'unsilent[transformers]'") from None
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET) + 1, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=depth,
        num_attention_heads=HEADS, num_key_value_heads=key_value_heads, max_position_embeddings=CONTEXT, use_cache=False,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _logits(output: Any) -> Tensor:
    scores: Tensor = output.logits
    return scores


def _saved_entropy(model: nn.Module, windows: Tensor, following: Tensor) -> float:
    with torch.no_grad():
        scores = torch.cat([_logits(model(part)) for part in windows.split(64)])
    return 1 - float(loss(scores, following)) / unigram_cross_entropy()


MODEL = CharacterModel(
    name=NAME,
    version=1,
    description="character Llama of transformers, grouped-query attention, contexts of 64 characters",
    build=lambda: character_llama(NAME, 64, 3, HEADS // 2),
    components={
        "embedding": "model.embed_tokens.*",
        "attention": "model.layers.*.self_attn.*",
        "mlp": "model.layers.*.mlp.*",
        "norm": ("model.layers.*layernorm.*", "model.norm.*"),
        "head": "lm_head.*",
    },
    goal=Goal("share of the unigram cross-entropy saved", 0.30),
    score=_saved_entropy,
    scores_of=_logits,
)


def llama_chars(*, eval: int = 32, seed: int = 0, progress: Progress = no_progress) -> Workload:  # noqa: A002 - option name
    """The trained model on ``eval`` held-out contexts [eval, 64]; its answer is the most likely next character."""
    return character_workload(MODEL, eval, seed, progress)
