"""DIVA against PGD and APGD on adapted models: who finds more inputs that only the adapted model gets wrong.

    python -m benchmarks.diva --save FILE [--quick] [--data F.npz --weights F.th] [--only TEXT]

A finished cell is a line of JSON in FILE; run again, it goes on with those that are not there. Without --data and --weights the
cells of cifar-resnet32 are left out. Where onnxruntime and onnx are installed, one cell scores an int8 model of ONNX Runtime;
where foolbox is, the time of its PGD is measured too. What was fixed before any result was seen: the loss (logprob), c = 1,
20 steps, eps 8/255 of the valid range for CIFAR images and 0.1 for digits, the split of images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.diva_training import fine_tuned, surrogate
from benchmarks.timing import interleave
from unsilent.compare.adapters.fake_quant import converted, fake_quantised
from unsilent.compare.adapters.names import adapt
from unsilent.compare.adapters.pruning import pruned
from unsilent.compare.attacks.defence import DivergenceDetector, adversarially_trained, defence_scores
from unsilent.compare.attacks.evaluation import (
    ANY_STEP,
    ATTACKS,
    LAST_STEP,
    RULES,
    AttackTask,
    Scores,
    agreed_rows,
    classify,
    run_attack,
    score,
)
from unsilent.compare.attacks.search import Budget, Pair, no_parameter_gradients
from unsilent.statistics.intervals import clopper_pearson
from unsilent.workloads.cifar_resnet import cifar_resnet, input_range, normalised
from unsilent.workloads.digits import digits
from unsilent.workloads.model_fitting import Schedule
from unsilent.workloads.registry import load
from unsilent.workloads.saved_files import read_images

LEAST_EVENTS = 15
"""With fewer undetected successes of PGD a ratio says nothing; the difference in points is given."""
CALIBRATION = 200
DETECTOR_IMAGES = 120
RESAMPLES = 4000
MOST_IMAGES = 400
"""Attacked in a cell: the first that all models get right."""
DISTILLATION = Schedule(epochs=10, batch=50, rate=5e-4)
TUNING = Schedule(epochs=6, batch=64, rate=1e-3)


@dataclass(frozen=True)
class Subject:
    """A model with images that nothing was trained on.

    Attributes:
        calibration, calibration_labels: What the adapters may see, of other images than ``inputs``.
        trained: Whether ``calibration`` is a training set that is large enough to fine-tune on.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    calibration: Tensor
    calibration_labels: Tensor
    valid: tuple[Tensor, Tensor]
    eps: float
    trained: bool


def cifar(data: str, weights: str) -> Subject:
    """The CIFAR ResNet-32 with 200 images to calibrate with, and the others."""
    images, labels = read_images(data, 10)
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(images)))
    first, others = order[:CALIBRATION], order[CALIBRATION:]
    x = normalised(images)
    model = cifar_resnet(depth=32, weights=weights, data=data).model()
    return Subject("cifar-resnet32", model, x[others], labels[others], x[first], labels[first],
                   input_range(), 8 / 255, False)  # fmt: skip


def digit_model(name: str) -> Subject:
    """A classifier of digits: trained, calibrated and fine-tuned on the training images."""
    data = digits()
    valid = torch.tensor(-1.0), torch.tensor(1.0)
    return Subject(
        name, load(name).model(), data.test, data.test_labels, data.train, data.train_labels, valid, 0.1, True
    )


@dataclass(frozen=True)
class Adapted:
    """An adapted model: ``twin`` is differentiable, ``deployed`` is what is scored."""

    twin: nn.Module
    deployed: Callable[[Tensor], Tensor]


def ptq(text: str) -> Callable[[Subject], Adapted]:
    """What `adapt` makes, without any training."""

    def make(subject: Subject) -> Adapted:
        twin = adapt(subject.model, text, subject.calibration[:CALIBRATION].split(100))
        return Adapted(twin, converted(twin))

    return make


def tuned(share: float | None, bits: int | None) -> Callable[[Subject], Adapted]:
    """Pruned, fine-tuned, then quantised with quantisation-aware training."""

    def make(subject: Subject) -> Adapted:
        model, seen = subject.model, (subject.calibration, subject.calibration_labels)
        if share is not None:
            model = fine_tuned(pruned(model, share, subject.calibration.split(100)), *seen, TUNING)
        if bits is not None:
            model = fine_tuned(fake_quantised(model, seen[0][:CALIBRATION].split(100), bits), *seen, TUNING)
        return Adapted(model, converted(model))

    return make


