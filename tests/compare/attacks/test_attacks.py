"""Attacks stay within their limits, do what their formulas say, and find nothing where there is nothing to find."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from unsilent.basics.errors import UsageError
from unsilent.compare.adapters.fake_quant import converted, fake_quantised
from unsilent.compare.attacks.apgd import apgd, checkpoints
from unsilent.compare.attacks.evaluation import ATTACKS, BATCH, RULES, AttackTask, agreed_rows, run_attack, score
from unsilent.compare.attacks.objectives import LOSSES, diva, dlr, margin
from unsilent.compare.attacks.pgd import pgd
from unsilent.compare.attacks.search import Ball, Budget, Found, Pair

VALID = torch.tensor(-1.0), torch.tensor(1.0)


def net(seed, classes=10):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, classes)).eval()


def near(model, scale=0.15):
    """A copy with changed weights."""
    other, generator = net(0), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs + scale * theirs.std() * torch.randn(theirs.shape, generator=generator))
    return other


@pytest.fixture
def original():
    return net(3)


@pytest.fixture
def task(original):
    """Inputs of which both models answer the same, and that is the label."""
    x = torch.rand(160, 1, 4, 4, generator=torch.Generator().manual_seed(2)) * 2 - 1
    labels, adapted = original(x).argmax(1), near(original)
    rows = agreed_rows([original, adapted], x, labels)
    return AttackTask(Pair(original, adapted), original, adapted, x[rows], labels[rows], VALID, Budget(eps=0.1))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(ATTACKS)),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.booleans(),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_all_inputs_stay_in_the_ball_and_in_the_valid_range(attack, eps, step, random_start, steps, seed):
    original = net(seed)
    x = torch.rand(6, 3, 4, 4)[:, :1] * 2 - 1
    x[0], x[1] = -1, 1
    budget = Budget(eps=eps, step=step, steps=steps, random_start=random_start, restarts=2, seed=seed)
    task = AttackTask(Pair(original, near(original)), original, original, x, original(x).argmax(1), VALID, budget)
    found = run_attack(attack, task)
    for tried in (found.evasive, found.wrong, found.last):
        assert (tried - x).abs().max() <= eps * 2 + 1e-6
        assert tried.min() >= -1
        assert tried.max() <= 1


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("eps", [0.0, 0.05, 0.5, 1.0])
def test_two_equal_models_have_no_evasive_input(task, original, attack, eps):
    same = AttackTask(
        Pair(original, original), original, original, task.inputs, task.labels, VALID, Budget(eps=eps, steps=5)
    )
    scores = score(attack, same, run_attack(attack, same))
    assert [int(scores.evasive[rule].sum()) for rule in RULES] == [0, 0]
    if eps == 1.0 and attack in ("pgd", "apgd-ce", "apgd-dlr"):
        assert scores.wrong["last step"].any()  # there is something to find


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_ball_of_no_size_has_nothing_beyond_clean_disagreement(task, attack):
    none = AttackTask(
        task.pair, task.original, task.deployed, task.inputs, task.labels, VALID, Budget(eps=0.0, steps=3)
    )
    found = run_attack(attack, none)
    assert torch.equal(found.last, task.inputs)
    assert not found.evasive_step.any()


def test_attacks_find_evasive_inputs_and_diva_raises_its_objective(task):
    found = run_attack("diva", task)
    objective = diva()

    def value(x):
        return objective.function(task.original(x), task.deployed(x), task.labels)

    assert (value(found.last) > value(task.inputs)).double().mean() > 0.95
    assert score("diva", task, found).evasive["last step"].any()


@pytest.mark.parametrize("loss", ["prob"])
def test_a_large_c_is_ascent_against_the_probability_of_the_adapted_model(task, loss):
    alone = diva("prob").function
    ball = Ball.around(task.inputs, VALID, 0.1)
    from unsilent.compare.attacks.objectives import Objective

    against = Objective(lambda _, adapted, labels: -LOSSES["prob"](adapted, labels))
    assert alone is not None
    one = pgd(task.pair, diva(loss, c=1e6), task.inputs, task.labels, ball, task.budget)
    other = pgd(task.pair, against, task.inputs, task.labels, ball, task.budget)
    assert (one.last - other.last).abs().amax((1, 2, 3)).lt(1e-6).double().mean() > 0.9


def authors_loop(task, unclipped):
    """DIVA's loop as its authors spelled it twice: the gradient at the clipped input, or at the clean one plus the change."""
    x0, y, change = task.inputs, task.labels, torch.zeros_like(task.inputs)
    objective, evasive = diva("prob"), torch.zeros(len(x0), dtype=torch.bool)
    for _ in range(20):
        at = x0 + change if unclipped else (x0 + change).clamp(-1, 1)
        at = at.detach().requires_grad_()
        objective.function(task.original(at), task.deployed(at), y).sum().backward()
        start = x0 + change if unclipped else at.detach()
        change = (start + 0.1 * 2 / 8 * at.grad.sign() - x0).clamp(-0.2, 0.2)
        tried = (x0 + change).clamp(-1, 1)
        evasive |= (task.deployed(tried).argmax(1) != y) & (task.original(tried).argmax(1) == y)
    return evasive, tried.detach()


