"""Measures of language models, against loops, and greedy runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.compare.language import first_differences, tokens_of

VOCABULARY, LENGTH = 11, 8


class Model(nn.Module):
    """Scores of the next token from the last two: [n, t] -> [n, t, 11]."""

    def __init__(self, seed: int = 0, extra: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.shift = nn.Parameter(extra * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(9)))

    def forward(self, input_ids, attention_mask=None):
        return self.table[input_ids] + self.shift


def texts(n: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(3))


def test_all_measures_are_what_loops_count():
    original, deployed = Model(), Model(extra=1.0)
    found = unsilent.compare_models(original, deployed, [texts()]).language
    kl, same, lost, gained, losses = [], 0, 0, 0, []
    with torch.no_grad():
        for row in texts():
            p, q = (torch.log_softmax(m(row[None])[0].double(), -1) for m in (original, deployed))
            for i in range(LENGTH):
                kl.append(float((p[i].exp() * (p[i] - q[i])).sum()))
                same += int(p[i].argmax() == q[i].argmax())
                if i + 1 < LENGTH:
                    right = [int(x[i].argmax()) == int(row[i + 1]) for x in (p, q)]
                    lost, gained = lost + (right[0] and not right[1]), gained + (right[1] and not right[0])
                    losses.append([-float(x[i, row[i + 1]]) for x in (p, q)])
    np.testing.assert_allclose(found.kl, kl, rtol=1e-5)
    shares = found.shares(0.95)
    assert shares["same top-1 token"].estimate == pytest.approx(same / 48)
    assert shares["lost next token"].estimate == pytest.approx(lost / 42)
    assert shares["gained next token"].estimate == pytest.approx(gained / 42)
    assert found.perplexities == pytest.approx(tuple(math.exp(x) for x in np.mean(losses, 0)), rel=1e-5)
    ratio = found.perplexity_ratio(0.95)
    assert ratio.estimate == pytest.approx(found.perplexities[1] / found.perplexities[0])
    assert ratio.low < ratio.estimate < ratio.high
    assert ratio.n == 6


def test_greedy_runs_name_the_first_token_that_differs():
    original, deployed = Model(), Model(extra=1.0)
    found = unsilent.compare_models(original, deployed, [{"input_ids": texts()}]).language.greedy
    expected = []
    with torch.no_grad():
        for row in texts():
            runs = []
            for model in (original, deployed):
                read = row[: LENGTH // 2]
                while len(read) < LENGTH:
                    read = torch.cat([read, model(read[None])[0, -1].argmax()[None]])
                runs.append(read[LENGTH // 2 :])
            differ = (runs[0] != runs[1]).nonzero()
            expected += [int(differ[0])] if len(differ) else []
    assert (found.prompts, found.tokens, found.first_differences) == (6, 4, tuple(expected))
    assert len(expected) > 0
    assert unsilent.compare_models(original, Model(), [texts()]).language.greedy.first_differences == ()


def test_padding_does_not_count_and_is_not_continued():
    mask = torch.ones_like(texts())
    mask[:, 5:] = 0
    found = unsilent.compare_models(
        Model(), Model(extra=1.0), [{"input_ids": texts(), "attention_mask": mask}]
    ).language
    assert (found.positions, found.greedy) == (6 * 5, None)
    short = unsilent.compare_models(Model(), Model(extra=1.0), [{"input_ids": texts()[:, :5]}]).language
    np.testing.assert_array_equal(found.kl, short.kl)


def test_generated_tokens_differ_from_where_one_ends():
    long = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 2, 3]])
    assert first_differences(long, long).first_differences == ()
    found = first_differences(long, torch.tensor([[1, 2], [1, 9], [5, 2]]))
    assert (found.prompts, found.tokens, found.first_differences) == (3, 3, (2, 1, 0))


def test_only_scores_of_the_tokens_that_were_read_make_a_language_model():
    scores = torch.zeros(6, LENGTH, VOCABULARY)
    assert tokens_of(texts(), scores) is not None
    assert tokens_of({"input_ids": texts()}, {"logits": scores}) is not None
    assert tokens_of(texts(), scores[:, 0]) is None
    assert tokens_of(texts(), scores[:, :3]) is None
    assert tokens_of(texts().float(), scores) is None
    assert tokens_of({"pixels": texts()}, scores) is None


def test_the_report_names_them():
    report = unsilent.compare_models(Model(), Model(extra=1.0), [texts()]).report()
    names = {name for name, _, _ in report.numbers}
    assert {"perplexity ratio", "mean KL of a token", "99.9 % quantile of KL"} <= names
    assert any("same most likely token at" in line for line in report.findings)
    assert any("Greedy runs of 4 tokens differ for" in line for line in report.findings)
