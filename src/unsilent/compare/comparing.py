"""Comparison of two models on the same inputs: disagreement, language measures, layers, worst inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.error_origin import call_user_code
from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.interval import Interval
from unsilent.basics.nested import leaves_in
from unsilent.basics.options import check_confidence
from unsilent.compare.disagreement import SampleRecords, are_probabilities, compare_outputs
from unsilent.compare.language import (
    GreedyRuns,
    LanguageComparison,
    SequenceRecord,
    compare_texts,
    first_differences,
    joined_runs,
    run_greedily,
)
from unsilent.compare.models import ComparedModel, ModelPair, compared_model, load_models, run_where_it_is
from unsilent.compare.tokens import are_next_tokens, tokens_of
from unsilent.outcomes import judge as make_judge
from unsilent.outcomes import judge_for_output, judge_text
from unsilent.outcomes.base import Judge
from unsilent.outcomes.classify import changed_and_nonfinite
from unsilent.outcomes.decision_judges import DecisionJudge, ExactSequence, NextToken, decision_tensor
from unsilent.outcomes.judges import Tolerance
from unsilent.outcomes.tensors import leaves
from unsilent.report.shown import Shown
from unsilent.statistics import bounded_mean, clopper_pearson
from unsilent.workloads.base import InferenceWorkload, call_model, labels_of
from unsilent.workloads.batch_samples import take_samples


def judged_output(judge: Judge, output: Any) -> str:
    """Description of the output that a judge reads, if it reads one of several, or an empty text."""
    named = {".".join(path): tensor for path, leaf in leaves_in(output) for tensor in leaves(leaf)}
    if len(named) < 2 or not isinstance(judge, (DecisionJudge, Tolerance)):
        return ""
    judged = decision_tensor(named, judge, 0)
    place, name = next((i, name) for i, (name, tensor) in enumerate(named.items()) if tensor is judged)
    text = f"output {place + 1} of {len(named)}" if place else f"the first of {len(named)} outputs"
    return f"{name}, {text}" if isinstance(output, Mapping) else text


def in_order_of(original: Any, deployed: Any) -> Any:
    """The deployed model's output, with the keys of a dict in the order of the original's output.

    Raises ``UsageError`` for other keys.
    """
    if not isinstance(original, Mapping) or not isinstance(deployed, Mapping):
        return deployed
    if set(original) != set(deployed):
        names, others = (", ".join(map(repr, output)) or "none" for output in (original, deployed))
        raise UsageError(
            f"the original answers with {names} and the deployed model with {others}; expected outputs of the same names: let "
            "both models return the same ones"
        )
    return {name: in_order_of(part, deployed[name]) for name, part in original.items()}


WORST = 8
"""Number of inputs that the page shows."""
MOST_PROMPTS = 64
"""Most prompts that are continued greedily; whole batches, at least one."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Shown):
    """The result of a comparison of a deployed model with its original.

    Attributes:
        original, deployed: Names of the models.
        judge: Judge that decides whether an answer differs, as text.
        records: Records with a value for each input.
        worst_inputs: Pairs of the number of an input, and the input as a batch of one or as text; those that differ most come
            first.
        language: Measures of language models; ``None`` for other models.
        layers: Result of ``compare_layers``; ``None`` if the layers of a model cannot be read.
        data: Description of the inputs.
        most_changed: Allowed share of changed answers; ``None`` for any share.
        confidence: Confidence of every interval.
        judged_output: Output that the judge reads, as text; empty if there is only one or if the judge gets all.
    """

    REPORT = "unsilent.compare.report:report"
    original: str
    deployed: str
    judge: str
    records: SampleRecords
    worst_inputs: tuple[tuple[int, Any], ...]
    language: LanguageComparison | None
    layers: Any = None
    data: str = ""
    most_changed: float | None = None
    confidence: float = 0.95
    judged_output: str = ""

    @property
    def n(self) -> int:
        """Number of inputs."""
        return len(self.records.changed)

    @property
    def changed(self) -> Interval:
        """Share of inputs whose answer changed."""
        return self._share(self.records.changed)

    @property
    def lost(self) -> Interval:
        """Share of inputs that only the original answers correctly.

        Without labels, the share of inputs whose answer changed.
        """
        return self.changed if self.records.lost is None else self._share(self.records.lost)

    @property
    def gained(self) -> Interval | None:
        """Share of inputs that only the deployed model answers correctly, or None without labels."""
        return None if self.records.gained is None else self._share(self.records.gained)

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if more answers may have changed than is allowed.

        This is decided by the upper limit of their share.
        """
        return int(self.most_changed is not None and self.changed.high > self.most_changed)

    @property
    def measures(self) -> dict[str, Interval]:
        """All shares and means by name, each with its interval."""
        shares = {"changed": self.changed, "identical": self._share(self.records.identical)}
        if self.gained is not None:
            shares |= {"lost": self.lost, "gained": self.gained}
            shares["right, original"] = self._share(self.records.right_before)
            shares["right, deployed"] = self._share(self.records.right_after)
        for name, values in (
            ("confidence delta", self.records.confidence_delta),
            ("top-k overlap", self.records.overlap),
            ("JS divergence", self.records.js),
        ):
            if values is not None:
                shares[name] = bounded_mean(values, self.confidence)
        return shares

    def _share(self, flags: Any) -> Interval:
        return clopper_pearson(int(flags.sum()), len(flags), self.confidence)


@names_arguments
def compare_models(
    original: Any,
    deployed: Any,
    data: Any = None,
    *,
    workload: str | InferenceWorkload | None = None,
    labels: Iterable[Any] | None = None,
    judge: Judge | str | Callable[[Any, Any, Any], Any] | None = None,
    run: Callable[[nn.Module, Any], Any] = call_model,
    options: Mapping[str, str] | None = None,
    weights: str | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare two models that should agree, such as a network and its quantised or compiled copy.

    Args:
        original: Original model: a module, an ONNX Runtime session, a function of a batch, a workload, or a text as for
            ``unsilent compare``.
        deployed: Deployed model: any of these, an adapter such as ``"int8"``, or a checkpoint of the original's architecture.
        data: An iterable of batches; with a workload given by name, its data file.
        workload: Workload that gives architecture, inputs and judge if the original is a checkpoint.
        labels: Right answers for each batch; by default those of the workload, if it has any.
        judge: Judge, as for `Workload`; by default that of the workload, otherwise chosen by the form of the outputs.
        run: Function ``run(model, batch) -> output``; by default one call of the model. A workload uses its own function.
        options: Options of the workload.
        weights: Weights file of the workload.
        confidence: Confidence of every interval.

    Returns:
        Comparison: Whether a deployed model still answers as the original did.

    Raises:
        UsageError: A model cannot be run on the inputs, is not deterministic, or answers with other classes or with NaN.
    """
    check_confidence(confidence)
    by_name = isinstance(data, str) or data is None
    if workload is None and by_name and not isinstance(original, (str, InferenceWorkload)):
        raise UsageError(
            "no inputs were given; expected data=, an iterable of batches such as a list of tensors, or a workload in place of "
            "the original"
        )
    if not by_name:
        _check_iterable(
            "--data", data, "an iterable of batches such as a list of tensors: put a single batch into a list"
        )
    if labels is not None:
        _check_iterable("labels=", labels, "an iterable of the labels of each batch, such as a list of tensors")
    rule = None if judge is None else make_judge(judge)
    if workload is not None or isinstance(original, (str, InferenceWorkload)):
        pair = load_models(
            original, deployed, workload, options=options, data=data if by_name else None, weights=weights
        )
        if by_name:
            return compare_pair(pair, judge=rule, labels=labels, confidence=confidence)
        models, judge, run = (pair.original, pair.deployed), rule or pair.workload.judge, pair.workload.run
    else:
        models = compared_model(original, "the original", run), compared_model(deployed, "the deployed model", run)
        judge = rule
    return compare_on_batches(*models, list(data), judge=judge, labels=labels, run=run, confidence=confidence)


