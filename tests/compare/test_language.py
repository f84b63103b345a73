"""Measures of language models, against loops, and greedy runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.compare.language import first_differences
from unsilent.compare.tokens import are_next_tokens, tokens_of

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


class Summing(Model):
    """Scores from all tokens so far, so that tokens of padding change the scores at padding."""

    def forward(self, input_ids, attention_mask=None):
        return torch.cumsum(self.table[input_ids], 1) + self.shift


def padded(lengths):
    """Texts padded on the right with the token 0."""
    mask = (torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": texts(len(lengths)) * mask, "attention_mask": mask}


def test_texts_padded_on_the_right_are_judged_at_their_last_real_token():
    original, deployed, lengths = Summing(), Summing(extra=6.0), [2, 3, 4, 5, 6, 7, 8, 2, 3, 4]
    batch = padded(lengths)
    labels = [torch.arange(len(lengths)) % VOCABULARY]
    with torch.no_grad():
        rows = [
            torch.stack([model(batch["input_ids"])[i, k - 1] for i, k in enumerate(lengths)])
            for model in (original, deployed)
        ]
        at_padding = [model(batch["input_ids"])[:, -1].argmax(-1) for model in (original, deployed)]
    expected = rows[0].argmax(1) != rows[1].argmax(1)
    assert expected.tolist() != (at_padding[0] != at_padding[1]).tolist()
    found = unsilent.compare_models(original, deployed, [batch], labels=labels).records
    assert found.changed.tolist() == expected.tolist()
    assert found.right_before.tolist() == (rows[0].argmax(1) == labels[0]).tolist()
    p, q = (torch.log_softmax(x.double(), 1) for x in rows)
    np.testing.assert_allclose(found.kl, (p.exp() * (p - q)).sum(1), rtol=1e-5)


def test_the_headline_says_that_one_position_of_each_text_is_judged():
    changed = unsilent.compare_models(Model(), Model(extra=1.0), [texts()]).report()
    same = unsilent.compare_models(Model(), Model(), [texts()]).report()
    for report in (changed, same):
        assert report.headline.startswith("At the last position only: ")


class Tagger(nn.Module):
    """Scores of 5 classes for each token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, 5, generator=torch.Generator().manual_seed(seed)))

    def forward(self, input_ids, attention_mask=None):
        return self.table[input_ids]


def test_a_classifier_of_tokens_is_compared_at_each_token():
    few, many = torch.arange(12).view(2, 6) % 4, 5 + torch.arange(24).view(4, 6)
    found = unsilent.compare_models(Tagger(), Tagger(1), [few, many])
    assert (found.language, found.judge) == (None, "exact-sequence")
    with torch.no_grad():
        classes = [torch.cat([model(few), model(many)]).argmax(-1) for model in (Tagger(), Tagger(1))]
    assert found.records.changed.tolist() == (classes[0] != classes[1]).any(1).tolist()
    given = unsilent.compare_models(Tagger(), Tagger(1), [few, many], judge="next-token")
    assert given.language is None
    assert given.records.changed.tolist() == (classes[0] != classes[1])[:, -1].tolist()


def test_padding_of_a_classifier_of_tokens_does_not_count():
    other = Tagger()
    other.table.data[0].neg_()  # the token of padding alone
    batch = padded([3, 4, 5])
    batch["input_ids"] = batch["input_ids"] + 20 * batch["attention_mask"]
    found = unsilent.compare_models(Tagger(), other, [batch])
    assert not found.records.changed.any()


class OfOneLength(Model):
    """Reads texts of one length only."""

    def forward(self, input_ids):
        return super().forward(input_ids) + torch.zeros(LENGTH, 1)[None]


@pytest.mark.parametrize("other", [Model(extra=1.0), OfOneLength(extra=1.0)])
def test_models_of_texts_of_one_length_have_no_greedy_runs(other):
    for pair in ((OfOneLength(), other), (other, OfOneLength())):
        found = unsilent.compare_models(*pair, [texts()])
        assert found.language.greedy is None
        assert found.language.positions == 6 * LENGTH
        assert any(line.startswith("greedy runs were left out: a model cannot") for line in found.report().notes)


def test_perplexity_ratio_is_that_of_the_two_perplexities():
    """Texts of different lengths: each token counts alike."""
    batch = padded([2, 3, 4, 5, 6, 7, 8, 2, 3, 4])
    found = unsilent.compare_models(Model(), Model(extra=1.0), [batch]).language
    before, after = found.perplexities
    ratio = found.perplexity_ratio(0.95)
    assert ratio.estimate == pytest.approx(after / before, rel=1e-12)
    gaps = np.array([(one.loss_after - one.loss_before).sum() for one in found.sequences])
    lengths = np.array([len(one.loss_before) for one in found.sequences])
    n, middle = len(gaps), gaps.sum() / lengths.sum()
    spread = math.sqrt(n / (n - 1) * sum((g - middle * k) ** 2 for g, k in zip(gaps, lengths, strict=True)))
    wide = 2.2621571628 * spread / lengths.sum()  # Student's t with 9 degrees of freedom
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(middle - wide), math.exp(middle + wide)))


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
    assert are_next_tokens([texts(), texts()], scores)
    assert not are_next_tokens([texts(), texts() + 1], scores)
    assert not are_next_tokens([texts()], scores[:, :3])


def test_the_report_names_them():
    report = unsilent.compare_models(Model(), Model(extra=1.0), [texts()]).report()
    names = {name for name, _, _ in report.numbers}
    assert {"perplexity ratio", "mean KL of a token", "99.9 % quantile of KL"} <= names
    assert any("same most likely token at" in line for line in report.findings)
    assert any("Greedy runs of 4 tokens differ for" in line for line in report.findings)
