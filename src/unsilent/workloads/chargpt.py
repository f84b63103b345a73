"""`chargpt`: a small character-level GPT on the Python language reference.

A decoder-only transformer after Radford et al. (2019): causal scaled dot-product attention, pre-norm, learned
positions, and an output head tied to the token embedding. Text: ``pydoc_data.topics``, the help texts that ship with
Python, so nothing is downloaded; it differs between Python versions, and its hash is part of the cache key.

Invariants: no evaluated paragraph occurs in the training text; a later token never changes the output
at an earlier position; unknown characters share one token. Clean inputs for detectors come from the held-out paragraphs
that are not evaluated; the unusual ones are Python code.
"""

from __future__ import annotations

import argparse
import inspect
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unsilent.errors import UsageError
from unsilent.workloads.base import SHIFTED, TEST, Workload
from unsilent.workloads.cache import TrainedWeightsRecipe, digest_of_parts, load_or_train
from unsilent.workloads.clean_inputs import CleanInputs
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.model_fitting import (
    Goal,
    Progress,
    Schedule,
    accuracy_of,
    check_option_range,
    fit,
    no_progress,
    outputs,
    parameter_count,
)

VERSION = 1
GOAL = Goal("next-character accuracy", 0.45)
CONTEXT = 64
STEPS = 1600
SCHEDULE = Schedule(epochs=1, batch=8, rate=0.003, decay=0.05)
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
"""Known characters; all others are token ``len(ALPHABET)``. Fixed, so that the model's shape is, too."""


class Text(NamedTuple):
    """Token ids int64, for training and held out."""

    train: Tensor
    test: Tensor
    hash: str


@cache
def load_help_texts() -> Text:
    """The help texts as token ids; read once per process, never to be written to.

    Topics quote each other, so paragraphs are taken once each; every tenth is held out.
    """
    from pydoc_data.topics import topics

    everything = (p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
    paragraphs = list(dict.fromkeys(filter(None, everything)))
    known = [p for i, p in enumerate(paragraphs) if i % 10 != 5]
    train, test = encode("\n\n".join(known)), encode("\n\n".join(paragraphs[5::10]))
    return Text(train, test, digest_of_parts(train.numpy().tobytes(), test.numpy().tobytes()))


def encode(characters: str) -> Tensor:
    """Token ids int64 [len(characters)]."""
    table = np.full(0x110000, len(ALPHABET), np.int64)
    table[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))
    return torch.from_numpy(table[np.frombuffer(characters.encode("utf-32-le"), np.uint32)])


BLOCK = 2 * CONTEXT
"""Characters of an original of `clean_contexts`; its copies are contexts that begin at different places in it."""


@cache
def python_code() -> Tensor:
    """Token ids of a text of another kind than the help texts: the source of Python's own ``argparse`` module."""
    try:
        return encode(inspect.getsource(argparse))
    except OSError:
        raise UsageError(
            "this Python has no source of its module argparse, of which clean inputs 'shifted' are made; "
            "install Python with its library's .py files"
        ) from None


def clean_contexts(name: str, evaluated: Tensor) -> CleanInputs:
    """Clean inputs of a model of the help texts, of which ``evaluated`` int64 [n, 64] are evaluated; 32 per batch."""

    @cache
    def originals(part: str) -> Tensor:
        if part == SHIFTED:
            return _new_blocks(python_code(), evaluated)
        return _new_blocks(load_help_texts().test, evaluated)[int(part == TEST) :: 2]

    def make(part: str, original: int, copies: int) -> Tensor:
        return _contexts_of_block(python_code() if part == SHIFTED else load_help_texts().test, original)[:copies]

    return CleanInputs(name, originals, make, batch=32)


def _contexts_of_block(text: Tensor, block: int) -> Tensor:
    """Contexts int64 [17, 64] that begin at the multiples of 4 up to 64, in an order in which the first few overlap little."""
    starts = BLOCK * block + 4 * (7 * torch.arange(CONTEXT // 4 + 1) % (CONTEXT // 4 + 1))
    return text[starts[:, None] + torch.arange(CONTEXT)]


def _new_blocks(text: Tensor, evaluated: Tensor) -> Tensor:
    """Numbers int64 of those blocks of which no context is evaluated, in an earlier block, or in the training text.

    Lines of tables and of blanks occur several times.
    """
    training = _as_bytes(load_help_texts().train)
    seen, result = {_as_bytes(context) for context in evaluated}, []
    for block in range(len(text) // BLOCK):
        contexts = {_as_bytes(context) for context in _contexts_of_block(text, block)}
        if not contexts & seen and not any(context in training for context in contexts):
            result.append(block)
        seen |= contexts
    return torch.tensor(result, dtype=torch.int64)


def _as_bytes(tokens: Tensor) -> bytes:
    return tokens.to(torch.uint8).numpy().tobytes()


class CharGpt(nn.Module):
    """Token ids int64 [n, t], t <= 64 -> scores of the next character [n, t, 97]."""

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


COMPONENTS = {
    "embedding": ("embedding.*", "positions"),
    "attention": ("blocks.*.attention.*",),
    "mlp": ("blocks.*.mlp.*",),
    "norm": ("blocks.*.norm?.*", "norm.*"),
}


def loss(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions; scores [n, t, 97], target int64 [n, t]."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def chargpt(*, eval: int = 32, seed: int = 0, progress: Progress = no_progress) -> Workload:  # noqa: A002 - option name
    """The trained model on ``eval`` held-out contexts [eval, 64]; its answer is the most likely next character."""
    name = "chargpt"
    data = load_help_texts()
    windows = data.test[: (len(data.test) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    check_option_range(name, "eval", eval, len(windows), "held-out contexts")
    offsets = torch.arange(CONTEXT + 1)

    def sample(rows: Tensor) -> tuple[Tensor, Tensor]:
        window = data.train[rows[:, None] + offsets]
        return window[:, :-1], window[:, 1:]

    def train(model: nn.Module) -> float:
        # One "epoch" over a seeded choice of starting points: the text holds far more than are needed.
        starts = torch.randperm(len(data.train) - CONTEXT, generator=torch.Generator().manual_seed(seed))
        fit(
            model,
            lambda rows: sample(starts[rows]),
            STEPS * SCHEDULE.batch,
            loss,
            SCHEDULE,
            seed=seed,
            description=f"training {name}",
            progress=progress,
        )
        scores = outputs(model, list(windows.split(64)))
        following = data.test[1 : windows.numel() + 1].view(-1, CONTEXT)
        return accuracy_of(scores.argmax(2), following)

    model, accuracy = load_or_train(
        TrainedWeightsRecipe(name, VERSION, {"seed": seed}, data.hash), CharGpt, train, GOAL, seed=seed
    )
    picks = torch.linspace(0, len(windows) - 1, eval).long()
    return Workload(
        model,
        [windows[picks].clone()],
        judge="next-token",
        name=name,
        components=COMPONENTS,
        clean=clean_contexts(name, windows[picks]),
        info={
            "description": "character GPT, tied embedding and head, contexts of 64 characters",
            "data": "help topics of this Python version (pydoc_data.topics), every tenth paragraph held out",
            "accuracy": {"name": GOAL.metric, "value": accuracy},
            "parameters": parameter_count(model),
            "samples": eval,
            "citation": "Python Software Foundation, The Python Language Reference (PSF licence)",
        },
    )
