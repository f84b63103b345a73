"""Common parts of all attacks: the pair of models, the inputs that may be tried, and the inputs found.

Invariants: every input tried lies within the ball of the clean one and within the valid range; memory is linear in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.compare.attacks.objectives import Objective

Classifier = Callable[[Tensor], Tensor]
"""Function of inputs [n, …] that returns class scores [n, classes]."""

NO_GRADIENT = (
    "expected a model that computes with gradients from the inputs on: take no_grad, detach and rounding out of it and of "
    "the workload's run"
)
NO_TWIN = f"{NO_GRADIENT}, or attack a differentiable twin of it"


@dataclass(frozen=True, eq=False)
class Pair:
    """The original and the adapted model of the attacker, both differentiable."""

    original: Classifier
    adapted: Classifier

    def passes(self, x: Tensor, labels: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Values [n] of the objective, their gradient [n, …], and the class scores of both models.

        The original's scores are ``None`` if the objective does not read it.

        Raises:
            UsageError: a model that the objective reads has no gradient with respect to its inputs.
        """
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            original = self.original(x) if objective.reads_original else None
            with torch.set_grad_enabled(objective.reads_adapted):
                adapted = self.adapted(x)
            for scores, read, which, advice in (
                (original, objective.reads_original, "original", NO_GRADIENT),
                (adapted, objective.reads_adapted, "model that is attacked as the twin", NO_TWIN),
            ):
                if read and scores is not None and not scores.requires_grad:
                    raise UsageError(f"the {which} gives no gradient for its inputs; {advice}")
            values = objective.function(adapted if original is None else original, adapted, labels)
            (gradient,) = torch.autograd.grad(values.sum(), x)
        return values.detach(), gradient, None if original is None else original.detach(), adapted.detach()

    @torch.no_grad()
    def scores(self, x: Tensor, objective: Objective) -> tuple[Tensor | None, Tensor]:
        """The class scores of the original and the adapted model.

        The original's scores are ``None`` if the objective does not read it.
        """
        return self.original(x) if objective.reads_original else None, self.adapted(x)


@dataclass(frozen=True)
class Budget:
    """The size of the change that an attack may make, and its number of steps and restarts.

    Attributes:
        eps: Largest change of any value of an input, as a share of the valid range: 0 to 1.
        steps: Number of steps in each restart.
        step: Change in a step, as a share of the valid range; ``None`` for an eighth of ``eps``.
        random_start: Whether to begin at a random point of the ball instead of the clean input.
        restarts: Number of restarts with the inputs that have no success yet.
        seed: Seed of the random points.
    """

    eps: float = 8 / 255
    steps: int = 20
    step: float | None = None
    random_start: bool = False
    restarts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("eps", self.eps), ("step", self.step)):
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"--{name} is {value:g}; expected a share of the valid range of inputs, from 0 to 1")
        for name, count in (("steps", self.steps), ("restarts", self.restarts)):
            if count < 1:
                raise UsageError(f"--{name} is {count}; expected 1 or more")


@dataclass(frozen=True, eq=False)
class Ball:
    """The inputs that may be tried instead of clean ones: a range for each value.

    Attributes:
        low, high: Limits of each value, [n, …].
        size: Size of the valid range that eps is a share of; broadcasts to [n, …].
    """

    low: Tensor
    high: Tensor
    size: Tensor

    @classmethod
    def around(cls, clean: Tensor, valid: tuple[Tensor, Tensor], eps: float) -> Ball:
        """The ball around clean inputs, within the valid range.

        ``valid``: least and largest valid values, broadcast to an input.
        """
        low, high = (limit.to(clean) for limit in valid)
        if bool((clean < low - 1e-5 * (high - low)).any() or (clean > high + 1e-5 * (high - low)).any()):
            raise UsageError(
                f"inputs range from {clean.min():g} to {clean.max():g}, outside the valid range that the workload states; "
                "expected inputs within it: correct input_range"
            )
        reach = eps * (high - low)
        # Clean inputs that rounding puts outside the range are not moved.
        return cls(
            torch.minimum(torch.maximum(clean - reach, low), clean),
            torch.maximum(torch.minimum(clean + reach, high), clean),
            high - low,
        )

    def project(self, x: Tensor) -> Tensor:
        """The nearest inputs inside the ball."""
        return torch.minimum(torch.maximum(x, self.low), self.high)

    def random(self, generator: torch.Generator) -> Tensor:
        """A random point in the ball of each input."""
        return self.low + (self.high - self.low) * torch.rand(self.low.shape, generator=generator).to(self.low)

    def of(self, rows: Tensor) -> Ball:
        """The ball of the inputs with these indices."""
        return Ball(self.low[rows], self.high[rows], self.size)


