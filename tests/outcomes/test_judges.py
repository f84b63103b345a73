"""Judges against plain numpy, and the classes of outcomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unsilent import UsageError
from unsilent.outcomes import NUMERIC, Outcome, judge, judge_by_decision, judge_for_output
from unsilent.outcomes.classify import classify, sample_count


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def two(seed, *shape):
    rng = np.random.default_rng(seed)
    golden = rng.normal(size=shape)
    return golden, golden + rng.normal(size=shape) * rng.choice([0, 0.5], size=shape)


@given(st.integers(0, 10_000))
def test_top1_is_numpys(seed):
    g, f = two(seed, 6, 4)
    wrong, severity = judge("top1")(torch.tensor(g), torch.tensor(f), None)
    rows = np.arange(6)
    assert (wrong == (g.argmax(1) != f.argmax(1))).all()
    assert severity == pytest.approx(softmax(g)[rows, g.argmax(1)] - softmax(f)[rows, g.argmax(1)])


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_topk_compares_sets(seed, k):
    g, f = two(seed, 6, 5)
    wrong, severity = judge(f"topk:k={k}")(torch.tensor(g), torch.tensor(f), None)
    for i in range(6):
        mine, other = set(np.argsort(g[i])[-k:]), set(np.argsort(f[i])[-k:])
        assert wrong[i] == (mine != other)
        assert severity[i] == pytest.approx(1 - len(mine & other) / k)


@given(st.integers(0, 10_000), st.floats(0, 0.4))
def test_threshold_needs_a_crossing_and_a_move(seed, tolerance):
    g, f = two(seed, 9)
    wrong, severity = judge(f"threshold:at=0.1,tolerance={tolerance}")(
        torch.tensor(g)[:, None], torch.tensor(f)[:, None], None
    )
    assert (wrong == (((g >= 0.1) != (f >= 0.1)) & (abs(g - f) > tolerance))).all()
    assert severity == pytest.approx(abs(g - f))


def test_threshold_on_logits_uses_the_sigmoid():
    g, f = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 1.0])
    verdict = judge("threshold:logits=true")(g, f, None)
    assert verdict.incorrect.tolist() == [True, False]
    assert verdict.severity[0] == pytest.approx(1 / (1 + np.exp(-1)) - 1 / (1 + np.exp(1)))


def test_next_token_looks_at_the_last_position():
    g = torch.zeros(2, 3, 4)
    g[:, :, 1] = 1
    f = g.clone()
    f[0, 0, 2] = 9
    f[1, 2, 2] = 9
    assert judge("next-token")(g, f, None).incorrect.tolist() == [False, True]


def test_exact_sequence_counts_missing_tokens():
    g, f = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2], [4, 9]])
    wrong, severity = judge("exact-sequence")(g, f, None)
    assert wrong.tolist() == [True, True]
    assert severity == pytest.approx([1 / 3, 2 / 3])


def test_exact_sequence_of_logits_compares_choices():
    g = torch.eye(3)[None]
    assert judge("exact-sequence")(g, g * 2, None).incorrect.tolist() == [False]


@given(st.integers(0, 10_000))
def test_tolerance_is_allclose(seed):
    g, f = two(seed, 6, 3)
    f = g + (f - g) * 1e-3
    wrong, _ = judge("tolerance:rtol=1e-4,atol=1e-5")(torch.tensor(g), torch.tensor(f), None)
    assert (wrong == ~np.isclose(f, g, rtol=1e-4, atol=1e-5).all(1)).all()


def test_a_users_function_and_a_decision_are_judges():
    g, f = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [5.0]])
    assert judge(lambda a, b, batch: (a != b).flatten())(g, f, None).incorrect.tolist() == [False, True]
    assert judge(lambda a, b, batch: ((a != b).flatten(), (a - b).abs().flatten()))(g, f, None).severity.tolist() == [
        0,
        3,
    ]
    assert judge_by_decision(lambda out: out > 3)(g, f, None).incorrect.tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "output", "labels", "right"),
    [
        ("top1", [[0.1, 0.9], [0.1, 0.9]], [1, 0], [True, False]),
        ("topk:k=2", [[3.0, 2, 1], [3, 2, 1]], [1, 2], [True, False]),
        ("next-token", [[[9.0, 0], [0, 9]]], [1], [True]),
        ("threshold:at=0.6", [0.5, 0.7], [1, 1], [False, True]),
        ("threshold:logits=true", [-1.0, 1.0], [0, 0], [True, False]),
        ("exact-sequence", [[1, 2]], [1], None),
    ],
)
def test_answers_are_right_where_they_are_what_labels_say(text, output, labels, right):
    rule = judge(text)
    found = rule.is_right(rule.decision_rows(torch.tensor(output)).numpy(), np.array(labels))
    assert right is found is None or found.tolist() == right


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (torch.zeros(3, 4), "top1"),
        (torch.zeros(3, 4).long(), "exact-sequence"),
        (torch.zeros(3, 4, 5), NUMERIC),
        (torch.zeros(3, 4, 5).long(), "segmentation"),
        ([{"boxes": 1, "scores": 2, "labels": 3}], "detections"),
        ({"logits": torch.zeros(3, 4), "hidden": torch.zeros(1)}, "top1"),
        ([np.zeros((3, 1), np.float32)], NUMERIC),
    ],
)
def test_a_judge_follows_from_the_form_of_an_output(output, text):
    assert judge_for_output(output) == text


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("top1", torch.zeros(3), "does not fit an output of shape"),
        ("top1", torch.zeros(3, 1), "two or more classes"),
        ("top1", torch.zeros(3, 4, 5), "one row of class scores per sample"),
        ("topk:k=5", torch.zeros(3, 4), "k is 5, but the output has 4 classes"),
        ("topk:k=0", None, "expected 1 or more"),
        ("threshold", torch.zeros(3, 2), "one score per sample"),
        ("next-token", torch.zeros(3, 2), "needs 3 dimensions"),
        ("exact-sequence", torch.zeros(3, 4), "needs logits"),
        ("top1", "text", "needs a tensor"),
        ("top_1", None, "did you mean 'top1'"),
        ("topk:n=3", None, "unknown parameter of judge 'topk': 'n'"),
        ("topk:k=many", None, "expected a value of type int"),
    ],
)
def test_a_judge_that_does_not_fit_says_so_in_one_line(text, output, message):
    with pytest.raises(UsageError, match=message) as error:
        judge(text)(output, output, None)
    assert "\n" not in str(error.value)


def test_a_function_that_answers_wrongly_is_refused():
    with pytest.raises(UsageError, match="one value per sample"):
        judge(lambda g, f, b: torch.zeros(2, 2, dtype=torch.bool))(0, 0, None)


# -- classes of outcomes ---------------------------------------------------------------------------------------------


def outcomes(golden, faulty, text="top1", samples=None):
    got = classify(judge(text), golden, faulty, None, samples or len(golden))
    return [Outcome(c).name for c in got.codes]


def test_each_sample_gets_the_class_it_deserves():
    golden = torch.tensor([[2.0, 1.0]] * 5)
    faulty = torch.tensor([[2.0, 1.0], [2.5, 1.0], [0.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    assert outcomes(golden, faulty) == ["MASKED", "BENIGN", "SDC", "NONFINITE", "NONFINITE"]


def test_minus_zero_is_a_difference_and_an_equal_value_is_not():
    golden = torch.tensor([[0.0, 1.0], [0.5, 1.0]])
    faulty = torch.tensor([[-0.0, 1.0], [0.5, 1.0]])
    assert outcomes(golden, faulty) == ["BENIGN", "MASKED"]


def test_nonfinite_counts_anywhere_in_a_nested_output():
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]])
    extra = torch.zeros(2, 3)
    bad = extra.clone()
    bad[1, 2] = float("nan")
    assert outcomes({"logits": logits, "state": (extra,)}, {"logits": logits, "state": (bad,)}, samples=2) == [
        "MASKED",
        "NONFINITE",
    ]


def test_detections_are_judged_image_by_image():
    golden = [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(3, 4)}]
    faulty = [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(1, 4)}]
    count = judge_by_decision(lambda out: np.array([len(o["boxes"]) for o in out]))
    assert [Outcome(c).name for c in classify(count, golden, faulty, None, 2).codes] == ["MASKED", "SDC"]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_two_words_are_classified_as_their_bits_and_values_say(a, b):
    g = np.array([a], np.uint32).view(np.float32)
    f = np.array([b], np.uint32).view(np.float32)
    if not np.isfinite(g[0]):
        return
    got = outcomes(torch.from_numpy(g.copy()), torch.from_numpy(f.copy()), "tolerance:rtol=0,atol=0", 1)[0]
    expected = "MASKED" if a == b else "NONFINITE" if not np.isfinite(f[0]) else "BENIGN" if g[0] == f[0] else "SDC"
    assert got == expected


def test_a_judge_must_accept_the_golden_output():
    with pytest.raises(UsageError, match="must accept the golden output"):
        sample_count(judge(lambda g, f, b: torch.ones(3, dtype=torch.bool)), torch.zeros(3), None)


FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    *(getattr(torch, n) for n in dir(torch) if n.startswith("float8_")),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_users_judge_may_answer_in_any_dtype(dtype):
    amounts = [0.0, 0.5, 2.0]
    severity = torch.tensor(amounts).to(dtype)
    wanted = severity.double().tolist()  # float8_e8m0fnu has no zero
    assert dtype == torch.float8_e8m0fnu or wanted == amounts
    wrong = torch.tensor([False, True, True])
    for answer in (severity, severity.float().requires_grad_().to(dtype), list(severity), tuple(severity)):
        found = judge(lambda g, f, b, answer=answer: (wrong, answer))(None, None, None)
        assert found.incorrect.tolist() == [False, True, True]
        assert found.severity.dtype == np.float64
        assert found.severity.tolist() == wanted
    assert judge_by_decision(lambda out: out)(
        severity, torch.tensor(amounts[::-1]).to(dtype), None
    ).incorrect.tolist() == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("text", ["top1", "topk:k=2", "threshold:at=1", "next-token", "exact-sequence", "tolerance"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_outputs_may_have_any_dtype(text, dtype):
    shape = {"threshold:at=1": (4,), "next-token": (4, 2, 5), "exact-sequence": (4, 2, 5)}.get(text, (4, 5))
    g, f = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).exp().to(dtype) for i in range(2))
    found, wanted = judge(text)(g, f, None), judge(text)(g.double(), f.double(), None)
    assert found.severity.tolist() == pytest.approx(wanted.severity.tolist())
    assert dtype.itemsize == 1 or found.incorrect.tolist() == wanted.incorrect.tolist()  # ties


@pytest.mark.parametrize(
    "answer",
    [
        np.array([1, 0], np.uint8),
        [True, False],
        [torch.tensor(True), False],
        torch.tensor([1, 0], dtype=torch.int32),
        (torch.tensor([1, 0]), [torch.tensor(3.0, requires_grad=True), 0]),
        ([True, False], np.array([3, 0], np.float16)),
        torch.tensor([True, False]).to_sparse(),
    ],
    ids=str,
)  # fmt: skip
def test_a_users_judge_may_answer_in_any_form(answer):
    found = judge(lambda g, f, b: answer)(None, None, None)
    assert found.incorrect.tolist() == [True, False]
    assert found.incorrect.dtype == bool
    assert found.severity.dtype == np.float64


def test_one_sample_may_be_answered_by_one_value():
    for wrong in (True, np.True_, torch.tensor(True), 1):
        found = judge(lambda g, f, b, wrong=wrong: (wrong, torch.tensor(0.25, dtype=torch.bfloat16)))(None, None, None)
        assert (found.incorrect.tolist(), found.severity.tolist()) == ([True], [0.25])


def test_a_severity_that_is_no_number_is_infinite():
    assert judge(lambda g, f, b: ([True], [float("nan")]))(None, None, None).severity.tolist() == [np.inf]


@pytest.mark.parametrize("answer", [None, "wrong", [[1], [1, 2]], ([True], ["much"]), {"a": 1}, [1j], 0.5])
def test_what_is_no_answer_is_refused_in_one_line(answer):
    with pytest.raises(UsageError, match=r"expected bool\[n\] and float\[n\]") as caught:
        judge(lambda g, f, b: answer)(None, None, None)
    assert "\n" not in str(caught.value)


def test_an_object_that_judges_may_answer_so_too():
    """`classify` takes what any judge answers, one that is an object of the user's own as well."""

    class Mine:
        def __call__(self, golden, faulty, batch):
            return (golden != faulty).flatten(), (golden - faulty).abs().flatten().requires_grad_()

    g, f = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16), torch.tensor([[1.0], [5.0]], dtype=torch.bfloat16)
    assert sample_count(judge(Mine()), g, None) == 2
    outcome = classify(judge(Mine()), g, f, None, 2)
    assert outcome.codes.tolist() == [Outcome.MASKED, Outcome.SDC]
    assert outcome.severity.tolist() == [0, 3]