def onnxruntime_int8(subject: Subject) -> Adapted:
    """int8 of ONNX Runtime, statically quantised by its own tools; the twin is our own int8 model."""
    from benchmarks.onnxruntime_int8 import quantised_session

    calibration = subject.calibration[:CALIBRATION]
    return Adapted(adapt(subject.model, "int8", calibration.split(100)), quantised_session(subject.model, calibration))


ADAPTED: dict[str, Callable[[Subject], Adapted]] = {
    "int8": ptq("int8"),
    "int8, ONNX Runtime": onnxruntime_int8,
    "int4": ptq("int4"),
    "prune 80 %": ptq("prune:0.8"),
    "prune 80 % + int8": ptq("prune:0.8+int8"),
    "int8 QAT": tuned(None, 8),
    "int4 QAT": tuned(None, 4),
    "prune 80 %, fine-tuned": tuned(0.8, None),
    "prune 80 % + int8 QAT": tuned(0.8, 8),
}
WHITEBOX, SEMI_BLACKBOX = "whitebox", "semi-blackbox"
COMPARED = (
    ("diva", "pgd"),
    ("diva", "apgd-ce"),
    ("diva", "apgd-dlr"),
    ("apgd-diva", "apgd-ce"),
    ("apgd-diva", "apgd-dlr"),
)


def attack_cell(
    subject: Subject, adapted: Adapted, setting: str, attacks: Sequence[str], budget: Budget
) -> dict[str, Any]:
    """The row of a model, an adapter and a setting."""
    x, y = subject.inputs, subject.labels
    original_scores, deployed_scores, twin_scores = (
        classify(model, x) for model in (subject.model, adapted.deployed, adapted.twin)
    )
    right = [scores.argmax(1) == y for scores in (original_scores, deployed_scores)]
    lost, same = right[0] & ~right[1], deployed_scores.argmax(1) == twin_scores.argmax(1)
    pair, extra = Pair(subject.model, adapted.twin), {}
    if setting == SEMI_BLACKBOX:
        stand_in = surrogate(adapted.twin, subject.calibration, subject.calibration_labels, DISTILLATION)
        pair = Pair(stand_in, adapted.twin)
        agreed = (classify(stand_in, x).argmax(1) == original_scores.argmax(1)).double().mean()
        extra = {"surrogate_agreement": float(agreed)}
    rows = agreed_rows([subject.model, adapted.deployed, adapted.twin, pair.original], x, y)[:MOST_IMAGES]
    task = AttackTask(pair, subject.model, adapted.deployed, x[rows], y[rows], subject.valid, budget)
    scores = {name: score(name, task, run_attack(name, task)) for name in attacks}
    return {
        "n": len(rows), "images": len(x), "eps": budget.eps, "steps": budget.steps,
        "accuracy": [float(one.double().mean()) for one in right],
        "clean_disagreement": limits(lost), "twin_agreement": float(same.double().mean()), **extra,
        "attacks": {name: attack_row(one) for name, one in scores.items()},
        "compared": [
            {"attack": one, "with": other, "rule": rule, **comparison(scores[one], scores[other], rule)}
            for one, other in COMPARED
            if one in scores and other in scores
            for rule in RULES
        ],
    }  # fmt: skip


def limits(events: Tensor) -> list[float]:
    """Share of events with the limits of its 95 % interval."""
    interval = clopper_pearson(int(events.sum()), len(events))
    return [float(events.double().mean()), interval.low, interval.high]


def attack_row(one: Scores) -> dict[str, Any]:
    """What one attack achieved."""
    counts = {"evasive": one.evasive, "top5": one.evasive_top5, "wrong": one.wrong}
    return {
        **{f"{name}, {rule}": int(by_rule[rule].sum()) for name, by_rule in counts.items() for rule in RULES},
        "evasive_share": {rule: limits(one.evasive[rule]) for rule in RULES},
        "confidence_change": float(one.confidence_change.mean()), "largest_change": one.largest_change,
        "steps": None if one.steps != one.steps else one.steps, "seconds": one.seconds, "gradients": one.gradients,
    }  # fmt: skip


def comparison(one: Scores, other: Scores, rule: str) -> dict[str, Any]:
    """Undetected successes of one attack against those of another on the same images, with bootstrap limits.

    ``loss``: how many points fewer inputs it makes the deployed model get wrong.
    """
    mine, theirs = (scores.evasive[rule].double().numpy() for scores in (one, other))
    picks = np.random.default_rng(0).integers(len(mine), size=(RESAMPLES, len(mine)))
    result: dict[str, Any] = {"loss": resampled((other.wrong[rule].double() - one.wrong[rule].double()).numpy(), picks)}
    if theirs.sum() >= LEAST_EVENTS:
        ratios = mine[picks].sum(1) / np.maximum(theirs[picks].sum(1), 1)
        return result | {"ratio": [float(mine.sum() / theirs.sum()), *map(float, np.quantile(ratios, (0.025, 0.975)))]}
    return result | {"points": resampled(mine - theirs, picks)}


