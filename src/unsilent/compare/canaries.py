"""Canaries: a few inputs stored with a model's answers to them, which show later whether the model still answers so.

They are stored as ``golden-test`` stores its input in a profile; what is new is which inputs these are, and that answers can
also be compared by label or with a tolerance, for a model that runs elsewhere or was quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unsilent.compare.canary_choice import BOUNDARY, choose_inputs
from unsilent.compare.canary_report import CanaryCheck, CanaryDifference
from unsilent.engine.device_placement import place, place_model
from unsilent.errors import UsageError, kind_and_line
from unsilent.nested import map_tensors
from unsilent.options import check_count
from unsilent.outcomes import judge, judge_text
from unsilent.outcomes.base import Judge
from unsilent.outcomes.decision_judges import DecisionJudge, decision_tensor
from unsilent.outcomes.tensors import leaves, samples_that_differ
from unsilent.protection.golden_test import GoldenTest
from unsilent.protection.hashed_file import FileKind, restored, stored
from unsilent.protection.profile import dtypes_of, model_fingerprint
from unsilent.sites.modules import mode_readers, named_tensors, reject_training_mode
from unsilent.workloads.base import InferenceWorkload
from unsilent.workloads.batch_samples import count_samples
from unsilent.workloads.saved_files import state_dict_misfit
from unsilent.workloads.user import user_code

BITS, LABELS = "bits", "labels"
_FILE = FileKind("canaries", "unsilent/canaries/", 1, "a file of canaries", "unsilent canaries make")
_PLAIN = ("workload", "choice", "judge", "decision", "shapes", "dtypes", "weights", "environment")


@dataclass(frozen=True, eq=False)
class Canaries:
    """Stored inputs and answers.

    Attributes:
        workload: The workload that they were made of, as it was named.
        choice: How the inputs were chosen, one of `CHOICES`.
        judge: Text of the rule that says when an answer is another one.
        decision: Which tensor of an answer the rule reads; None for all of them.
        shapes: Of the model's parameters and buffers, by name.
        dtypes: Floating-point types of these.
        weights: Fingerprint of their values.
        environment: Device and version of torch, on which bits depend.
        parts: Inputs and answers, a part for each batch that inputs were taken from.
    """

    workload: str
    choice: str
    judge: str
    decision: int | None
    shapes: dict[str, list[int]]
    dtypes: list[str]
    weights: str
    environment: str
    parts: tuple[GoldenTest, ...]

    @property
    def count(self) -> int:
        """How many inputs there are."""
        return sum(count_samples(part.batch) for part in self.parts)

    def save(self, path: str | Path) -> None:
        """Write a file that `load_canaries` reads. Raises ``UsageError`` where it cannot be written."""
        arrays: dict[str, Tensor] = {}
        parts = [
            {"batch": stored(part.batch, f"{n}/", arrays), "answer": stored(part.answer, f"{n}/", arrays)}
            for n, part in enumerate(self.parts)
        ]
        try:
            _FILE.write(path, {**{name: getattr(self, name) for name in _PLAIN}, "parts": parts}, arrays)
        except TypeError as error:
            raise UsageError(f"the inputs of {self.workload} cannot be written as JSON ({error})") from None

    def check_architecture(self, model: nn.Module) -> None:
        """Raise ``UsageError`` for a model whose parameters and buffers have other names or shapes."""
        known = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        if misfit := state_dict_misfit(named_tensors(model), known, "this one"):
            raise UsageError(
                f"the canaries are of a model of another architecture, which {misfit}; make canaries of this model"
            )


def make_canaries(
    workload: InferenceWorkload,
    count: int,
    choice: str = BOUNDARY,
    *,
    seed: int = 0,
    device: str = "cpu",
    name: str = "",
) -> Canaries:
    """Choose inputs of a workload and store its model's answers to them.

    Args:
        workload: Its batches are what is chosen from.
        count: How many inputs.
        choice: One of `CHOICES`.
        seed: Of random choices.
        device: Where the model runs, ``cpu`` or ``cuda``.
        name: What the workload is called in the file; default its own name.

    Raises:
        UsageError: there are fewer samples, the judge shows no boundary of decisions, or the model is in training mode, answers
            the same input with other bits each time, or with values that are not finite.
    """
    check_count("--count", count, 1)
    model, name = place_model(workload.model(), device, None), name or workload.name
    reject_training_mode(mode_readers(model))
    with user_code(name), _one_thread():
        batches = [place(batch, device, None) for batch in workload.batches()]
        chosen = choose_inputs(workload, model, batches, count, choice, seed)
        parts = tuple(GoldenTest(count_samples(batch)) for batch in chosen)
        for part, batch in zip(parts, chosen, strict=True):
            part.calibrate(model, [batch], workload.run)
        with torch.no_grad():
            decision = _decision_number(workload.judge, workload.run(model, chosen[0]))
    if not all(bool(answer.isfinite().all()) for part in parts for answer in part.answer):
        raise UsageError(f"the model of {name} answers a canary with NaN or infinity; expected finite values")
    shapes = {name: list(tensor.shape) for name, tensor in named_tensors(model).items()}
    return Canaries(
        workload=name,
        choice=choice,
        judge=judge_text(workload.judge),
        decision=decision,
        shapes=shapes,
        dtypes=list(dtypes_of(model)),
        weights=model_fingerprint(model),
        environment=environment(device),
        parts=parts,
    )


def load_canaries(path: str | Path) -> Canaries:
    """The canaries in a file of `Canaries.save`; raises ``UsageError`` for any other file. Nothing in it is executed."""
    with _FILE.reading(path) as (text, arrays):
        parts = []
        for known in text["parts"]:
            part = GoldenTest()
            part.batch, part.answer = restored(known["batch"], arrays), restored(known["answer"], arrays)
            parts.append(part)
        canaries = Canaries(**{name: text[name] for name in _PLAIN}, parts=tuple(parts))
        if not canaries.count or not all(part.answer for part in parts):
            raise ValueError("it holds no canary")
        return canaries


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within, torch uses one thread on the CPU, as the bits of sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def environment(device: str = "cpu") -> str:
    """What the bits of an answer depend on besides the model and its input."""
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def parse_comparison(text: str) -> str | float:
    """``bits``, ``labels`` or a tolerance of 0 or more; raises ``UsageError``."""
    if text in (BITS, LABELS):
        return text
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < np.inf:
        raise UsageError(f"--compare is {text!r}; expected bits, labels or a tolerance, such as 0.001")
    return tolerance


def check_canaries(
    canaries: Canaries,
    run: Callable[[Any], Any],
    comparison: str | float = BITS,
    *,
    model: nn.Module | None = None,
    name: str = "the model",
    device: str = "cpu",
) -> CanaryCheck:
    """Whether a model gives the stored answers.

    Args:
        canaries: Inputs and right answers.
        run: Output for a batch of inputs.
        comparison: ``bits``; ``labels``, by the judge of the workload; or a number, the largest difference that is allowed in a
            tensor of the answer, as a part of the largest magnitude that is stored for the same tensor and input.
        model: Its weights are compared with those that the canaries were made with; None where there are only outputs.
        name: Of the model, for the report.
        device: Where its inputs have to be.

    Raises:
        UsageError: the model takes other inputs or gives another kind of answer, or bits cannot be compared here.
    """
    if comparison == BITS:
        _check_bits_can_agree(canaries, model, device)
    rule, rows = judge(canaries.judge) if comparison == LABELS else None, list[CanaryDifference]()
    for part in canaries.parts:
        before, count = [one.cpu() for one in part.answer], count_samples(part.batch)
        with torch.no_grad(), _one_thread():
            after = _answer_now(part.batch, before, run, name, device)
        different = np.any([samples_that_differ(*pair, count).numpy() for pair in zip(before, after, strict=True)], 0)
        largest, relative = _largest_differences(before, after, count)
        changed = different
        if rule is not None:
            read = slice(None) if canaries.decision is None else canaries.decision
            changed = rule(before[read], after[read], part.batch).incorrect | np.isinf(largest)
        elif not isinstance(comparison, str):
            changed = ~(relative <= comparison)
        columns = zip(changed, different, largest, relative, strict=True)
        rows += [CanaryDifference(len(rows) + n, *(value.item() for value in row)) for n, row in enumerate(columns, 1)]
    same = None if model is None else model_fingerprint(model) == canaries.weights
    return CanaryCheck(name, canaries.workload, canaries.choice, str(comparison), tuple(rows), same)


def _decision_number(rule: Judge, output: Any) -> int | None:
    """The place of the tensor that a judge of decisions reads, among those of an output."""
    if not isinstance(rule, DecisionJudge):
        return None
    read = decision_tensor(output, rule, rule.DIMENSIONS)
    return next((n for n, leaf in enumerate(leaves(output)) if leaf is read), None)


def _check_bits_can_agree(canaries: Canaries, model: nn.Module | None, device: str) -> None:
    """Raise ``UsageError`` where answers differ in bits without a fault."""
    here, dtypes = environment(device), None if model is None else list(dtypes_of(model))
    other = (canaries.environment, here) if here != canaries.environment else None
    if dtypes is not None and dtypes != canaries.dtypes:
        other = f"a model in {', '.join(canaries.dtypes)}", ", ".join(dtypes) or "no floating-point type"
    if other is not None:
        raise UsageError(
            f"the canaries were made with {other[0]}, this is {other[1]}: bits may differ without a fault; give --compare labels "
            "or a tolerance, such as --compare 0.001"
        )


def _answer_now(
    batch: Any, before: Sequence[Tensor], run: Callable[[Any], Any], name: str, device: str
) -> list[Tensor]:
    """The answer to stored inputs, on the CPU; raises ``UsageError`` where it has another form than the stored one."""
    try:
        output = run(map_tensors(batch, lambda _, tensor: tensor.to(device, copy=True)))
    except Exception as error:  # of a model that is called in another way than it expects
        raise UsageError(
            f"{name} raised {kind_and_line(error)} for the inputs of the canaries; give the model that they were made of"
        ) from None
    after = [leaf.detach().cpu() for leaf in leaves(output)]
    forms = [[tuple(leaf.shape) for leaf in one] for one in (before, after)]
    if forms[0] != forms[1]:
        raise UsageError(
            f"{name} answers with shapes {forms[1]}, the canaries have {forms[0]}; give the model that they were made of"
        )
    return after


def _largest_differences(
    before: Sequence[Tensor], after: Sequence[Tensor], count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each sample the largest difference of a value, infinite for NaN, and the largest one as a part of its tensor.

    A tensor of an answer is compared with its own largest magnitude for that sample, so that one with large values hides no other.
    """
    largest, relative = torch.zeros(2, count, dtype=torch.float64)
    for pair in zip(before, after, strict=True):
        has_samples = pair[0].ndim > 0 and len(pair[0]) == count
        one, other = (leaf.double().reshape(count if has_samples else 1, -1) for leaf in pair)
        if one.shape[1]:
            moved = (other - one).abs().nan_to_num(torch.inf, torch.inf).amax(1)
            largest = largest.maximum(moved)
            relative = relative.maximum(torch.where(moved == 0, 0.0, moved / one.abs().amax(1)))
    return largest.numpy(), relative.numpy()