class Found:
    """Inputs that an attack found, according to the attacker's pair of models.

    Attributes:
        evasive: First inputs that are a success by the objective, for example evasive ones; the last inputs if there is none.
        evasive_step: Step of the first success, int64[n]; 0 if there is none.
        wrong: First inputs that the adapted model gets wrong; the last inputs if there is none.
        wrong_step: Step of the first wrong answer, int64[n]; 0 if there is none.
        last: Inputs at the last step of the last restart that each took part in; for APGD, those with the best value of the
            objective.
        gradients: Number of computed gradients, each of one input.
        seconds: CPU time in seconds.
    """

    def __init__(self, clean: Tensor) -> None:
        self.evasive, self.wrong, self.last = clean.clone(), clean.clone(), clean.clone()
        self.evasive_step = torch.zeros(len(clean), dtype=torch.int64)
        self.wrong_step = torch.zeros(len(clean), dtype=torch.int64)
        self.gradients, self.seconds = 0, 0.0

    def finish(self) -> None:
        """Use the last inputs where no successful or wrong ones were found."""
        for inputs, steps in ((self.evasive, self.evasive_step), (self.wrong, self.wrong_step)):
            none = steps == 0
            inputs[none] = self.last[none]

    @classmethod
    def joined(cls, parts: list[Found]) -> Found:
        """The inputs found for several batches, joined in order."""
        result = cls(parts[0].last[:0])
        for name in ("evasive", "wrong", "last", "evasive_step", "wrong_step"):
            setattr(result, name, torch.cat([getattr(part, name) for part in parts]))
        result.gradients = sum(part.gradients for part in parts)
        result.seconds = sum(part.seconds for part in parts)
        return result


@dataclass(frozen=True, eq=False)
class Search:
    """A search in progress: models, objective, clean inputs, and the inputs found so far.

    Attributes:
        clean, labels: Clean inputs [n, …] and their right answers, int64[n].
    """

    pair: Pair
    objective: Objective
    clean: Tensor
    labels: Tensor
    found: Found

    def restarts(self, ball: Ball, budget: Budget) -> Iterator[tuple[Tensor, Ball, Tensor]]:
        """Indices, balls and first points of the inputs in each restart.

        Inputs with a success are left out of further restarts.
        """
        generator, rows = torch.Generator().manual_seed(budget.seed), torch.arange(len(self.clean))
        for restart in range(budget.restarts):
            rows = rows[self.found.evasive_step[rows] == 0] if restart else rows
            if not len(rows):
                return
            within = ball.of(rows)
            yield rows, within, within.random(generator) if budget.random_start or restart else self.clean[rows]

    def passes(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor]]:
        """The result of `Pair.passes` for some inputs; counts the gradients."""
        values, gradient, original, adapted = self.pair.passes(x, self.labels[rows], self.objective)
        self.found.gradients += len(x)
        return values, gradient, (original, adapted)

    @torch.no_grad()
    def look_at(self, rows: Tensor, x: Tensor, scores: tuple[Tensor | None, Tensor], step: int) -> None:
        """Record which inputs ``x`` of a step are wrong or a success.

        If the objective does not read the original, the original is run only if the adapted model is wrong and nothing was found
        before.
        """
        (original, adapted), labels, adversarial = scores, self.labels[rows], self.found
        wrong = (adapted.argmax(1) != labels).nonzero()[:, 0]
        new = wrong[adversarial.wrong_step[rows[wrong]] == 0]
        adversarial.wrong[rows[new]], adversarial.wrong_step[rows[new]] = x[new], step
        unsolved = wrong[adversarial.evasive_step[rows[wrong]] == 0]
        if len(unsolved):
            theirs = self.pair.original(x[unsolved]) if original is None else original[unsolved]
            new = unsolved[self.objective.success(theirs, adapted[unsolved], labels[unsolved])]
            adversarial.evasive[rows[new]], adversarial.evasive_step[rows[new]] = x[new], step


@contextmanager
def no_parameter_gradients(*models: object) -> Iterator[None]:
    """Context in which the parameters of these models need no gradients.

    A pass then keeps only the data that the gradient of inputs needs.
    """
    changed = [p for model in models if isinstance(model, nn.Module) for p in model.parameters() if p.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)