def resampled(values: np.ndarray, picks: np.ndarray) -> list[float]:
    """The mean in points, with bootstrap limits."""
    low, high = np.quantile(values[picks].mean(1), (0.025, 0.975))
    return [100 * float(values.mean()), 100 * float(low), 100 * float(high)]


def defence_cell(subject: Subject, text: str, budget: Budget) -> dict[str, Any]:
    """What passes each defence, before and after both models were trained on attacked inputs.

    The detector is calibrated on held-out images that are not attacked.
    """
    clean, x, y = subject.inputs[:DETECTOR_IMAGES], subject.inputs[DETECTOR_IMAGES:], subject.labels[DETECTOR_IMAGES:]
    seen = subject.calibration, subject.calibration_labels

    def hardened(model: nn.Module) -> nn.Module:
        return adversarially_trained(model, *seen, subject.valid, budget.eps, TUNING)

    def adapted(model: nn.Module) -> nn.Module:
        return adapt(model, text, subject.calibration[:CALIBRATION].split(100))

    plain_twin, original = adapted(subject.model), hardened(subject.model)
    plain_twin = fine_tuned(plain_twin, *seen, TUNING)
    row: dict[str, Any] = {"eps": budget.eps, "steps": budget.steps}
    for name, model, twin in (
        ("undefended", subject.model, plain_twin),
        ("adversarially trained", original, hardened(adapted(original))),
    ):
        deployed = converted(twin)
        rows = agreed_rows([model, deployed, twin], x, y)
        task = AttackTask(Pair(model, twin), model, deployed, x[rows], y[rows], subject.valid, budget)
        detector = DivergenceDetector.calibrated(model, deployed, clean)
        alarms = detector.alarms(classify(model, task.inputs), classify(deployed, task.inputs))
        row[name] = {
            "n": len(rows), "accuracy": [float((classify(one, x).argmax(1) == y).double().mean()) for one in (model, deployed)],
            "false_alarms": limits(alarms), "attacks": defence_scores(task, detector),
        }  # fmt: skip
    return row


def cost_cell(subject: Subject, budget: Budget, rounds: int) -> dict[str, Any]:
    """CPU time of an image and step of each attack, against one forward and input gradient of both models."""
    adapted = ADAPTED["int8"](subject)
    x, y = subject.inputs[:50], subject.labels[:50]
    task = AttackTask(Pair(subject.model, adapted.twin), subject.model, adapted.twin, x, y, subject.valid, budget)

    def passes() -> None:
        for _ in range(budget.steps):
            for model in (subject.model, adapted.twin):
                clean = x.clone().requires_grad_()
                torch.autograd.grad(cross_entropy(model(clean), y), clean)

    methods: dict[str, Callable[[], object]] = {"both gradients": passes}
    for name in ("diva", "pgd", "apgd-diva"):
        methods[name] = lambda name=name: run_attack(name, task)
    if foolbox_pgd := make_foolbox_pgd(adapted.twin, subject, x, y, budget):
        methods["pgd of foolbox"] = foolbox_pgd
    with no_parameter_gradients(subject.model, adapted.twin):  # the baseline, too, computes no gradients of weights
        figures = interleave(methods, rounds)
    each = len(x) * budget.steps
    return {name: {"ms_per_image_and_step": 1e3 * f.seconds / each, "ratio": f.ratio, "quartiles": [f.low, f.high]}
            for name, f in figures.items()}  # fmt: skip


def make_foolbox_pgd(
    model: nn.Module, subject: Subject, x: Tensor, y: Tensor, budget: Budget
) -> Callable[[], object] | None:
    """foolbox's PGD with the same steps on the adapted model alone; None where it is not installed."""
    try:
        import foolbox
    except ImportError:
        return None
    low, high = subject.valid
    scaled = nn.Sequential(Unscaled(low, high), model).eval()
    wrapped = foolbox.PyTorchModel(scaled, bounds=(0, 1), device="cpu")
    search = foolbox.attacks.LinfPGD(abs_stepsize=budget.eps / 8, steps=budget.steps, random_start=False)
    pixels = ((x - low) / (high - low)).clamp(0, 1)
    return lambda: search.run(wrapped, pixels, foolbox.criteria.Misclassification(y), epsilon=budget.eps)