def _check_iterable(name: str, values: Any, expected: str) -> None:
    """Raise ``UsageError`` for a value that is not an iterable of batches, such as a single tensor."""
    if isinstance(values, (Mapping, str)) or not isinstance(values, Iterable) or hasattr(values, "dtype"):
        raise UsageError(f"{name} is a {type(values).__name__}; expected {expected}")


def compare_pair(
    pair: ModelPair,
    *,
    judge: Judge | None = None,
    labels: Iterable[Any] | None = None,
    most_changed: float | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare two models on the inputs of a workload.

    The judge and the labels are by default those of the workload.
    """
    workload = pair.workload
    return compare_on_batches(
        pair.original, pair.deployed, list(workload.batches()), judge=judge or workload.judge,
        labels=labels_of(workload) if labels is None else labels, run=workload.run, show=getattr(workload, "show", None),
        data=str(workload.info.get("data", "")), most_changed=most_changed, confidence=confidence,
    )  # fmt: skip


def compare_on_batches(
    original: ComparedModel,
    deployed: ComparedModel,
    batches: Sequence[Any],
    *,
    judge: Judge | None = None,
    labels: Iterable[Any] | None = None,
    run: Callable[[nn.Module, Any], Any] = call_model,
    show: Callable[[Any], str] | None = None,
    data: str = "",
    most_changed: float | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare two models on these batches.

    ``judge``: ``None`` to choose it by the form of the outputs; ``show``: function that returns the text of a batch of one input.

    Raises ``UsageError`` as `compare_models` does.
    """
    if not batches:
        raise UsageError("there are no inputs to compare the models on; give at least one batch")
    known = [None] * len(batches) if labels is None else list(labels)
    if len(known) != len(batches):
        raise UsageError(
            f"there are labels of {len(known)} batches; expected those of each of the {len(batches)} batches"
        )
    models = original, deployed
    first, second = (_repeatable_answer(model, batches[0]) for model in models)
    chosen = make_judge(_judge_for(batches, first)) if judge is None else judge
    texts_read = isinstance(chosen, NextToken) and are_next_tokens(batches, first)
    probabilities = are_probabilities(chosen, first, in_order_of(first, second), batches[0])
    records, texts = _compare_batches(models, batches, known, chosen, texts_read, probabilities)
    joined = SampleRecords.joined(records)
    return Comparison(
        original.name, deployed.name, judge_text(chosen), joined,
        _inputs(batches, records, joined.worst(WORST), show), texts.result(),
        _compare_layers(original, deployed, batches, run), data, most_changed, confidence,
        judged_output(chosen, first),
    )  # fmt: skip


def _judge_for(batches: Sequence[Any], output: Any) -> str:
    """Name of a judge that suits the output for the first batch."""
    if tokens_of(batches[0], output) is None:
        return judge_for_output(output)
    return "next-token" if are_next_tokens(batches, output) else "exact-sequence"


def _compare_batches(
    models: tuple[ComparedModel, ComparedModel],
    batches: Sequence[Any],
    known: Sequence[Any],
    judge: Judge,
    texts_read: bool,
    probabilities: bool,
) -> tuple[list[SampleRecords], _Texts]:
    """The records of each batch, and the measures of texts.

    If scores of a later batch are not probabilities, all batches are compared again.
    """
    records: list[SampleRecords] = []
    texts = _Texts(texts_read, probabilities)
    for number, (batch, right) in enumerate(zip(batches, known, strict=True)):
        before, answer = (model.answer(batch, number) for model in models)
        after = in_order_of(before, answer)
        if probabilities and not are_probabilities(judge, before, after, batch):
            return _compare_batches(models, batches, known, judge, texts_read, False)
        records.append(compare_outputs(judge, before, after, batch, right, probabilities))
        texts.add(judge, models, batch, before, after)
    return records, texts


@dataclass
class _Texts:
    """Collects measures of language models, batch by batch.

    Attributes:
        read: Whether the outputs are scores of the next tokens of texts.
        probabilities: Whether these scores are already probabilities.
    """

    read: bool
    probabilities: bool
    sequences: list[SequenceRecord] = field(default_factory=list)
    runs: list[GreedyRuns] = field(default_factory=list)
    prompts: int = 0
    problem: str = ""

    def add(
        self, judge: Judge, models: tuple[ComparedModel, ComparedModel], batch: Any, before: Any, after: Any
    ) -> None:
        """Add the outputs of both models for one batch."""
        if isinstance(judge, ExactSequence) and not decision_tensor(before, judge).is_floating_point():
            tokens, others = judge.decision_rows(before), judge.decision_rows(after)
            self.runs.append(first_differences(tokens, others))
        elif self.read and (tokens_read := tokens_of(batch, before)) is not None:
            self.sequences += compare_texts(batch, tokens_read, before, after, self.probabilities)
            if self.prompts < MOST_PROMPTS:
                self._continue(models, batch, tokens_read)

    def _continue(self, models: tuple[ComparedModel, ComparedModel], batch: Any, tokens: Any) -> None:
        """Continue the texts of one batch greedily with both models.

        A model may fail on texts of another length.
        """
        try:
            runs = run_greedily(models[0].run, models[1].run, batch, tokens)
        except Exception as error:  # any error that a model raises for texts of another length
            self.problem = f"a model cannot continue parts of these texts: {first_line(error)}"
            return
        if runs is None:
            self.problem = "texts are padded"
            return
        self.runs.append(runs)
        self.prompts += len(tokens)

    def result(self) -> LanguageComparison | None:
        """The comparison of language models, or None for other models."""
        if not self.sequences and not self.runs:
            return None
        return LanguageComparison(tuple(self.sequences), joined_runs(self.runs), self.problem)


def _repeatable_answer(model: ComparedModel, batch: Any) -> Any:
    """The output for the first batch.

    Raises ``UsageError`` if a second run gives different bits.
    """
    first = model.answer(batch, 0)
    changed, _ = changed_and_nonfinite(first, model.answer(batch, 0), 1)
    if changed.any():
        raise UsageError(
            f"{model.name} answers batch 0 differently when it is run again; only models whose outputs are repeatable can be "
            "compared: switch off dropout and sampling, or set torch.use_deterministic_algorithms(True)"
        )
    return first


def _inputs(
    batches: Sequence[Any],
    records: Sequence[SampleRecords],
    numbers: Sequence[int],
    show: Callable[[Any], str] | None,
) -> tuple[tuple[int, Any], ...]:
    """The inputs with these numbers over all batches, as texts if ``show`` is given.

    There are none if a batch has no tensors.
    """
    import torch

    result = []
    for number in numbers:
        batch, row = 0, number
        while row >= len(records[batch].changed):
            row -= len(records[batch].changed)
            batch += 1
        try:
            sample = take_samples(batches[batch], torch.tensor([row]))
        except UsageError:
            return ()
        result.append((number, sample if show is None else call_user_code(show, sample)))
    return tuple(result)


def _compare_layers(
    original: ComparedModel, deployed: ComparedModel, batches: Sequence[Any], run: Callable[[nn.Module, Any], Any]
) -> Any:
    """The comparison layer by layer, or None if a model has no readable layers."""
    if original.module is None or deployed.module is None:
        return None
    from unsilent.compare.layers import compare_layers

    return compare_layers(original.module, deployed.module, batches, partial(run_where_it_is, run=run))
