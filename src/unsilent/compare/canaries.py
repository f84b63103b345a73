"""Canaries: inputs stored with a model's answers, to check later whether the model still gives them.

They are stored as ``golden-test`` stores its input in a profile. In addition, the inputs can be chosen, and answers can be
compared by label or with a tolerance, for a model that runs elsewhere or was quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.nested import map_tensors
from unsilent.basics.options import check_count
from unsilent.basics.user_code import user_code
from unsilent.compare.canary_choice import BOUNDARY, choose_inputs
from unsilent.compare.canary_file import Canaries, CanaryBatch, nested, nesting_of
from unsilent.compare.canary_file import load_canaries as load_canaries
from unsilent.compare.canary_report import CanaryCheck, CanaryDifference
from unsilent.engine.device_placement import environment, place, place_model, torch_threads
from unsilent.outcomes import Judge, judge, judge_text
from unsilent.outcomes.classify import has_nonfinite_values
from unsilent.outcomes.tensors import leaves, samples_that_differ
from unsilent.protection.golden_test import GoldenTest
from unsilent.protection.layer_watch import is_compiled
from unsilent.protection.profile import dtypes_of, model_fingerprint
from unsilent.report.text import count_text
from unsilent.sites.modules import mode_readers, named_tensors, reject_training_mode
from unsilent.workloads.base import InferenceWorkload
from unsilent.workloads.batch_samples import count_samples

BITS, LABELS = "bits", "labels"
BITS_MAY_DIFFER = "bits may differ without a fault; give --compare labels or a tolerance, such as --compare 0.001"
OTHERS = "give --compare bits or a tolerance, such as --compare 0.001"


def make_canaries(
    workload: InferenceWorkload,
    count: int,
    choice: str = BOUNDARY,
    *,
    seed: int = 0,
    device: str = "cpu",
    name: str = "",
) -> Canaries:
    """Choose inputs of a workload, and store its model's answers to them.

    Args:
        workload: Workload whose batches the inputs are chosen from.
        count: Number of inputs.
        choice: One of `CHOICES`.
        seed: Seed of random choices.
        device: Device on which the model runs, ``cpu`` or ``cuda``.
        name: Name of the workload in the file; by default its own name.

    Raises:
        UsageError: there are fewer samples than ``count``, the judge has no decision boundary, the seed is negative, or the model
            is in training mode, gives different bits for the same input, or gives values that are not finite.
    """
    check_count("-k (--count)", count, 1)
    check_count("--seed", seed, 0)
    model, name = place_model(workload.model(), device, None), name or workload.name
    reject_training_mode(mode_readers(model))
    with user_code(name), torch_threads(1):
        batches = [place(batch, device, None) for batch in workload.batches()]
        chosen = choose_inputs(workload, model, batches, count, choice, seed, name)
        parts = tuple(_inputs_with_answer(workload, model, batch) for batch in chosen)
    if any(has_nonfinite_values(part.answer) for part in parts):
        raise UsageError(f"the model of {name} answers a canary with NaN or infinity; expected finite values")
    return Canaries(
        workload=name,
        choice=choice,
        judge=judge_text(workload.judge),
        shapes={name: list(tensor.shape) for name, tensor in named_tensors(model).items()},
        dtypes=list(dtypes_of(model)),
        weights=model_fingerprint(model),
        environment=environment_of(device, model),
        parts=parts,
    )


def _inputs_with_answer(workload: InferenceWorkload, model: nn.Module, batch: Any) -> CanaryBatch:
    """Inputs with a model's answer to them.

    Raises ``UsageError`` for a model that gives different bits for the same input.
    """
    test = GoldenTest(count_samples(batch))
    test.calibrate(model, [batch], workload.run)
    with torch.no_grad():
        return CanaryBatch(test.batch, test.answer, nesting_of(workload.run(model, batch)))


def environment_of(device: str, model: nn.Module | None) -> str:
    """Text on the environment that bits depend on, such as the device and the torch version.

    The use of torch.compile is included.
    """
    return environment(device) + (", torch.compile" if is_compiled(model) else "")


def parse_comparison(text: str) -> str | float:
    """Parse ``bits``, ``labels`` or a tolerance of 0 or more.

    Raises ``UsageError`` for any other text.
    """
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
    """Compare a model's answers to canaries with the stored answers.

    Args:
        canaries: Inputs and right answers.
        run: Output for a batch of inputs.
        comparison: ``bits``; ``labels``, by the judge of the workload; or a number, the largest allowed difference in a tensor of
            the answer, relative to the largest magnitude stored for the same tensor and input.
        model: Model whose weights are compared, by name, with those that the canaries were made with; ``None`` if there are only
            outputs.
        name: Name of the model, for the report.
        device: Device that the model's inputs must be on.

    Raises:
        UsageError: the model takes other inputs or gives another kind of answer, or bits cannot be compared in this environment.
    """
    if comparison == BITS:
        _check_bits_can_agree(canaries, model, device)
    rule, rows = _stored_rule(canaries) if comparison == LABELS else None, list[CanaryDifference]()
    for part in canaries.parts:
        before, count = [tensor.cpu() for tensor in part.answer], count_samples(part.batch)
        with torch.no_grad(), torch_threads(1):
            after = _answer_now(part.batch, before, run, name, device)
        different = np.any([samples_that_differ(*pair, count).numpy() for pair in zip(before, after, strict=True)], 0)
        largest, relative = _largest_differences(before, after, count)
        changed = different
        if rule is not None:
            incorrect = rule(nested(part.nesting, before), nested(part.nesting, after), part.batch).incorrect
            if len(incorrect) != count:
                raise UsageError(
                    f"{canaries.judge} decides {len(incorrect)} times for {count_text(count, 'input')}, so that "
                    f"labels cannot be compared; {OTHERS}"
                )
            changed = incorrect | np.isinf(largest)
        elif not isinstance(comparison, str):
            changed = ~(relative <= comparison)
        columns = zip(changed, different, largest, relative, strict=True)
        rows += [CanaryDifference(len(rows) + n, *(value.item() for value in row)) for n, row in enumerate(columns, 1)]
    has_known_names = model is not None and named_tensors(model).keys() == canaries.shapes.keys()
    same = model_fingerprint(model) == canaries.weights if model is not None and has_known_names else None
    return CanaryCheck(name, canaries.workload, canaries.choice, str(comparison), tuple(rows), same)


def _stored_rule(canaries: Canaries) -> Judge:
    """The judge that compares labels.

    Raises ``UsageError`` for a user's own judge, which a file cannot store.
    """
    try:
        return judge(canaries.judge)
    except UsageError:
        raise UsageError(
            f"the judge of the canaries is {canaries.judge}, which is not built in, so that labels cannot be compared; {OTHERS}"
        ) from None


def _check_bits_can_agree(canaries: Canaries, model: nn.Module | None, device: str) -> None:
    """Raise ``UsageError`` if the bits of answers may differ here without a fault."""
    here, dtypes = environment_of(device, model), None if model is None else list(dtypes_of(model))
    difference = (canaries.environment, here) if here != canaries.environment else None
    if dtypes is not None and dtypes != canaries.dtypes:
        difference = f"a model in {', '.join(canaries.dtypes)}", ", ".join(dtypes) or "no floating-point type"
    if difference is not None:
        raise UsageError(f"the canaries were made with {difference[0]}, this is {difference[1]}: {BITS_MAY_DIFFER}")


def _answer_now(
    batch: Any, before: Sequence[Tensor], run: Callable[[Any], Any], name: str, device: str
) -> list[Tensor]:
    """A model's present answer to stored inputs, on the CPU.

    Raises ``UsageError`` if its shapes differ from the stored ones.
    """
    try:
        output = run(map_tensors(batch, lambda _, tensor: tensor.to(device, copy=True)))
    except Exception as error:  # the error of a model that is called in another way than it expects
        raise UsageError(
            f"{name} raised {kind_and_line(error)} for the inputs of the canaries; give the model that they were made of"
        ) from None
    after = [leaf.detach().cpu() for leaf in leaves(output)]
    forms = [[tuple(leaf.shape) for leaf in answer] for answer in (before, after)]
    if forms[0] != forms[1]:
        raise UsageError(
            f"{name} answers with shapes {forms[1]}, the canaries have {forms[0]}; give the model that they were made of"
        )
    return after


def _largest_differences(
    before: Sequence[Tensor], after: Sequence[Tensor], count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Largest absolute and relative difference of the answer to each sample; infinite for NaN.

    Each tensor of an answer is compared with its own largest magnitude for that sample, so that a tensor with large values hides
    no other.
    """
    largest, relative = torch.zeros(2, count, dtype=torch.float64)
    for pair in zip(before, after, strict=True):
        has_samples = pair[0].ndim > 0 and len(pair[0]) == count
        first, second = (leaf.double().reshape(count if has_samples else 1, -1) for leaf in pair)
        if first.shape[1]:
            moved = (second - first).abs().nan_to_num(torch.inf, torch.inf).amax(1)
            largest = largest.maximum(moved)
            relative = relative.maximum(torch.where(moved == 0, 0.0, moved / first.abs().amax(1)))
    return largest.numpy(), relative.numpy()