class Unscaled(nn.Module):
    """Numbers from 0 to 1 as the model takes them."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.low, self.width = low, high - low

    def forward(self, pixels: Tensor) -> Tensor:
        return self.low + pixels * self.width


def cells(subjects: Sequence[Subject], quick: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names of cells, and what computes them."""
    for subject in subjects:
        budget = Budget(eps=subject.eps, steps=5 if quick else 20)
        yield f"{subject.name} | cost", lambda s=subject, b=budget: cost_cell(s, b, 2 if quick else 7)
        for name, make in ADAPTED.items():
            if ("QAT" in name or "fine-tuned" in name) and not subject.trained:
                continue
            if "ONNX" in name and (subject.trained or not has_onnxruntime()):
                continue
            for setting, attacks in (
                (WHITEBOX, tuple(ATTACKS)),
                (SEMI_BLACKBOX, ("diva", "apgd-diva", "pgd", "apgd-ce")),
            ):
                if setting == SEMI_BLACKBOX and "ONNX" in name:
                    continue
                yield (
                    f"{subject.name} | {name} | {setting}",
                    lambda s=subject, m=make, w=setting, a=attacks, b=budget: attack_cell(s, m(s), w, a, b),
                )


def defence_cells(subjects: Sequence[Subject], quick: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The cells of subjects with a training set."""
    for subject in subjects:
        for text in ("int4", "prune:0.8") if subject.trained else ():
            budget = Budget(eps=subject.eps, steps=2 if quick else 20)
            yield f"{subject.name} | defence, {text}", lambda s=subject, t=text, b=budget: defence_cell(s, t, b)


def has_onnxruntime() -> bool:
    """Whether a model can be exported and run by ONNX Runtime."""
    try:
        import onnx
        import onnxruntime
    except ImportError:
        return False
    return bool(onnx and onnxruntime)


def main() -> None:
    """Run the cells that are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, required=True, help="JSON lines, one for each finished cell")
    parser.add_argument(
        "--quick", action="store_true", help="few images and steps: whether it runs, not what comes out"
    )
    parser.add_argument("--data", help="CIFAR images (.npz)")
    parser.add_argument("--weights", help="weights of cifar-resnet32")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    subjects = [cifar(asked.data, asked.weights)] if asked.data and asked.weights else []
    subjects += [digit_model("digits-cnn"), digit_model("digits-vit")]
    if asked.quick:
        images = DETECTOR_IMAGES + 60
        subjects = [replace(s, inputs=s.inputs[:images], labels=s.labels[:images]) for s in subjects]
    stored = [json.loads(line) for line in asked.save.read_text().splitlines()] if asked.save.exists() else []
    for row in stored:
        print(summary(row), flush=True)
    if any(row["quick"] != asked.quick for row in stored):
        parser.error(
            f"{asked.save} has cells that were run {'without' if asked.quick else 'with'} --quick; give another file"
        )
    done = {row["cell"] for row in stored}
    for name, compute in chain(cells(subjects, asked.quick), defence_cells(subjects, asked.quick)):
        if name in done or asked.only not in name:
            continue
        begun, cpu = time.perf_counter(), time.process_time()
        row = {"cell": name, "quick": asked.quick, **compute()}
        row |= {
            "wall_seconds": time.perf_counter() - begun,
            "cpu_seconds": time.process_time() - cpu,
            "torch": torch.__version__,
        }
        with asked.save.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    """A cell in a line."""
    text = f"{row['cell']} ({row['cpu_seconds']:.0f} CPU s)"
    if "undefended" in row:
        return f"{text}: " + "; ".join(
            f"{name}: n {one['n']}, accuracy {one['accuracy'][0]:.3f} and {one['accuracy'][1]:.3f}, {one['attacks']}"
            for name, one in row.items()
            if isinstance(one, dict)
        )
    if "attacks" not in row:
        figures = (f"{name} {one['ratio']:.2f}" for name, one in row.items() if isinstance(one, dict))
        return f"{text}: {', '.join(figures)} of both gradients"
    shares = (
        f"{name} {one[f'evasive, {ANY_STEP}']}/{one[f'evasive, {LAST_STEP}']}" for name, one in row["attacks"].items()
    )
    return (
        f"{text}: n {row['n']}, accuracy {row['accuracy'][0]:.3f} and {row['accuracy'][1]:.3f}, "
        f"twin {row['twin_agreement']:.3f}; "
        f"evasive at any/last step: {', '.join(shares)}" + "".join(map(compared_text, row["compared"]))
    )


def compared_text(one: dict[str, Any]) -> str:
    """A comparison in a line."""
    kind = "ratio" if "ratio" in one else "points"
    value, loss = ("{:.2f} [{:.2f}, {:.2f}]".format(*one[what]) for what in (kind, "loss"))
    return f"\n    {one['attack']} against {one['with']}, {one['rule']}: {kind} {value}; loss of attack success {loss} points"


if __name__ == "__main__":
    sys.exit(main())
