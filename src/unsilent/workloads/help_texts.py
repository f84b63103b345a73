"""The help texts of Python as training text of the character models.

They are the topics of ``pydoc_data.topics``, so nothing is downloaded. They differ between Python versions; their hash is part of
the cache key.

Invariants: no held-out paragraph occurs in the training text; unknown characters share one token. Clean inputs for
detectors come from held-out paragraphs that are not evaluated; unusual clean inputs are Python code.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unsilent.basics.errors import UsageError
from unsilent.workloads.base import SHIFTED, TEST
from unsilent.workloads.cache import digest_of_parts
from unsilent.workloads.clean_inputs import CleanInputs

CONTEXT = 64
"""Number of characters in the context of a model."""
DESCRIPTION = "help topics of this Python version (pydoc_data.topics), every tenth paragraph held out"
CITATION = "Python Software Foundation, The Python Language Reference (PSF licence)"
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
"""Known characters; all others are token ``len(ALPHABET)``. The alphabet is fixed, so that the shape of the model is
fixed too.
"""


class Text(NamedTuple):
    """The help texts as token ids int64, divided into training and held-out text."""

    train: Tensor
    test: Tensor
    hash: str


@cache
def load_help_texts() -> Text:
    """The help texts as token ids.

    They are read once per process and must not be written to. Topics quote each other, so each paragraph is taken once;
    every tenth is held out.
    """
    from pydoc_data.topics import topics

    everything = (p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
    paragraphs = list(dict.fromkeys(filter(None, everything)))
    known = [p for i, p in enumerate(paragraphs) if i % 10 != 5]
    train, test = encode("\n\n".join(known)), encode("\n\n".join(paragraphs[5::10]))
    return Text(train, test, digest_of_parts(train.numpy().tobytes(), test.numpy().tobytes()))


def encode(characters: str) -> Tensor:
    """The token ids of some characters, int64 [len(characters)]."""
    table = np.full(0x110000, len(ALPHABET), np.int64)
    table[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))
    return torch.from_numpy(table[np.frombuffer(characters.encode("utf-32-le"), np.uint32)])


BLOCK = 2 * CONTEXT
"""Number of characters in an original of `clean_contexts`; its copies are contexts that begin at different places in
it.
"""


@cache
def python_code() -> Tensor:
    """Token ids of Python source, namely the module ``argparse``, which differs in kind from the help texts."""
    try:
        return encode(inspect.getsource(argparse))
    except OSError:
        raise UsageError(
            "this Python has no source of its module argparse, of which clean inputs 'shifted' are made; "
            "install Python with its library's .py files"
        ) from None


def clean_contexts(name: str, evaluated: Tensor) -> CleanInputs:
    """Clean inputs for a model of the help texts, 32 per batch.

    ``evaluated`` int64 [n, 64] are the contexts that the model is evaluated on.
    """

    @cache
    def originals(part: str) -> Tensor:
        if part == SHIFTED:
            return _new_blocks(python_code(), evaluated)
        return _new_blocks(load_help_texts().test, evaluated)[int(part == TEST) :: 2]

    def make(part: str, original: int, copies: int) -> Tensor:
        return _contexts_of_block(python_code() if part == SHIFTED else load_help_texts().test, original)[:copies]

    return CleanInputs(name, originals, make, batch=32)


def _contexts_of_block(text: Tensor, block: int) -> Tensor:
    """The contexts of one block, int64 [17, 64], which begin at the multiples of 4 up to 64.

    They are ordered so that the first few overlap little.
    """
    starts = BLOCK * block + 4 * (7 * torch.arange(CONTEXT // 4 + 1) % (CONTEXT // 4 + 1))
    return text[starts[:, None] + torch.arange(CONTEXT)]


def _new_blocks(text: Tensor, evaluated: Tensor) -> Tensor:
    """Numbers int64 of the blocks in which all contexts are new.

    A new context is neither evaluated, nor in an earlier block, nor in the training text. This matters because lines of
    tables and of blanks occur several times.
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


def held_out_contexts() -> tuple[Tensor, Tensor]:
    """All contexts of the held-out text and, for each position, the next character.

    Both are [n, 64].
    """
    test = load_help_texts().test
    count = (len(test) - 1) // CONTEXT * CONTEXT
    return test[:count].view(-1, CONTEXT), test[1 : count + 1].view(-1, CONTEXT)


def loss(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions, for scores [n, t, 97] and targets int64 [n, t]."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def log_likelihood(scores_of: Callable[[Any], Tensor], output: Any, windows: Tensor) -> Tensor:
    """Mean log-likelihood of each context in nats, without its first character: float64[n]."""
    likelihoods = scores_of(output)[:, :-1].double().log_softmax(-1)
    return likelihoods.gather(2, windows[:, 1:, None]).squeeze(2).mean(1)


def unigram_cross_entropy() -> float:
    """Mean cross entropy, in nats, of the held-out text under the character frequencies of the training text."""
    data = load_help_texts()
    counts = torch.bincount(data.train, minlength=len(ALPHABET) + 1).double() + 1
    return float(-(counts / counts.sum()).log()[data.test].mean())