def test_both_spellings_of_the_authors_loop_succeed_equally_often(task):
    clipped, last = authors_loop(task, unclipped=False)
    unclipped, _ = authors_loop(task, unclipped=True)
    assert abs(int(clipped.sum()) - int(unclipped.sum())) <= 0.1 * len(clipped)
    ball = Ball.around(task.inputs, VALID, 0.1)
    found = pgd(task.pair, diva("prob"), task.inputs, task.labels, ball, task.budget)
    assert int((found.evasive_step > 0).sum()) == pytest.approx(int(clipped.sum()), abs=2)
    assert (found.last - last).abs().amax((1, 2, 3)).lt(1e-5).double().mean() > 0.9


def test_restarts_leave_solved_inputs_alone(task):
    ball = Ball.around(task.inputs, VALID, 0.1)
    for search in (pgd, apgd):
        first = search(task.pair, diva(), task.inputs, task.labels, ball, Budget(eps=0.1))
        more = search(task.pair, diva(), task.inputs, task.labels, ball, Budget(eps=0.1, restarts=3))
        solved = first.evasive_step > 0
        assert solved.any()
        assert torch.equal(first.evasive[solved], more.evasive[solved])
        assert int((more.evasive_step > 0).sum()) >= int(solved.sum())
        assert more.gradients <= len(task.inputs) * 20 + 2 * 20 * int((~solved).sum())


def test_the_rule_by_step_counts_what_it_says(task):
    """Against a loop over inputs."""
    found = run_attack("diva", task)
    scores = score("diva", task, found)
    for at, label in enumerate(task.labels.tolist()):
        for rule, x in (("any step", found.evasive[at : at + 1]), ("last step", found.last[at : at + 1])):
            original, deployed = task.original(x)[0], task.deployed(x)[0]
            answer = int(deployed.argmax())
            evasive = answer != label and int(original.argmax()) == label
            assert bool(scores.evasive[rule][at]) == evasive
            ranked = original.argsort(descending=True).tolist()
            assert bool(scores.evasive_top5[rule][at]) == (evasive and answer not in ranked[:5])
    assert scores.largest_change <= 0.1 + 1e-6
    assert scores.gradients == 20 * len(task.inputs)


def test_the_largest_change_is_that_of_all_inputs_that_are_scored(task):
    found = run_attack("diva", task)
    found.last = task.inputs.clone()
    assert score("diva", task, found).largest_change == pytest.approx(0.1, rel=1e-3)


def test_batches_do_not_change_what_is_found(task):
    """Memory is that of a batch: each of them is attacked alone."""
    assert len(task.inputs) > BATCH
    ball = Ball.around(task.inputs, VALID, 0.1)
    whole = pgd(task.pair, diva(), task.inputs, task.labels, ball, task.budget)
    parts = run_attack("diva", task)
    assert (whole.last - parts.last).abs().amax((1, 2, 3)).lt(1e-5).double().mean() > 0.9


