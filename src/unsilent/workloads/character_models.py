"""`chargpt` and `llama-chars`: small language models trained on the help texts of Python; see `help_texts`.

`CharGpt` is a decoder-only transformer after Radford et al. (2019): causal scaled dot-product attention, pre-norm, learned
positions, and an output head tied to the token embedding. The other model follows Touvron et al., "LLaMA: Open and
Efficient Foundation Language Models" (arXiv 2302.13971), as ``LlamaForCausalLM`` of transformers implements it:
RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases. It is built from its configuration; nothing is
downloaded.

Invariant: a later token never changes the output at an earlier position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.outcomes.base import LOG_LIKELIHOOD
from unsilent.workloads.base import Workload
from unsilent.workloads.cache import TrainedWeightsRecipe, load_or_train
from unsilent.workloads.help_texts import (
    ALPHABET,
    CITATION,
    CONTEXT,
    DESCRIPTION,
    clean_contexts,
    held_out_contexts,
    load_help_texts,
    log_likelihood,
    loss,
    unigram_cross_entropy,
)
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.model_fitting import (
    FittedModel,
    Goal,
    Progress,
    Schedule,
    accuracy_of,
    check_option_range,
    fit,
    import_transformers,
    model_info,
    no_progress,
    outputs,
)

HEADS = 4
STEPS = 1600
SCHEDULE = Schedule(epochs=1, batch=8, rate=0.003, decay=0.05)


class CharGpt(nn.Module):
    """A small GPT: token ids int64 [n, t], t <= 64 -> scores of the next character [n, t, 97]."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, width)
        self.positions = nn.Parameter(torch.randn(1, CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET) + 1, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(hidden)))
        return out


def character_llama(name: str, width: int, depth: int, key_value_heads: int = HEADS) -> nn.Module:
    """A ``LlamaForCausalLM`` with untrained weights.

    Token ids int64 [n, t], t <= 64 -> an output with ``logits`` [n, t, 97].

    Raises:
        UsageError: transformers is not installed; ``name`` is the workload that needs it.
    """
    transformers = import_transformers(name)
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET) + 1, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=depth,
        num_attention_heads=HEADS, num_key_value_heads=key_value_heads, max_position_embeddings=CONTEXT, use_cache=False,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


@dataclass(frozen=True, kw_only=True)
class CharacterModel(FittedModel):
    """The specification of one character-model workload, with a model of token ids int64 [n, 64].

    Attributes:
        score: Function of the model, held-out contexts and the characters that follow; its value must reach ``goal``.
        scores_of: Function from the output of the model to the scores of the next character [n, 64, 97].
    """

    score: Callable[[nn.Module, Tensor, Tensor], float]
    scores_of: Callable[[Any], Tensor] = lambda output: output


def _accuracy(model: nn.Module, windows: Tensor, following: Tensor) -> float:
    return accuracy_of(outputs(model, list(windows.split(64))).argmax(2), following)


def _logits(output: Any) -> Tensor:
    scores: Tensor = output.logits
    return scores


def _saved_entropy(model: nn.Module, windows: Tensor, following: Tensor) -> float:
    with torch.no_grad():
        scores = torch.cat([_logits(model(part)) for part in windows.split(64)])
    return 1 - float(loss(scores, following)) / unigram_cross_entropy()


MODELS = {
    "chargpt": CharacterModel(
        version=1,
        description="character GPT, tied embedding and head, contexts of 64 characters",
        build=CharGpt,
        components={
            "embedding": ("embedding.*", "positions"),
            "attention": ("blocks.*.attention.*",),
            "mlp": ("blocks.*.mlp.*",),
            "norm": ("blocks.*.norm?.*", "norm.*"),
        },
        goal=Goal("next-character accuracy", 0.45),
        score=_accuracy,
    ),
    "llama-chars": CharacterModel(
        version=1,
        description="character Llama of transformers, grouped-query attention, contexts of 64 characters",
        build=lambda: character_llama("llama-chars", 64, 3, HEADS // 2),
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
    ),
}


def character_model(*, name: str, eval: int = 32, seed: int = 0, progress: Progress = no_progress) -> Workload:  # noqa: A002 - option name
    """The workload of a trained character model on ``eval`` held-out contexts [eval, 64].

    The answer of the model is the most likely next character.
    """
    spec, (windows, following) = MODELS[name], held_out_contexts()
    check_option_range(name, "eval", eval, len(windows), "held-out contexts")

    def train(model: nn.Module) -> float:
        _train_character_model(name, spec, model, seed, progress)
        return spec.score(model, windows, following)

    recipe = TrainedWeightsRecipe(name, spec.version, {"seed": seed}, load_help_texts().hash)
    model, reached = load_or_train(recipe, spec.build, train, spec.goal, seed=seed)
    rows = torch.linspace(0, len(windows) - 1, eval).long()
    evaluated = windows[rows]
    return Workload(
        model,
        [evaluated],
        labels=[following[rows, -1]],
        show=lambda window: "".join((*ALPHABET, "?")[token] for token in window[0].tolist()),
        judge="next-token",
        score=partial(log_likelihood, spec.scores_of),
        score_name=LOG_LIKELIHOOD,
        score_range=(-math.log(len(ALPHABET) + 1), 0.0),
        name=name,
        components=spec.components,
        clean=clean_contexts(name, evaluated),
        info=model_info(spec, DESCRIPTION, reached, model, eval, CITATION),
    )


def _train_character_model(name: str, spec: CharacterModel, model: nn.Module, seed: int, progress: Progress) -> None:
    """Train a character model in place; its input is token ids int64 [n, 64]."""
    text, offsets = load_help_texts().train, torch.arange(CONTEXT + 1)
    # One "epoch" over a seeded choice of starting points: the text has far more of them than are needed.
    starts = torch.randperm(len(text) - CONTEXT, generator=torch.Generator().manual_seed(seed))

    def sample(rows: Tensor) -> tuple[Tensor, Tensor]:
        window = text[starts[rows][:, None] + offsets]
        return window[:, :-1], window[:, 1:]

    def loss_of(output: Any, target: Tensor) -> Tensor:
        return loss(spec.scores_of(output), target)

    description = f"training {name}"
    fit(model, sample, STEPS * SCHEDULE.batch, loss_of, SCHEDULE, seed=seed, description=description, progress=progress)