def test_memory_is_linear_in_the_batch():
    """Counted: bytes that live tensors hold most, during an attack of 1 and of 4 times as many inputs."""
    original = net(3)
    most = []
    for count in (64, 256):
        x = torch.zeros(count, 1, 4, 4)
        labels = original(x).argmax(1)
        seen = [0]

        def counting(batch, seen=seen):
            seen[0] = max(seen[0], len(batch))
            return original(batch)

        pgd(Pair(counting, original), diva(), x, labels, Ball.around(x, VALID, 0.1), Budget(steps=3))
        most.append(seen[0])
    assert most == [64, 256]  # one pass of each model at a time, of no more inputs than there are


def test_apgd_is_no_worse_than_its_start_and_takes_the_published_checkpoints(task):
    assert checkpoints(100) == [0, 22, 41, 57, 70, 80, 87, 93, 99]
    ball = Ball.around(task.inputs, VALID, 0.1)
    found = apgd(task.pair, diva(), task.inputs, task.labels, ball, task.budget)

    def value(x):
        return diva().function(task.original(x), task.deployed(x), task.labels)

    assert (value(found.last) >= value(task.inputs) - 1e-6).all()
    fixed = pgd(task.pair, diva(), task.inputs, task.labels, ball, task.budget)
    assert value(found.last).mean() > value(fixed.last).mean() - 0.05


def test_margin_and_dlr_against_a_loop():
    scores = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 5
    for row, label, m, d in zip(scores, labels.tolist(), margin(scores, labels), dlr(scores, labels), strict=True):
        others = [float(v) for at, v in enumerate(row) if at != label]
        ranked = sorted(map(float, row), reverse=True)
        assert float(m) == pytest.approx(float(row[label]) - max(others), rel=1e-5)
        assert float(d) == pytest.approx(-(float(row[label]) - max(others)) / (ranked[0] - ranked[2]), rel=1e-4)
    with pytest.raises(UsageError, match="3 or more"):
        dlr(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))


def test_models_without_gradients_of_inputs_are_refused(task):
    twin = fake_quantised(task.deployed, [task.inputs])
    for pair in (Pair(task.original, converted(twin)), Pair(converted(twin), task.deployed)):
        broken = AttackTask(pair, task.original, task.deployed, task.inputs, task.labels, VALID, task.budget)
        with pytest.raises(
            UsageError, match="gives no gradient for its inputs; expected a model that computes with gradients"
        ):
            run_attack("diva", broken)
    # What is scored needs no gradient, nor does a model that the objective does not read.
    fine = AttackTask(
        Pair(converted(twin), twin), task.original, converted(twin), task.inputs, task.labels, VALID, task.budget
    )
    assert isinstance(run_attack("pgd", fine), Found)


def test_parameters_need_gradients_again_after_an_attack(task):
    run_attack("diva", task)
    assert all(p.requires_grad for p in task.original.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(eps=1.5), "--eps is 1.5; expected a share of the valid range"),
        (lambda: Budget(eps=-0.1), "--eps is -0.1"),
        (lambda: Budget(steps=0), "--steps is 0; expected 1 or more"),
        (lambda: diva("logprop"), "did you mean 'logprob'"),
        (lambda: diva(c=0), "--c is 0; expected a number above 0"),
        (lambda: Ball.around(torch.full((1, 2), 3.0), VALID, 0.1), "outside the valid range"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_unknown_attacks_and_too_few_inputs_are_refused(task):
    with pytest.raises(UsageError, match="did you mean 'diva'"):
        run_attack("divas", task)
    with pytest.raises(
        UsageError, match="classified right by all models: the original, the adapted one and its twin; expected 10,000"
    ):
        agreed_rows([task.original, task.deployed], task.inputs, task.labels, 10_000)


def test_pgd_does_what_foolbox_does(task):
    foolbox = pytest.importorskip("foolbox")
    model = nn.Sequential(nn.Flatten(), *list(task.deployed)[1:]).eval()
    wrapped = foolbox.PyTorchModel(model, bounds=(-1, 1), device="cpu")
    search = foolbox.attacks.LinfPGD(abs_stepsize=0.025, steps=20, random_start=False)
    theirs = search.run(wrapped, task.inputs, foolbox.criteria.Misclassification(task.labels), epsilon=0.2)
    ours = run_attack("pgd", task).last
    same = (ours - theirs).abs().amax((1, 2, 3)) < 1e-5
    assert same.double().mean() > 0.9
    losses = [cross_entropy(task.deployed(x), task.labels) for x in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-2)
