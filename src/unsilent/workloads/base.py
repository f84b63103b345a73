"""Inference workloads: a trained model, its evaluation batches, and the rule for when its answer changed.

`InferenceWorkload` is the protocol. `Workload` is the plain implementation, which needs only a model and an iterable of
batches. The output of ``run`` may be a tensor or any nesting of tuples, lists and dicts of tensors whose first
dimension is the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from unsilent.basics.error_origin import advise_on_arguments, call_user_code, calls_user_code
from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.outcomes.base import Judge
from unsilent.outcomes.scores import SCORE_RANGE, Score
from unsilent.workloads.batch_samples import count_samples

UNNAMED = "custom"
"""Name of a workload or a training of the user without a name of its own."""


@runtime_checkable
class InferenceWorkload(Protocol):
    """The interface of every inference workload that a campaign can run."""

    name: str
    judge: Judge
    components: Mapping[str, Sequence[str]]
    """Name -> globs over parameter names (``"emb_l.*"``). Empty: one component per top-level child module."""
    info: Mapping[str, Any]
    """Facts for the reader of a report: data, reached accuracy … (JSON values)."""

    def model(self) -> nn.Module:
        """The trained model in eval mode.

        Every call returns the same object.
        """
        ...

    def batches(self) -> Sequence[Any]:
        """The evaluation batches on the CPU, in a fixed order.

        Every call returns the same values.
        """
        ...

    def run(self, model: nn.Module, batch: Any) -> Any:
        """The output of one evaluation of one batch, golden or faulty."""
        ...


CALIBRATION, TEST, SHIFTED = CLEAN_PARTS = ("calibration", "test", "shifted")
"""Parts of the clean samples: for calibrating a detector, for counting its false alarms, and unusual correct ones."""

CleanSource = Callable[[str, int], Iterable[Any]] | Mapping[str, Iterable[Any]]
"""The source of the clean inputs of a `Workload`."""


@runtime_checkable
class CalibratedWorkload(InferenceWorkload, Protocol):
    """A workload that can also give clean inputs outside of its evaluation batches."""

    def clean_batches(self, part: str, samples: int) -> Sequence[Any]:
        """Batches of clean inputs for one of the parts `CLEAN_PARTS`, in the form of `batches`.

        The originals of a part are used neither in the training, nor in `batches`, nor in another part. Every call
        returns the same values. All altered copies of one original are in the same batch.

        Args:
            part: One of `CLEAN_PARTS`.
            samples: Requested number of samples; fewer are returned if there are not enough.
        """
        ...


@calls_user_code
def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with one batch and return the output.

    A dict is passed as keyword arguments, a tuple or list as positional arguments, anything else as the only argument.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def as_inputs(batch: Any, run: Callable[[nn.Module, Any], Any]) -> Any:
    """The batch, converted to a tuple if it is a list of inputs for `call_model`.

    The tuple marks its items as inputs of one call, not as samples.
    """
    return tuple(batch) if run is call_model and isinstance(batch, list) else batch


def labels_of(workload: InferenceWorkload) -> Sequence[Any] | None:
    """The labels of each batch from the workload's method ``labels()``, or None without that method."""
    method = getattr(workload, "labels", None)
    labels = call_user_code(method) if callable(method) else None
    return None if labels is None else list(labels)


def score_of(workload: InferenceWorkload) -> Score | None:
    """The score of a workload, or None if it has no method ``score(output, batch)``.

    ``score_name`` and ``score_range`` are read if they exist. Raises ``UsageError`` for an invalid range.
    """
    function = getattr(workload, "score", None)
    if not callable(function):
        return None
    limits = getattr(workload, "score_range", SCORE_RANGE)
    try:
        lowest, highest = map(float, limits)
    except (TypeError, ValueError):
        raise UsageError(f"score_range is {limits!r}; expected two numbers, the lowest score first") from None
    batches = workload.whole_batches() if isinstance(workload, Workload) else None
    return Score(str(getattr(workload, "score_name", "score")), function, lowest, highest, batches)


class Workload:
    """An inference workload made from a model and batches.

    Args:
        model: A trained module in eval mode, or a function returning one (called once).
        batches: Model inputs: a tensor, a dict (keyword arguments) or a tuple (positional arguments) per
            batch. ``labelled=True`` takes the last item of each tuple as the labels, for a data loader that yields
            ``(inputs, labels)``.
        labels: The right answers for each batch, in the order of ``batches``, for reports that compare answers with
            them.
        score: ``score(output, batch)`` -> a number for each sample that depends on that sample alone; higher is better.
            Campaigns report how much of the score is lost by faults. ``batch`` is the given batch, with its labels if
            ``labelled=True``.
        score_name: Name of the score for readers, for example "IoU".
        score_range: The lowest and the highest possible score. An output without an answer has the lowest score.
        show: ``show(batch)`` -> a text for readers that describes a batch of one sample; default: its values, or a
            picture.
        judge: A judge object or the text of one (``"top1"``, ``"threshold:at=0.5"``); see
            ``unsilent.outcomes``.
        components: Name -> a glob over parameter names or a list of them; the first match owns a parameter.
            Default: the top-level children of the model.
        run: ``run(model, batch) -> output``; default: one call of the model.
        input_range: Smallest and largest valid value of an input, for attacks: numbers, or tensors that broadcast to an
            input.
        info: JSON values for the report.
        clean: Clean inputs for detectors, besides ``batches``: a dict from part (see `CLEAN_PARTS`) to an iterable of
            batches, or a function ``clean(part, samples) -> batches``. See `CalibratedWorkload.clean_batches`. If
            several samples are copies of one original, a callable object with a method ``originals_of_samples``; see
            `clean_originals`.
    """

    score: Callable[[Any, Any], Any] | None = None  # a class attribute, so that subclasses may define a method
    score_name: str = "score"
    score_range: tuple[float, float] = SCORE_RANGE

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        batches: Iterable[Any],
        *,
        judge: Judge | str = "top1",
        components: Mapping[str, str | Sequence[str]] | None = None,
        run: Callable[[nn.Module, Any], Any] = call_model,
        input_range: tuple[float | Tensor, float | Tensor] | None = None,
        labelled: bool = False,
        name: str = UNNAMED,
        info: Mapping[str, Any] | None = None,
        clean: CleanSource | None = None,
        labels: Iterable[Any] | None = None,
        show: Callable[[Any], str] | None = None,
        score: Callable[[Any, Any], Any] | None = None,
        score_name: str = "score",
        score_range: tuple[float, float] = SCORE_RANGE,
    ) -> None:
        from unsilent.outcomes import judge as make_judge

        self.name = name
        self.judge = make_judge(judge)
        if not (isinstance(model, nn.Module) or callable(model)):
            raise UsageError(
                f"the first argument of Workload is {type(model).__name__}; expected a torch.nn.Module: Workload(model, batches)"
            )
        if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
            raise UsageError(
                f"batches is a {type(batches).__name__}; expected an iterable of batches: put a single batch into a list, [batch]"
            )
        self.components = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in (components or {}).items()}
        self.info = dict(info or {})
        self._model = model
        self._run = run
        self.input_range = input_range
        self._source = batches
        self._labelled = labelled
        self._labels = labels
        self.show = show
        if score is not None:
            self.score, self.score_name, self.score_range = score, score_name, score_range
        if isinstance(clean, Mapping):
            for part in clean:
                _check_part(part)
        elif clean is not None and not callable(clean):
            raise UsageError(
                f"clean is a {type(clean).__name__}; expected a dict like {{'calibration': batches, 'test': batches}}, "
                "or a function clean(part, samples) -> batches"
            )
        self._clean = clean
        self._clean_parts: dict[str, list[Any]] = {}
        # Batches are read when they are first needed, because this may take long and some commands do not need them.
        self._batches: list[Any] | None = None
        self._whole_batches: list[Any] | None = None

    def model(self) -> nn.Module:
        """The model, which is built on the first call."""
        if not isinstance(self._model, nn.Module):
            self._model = call_user_code(self._model)
            if not isinstance(self._model, nn.Module):
                raise UsageError(
                    f"workload {self.name!r}: expected a torch.nn.Module, got {type(self._model).__name__}"
                )
        return self._model

    def batches(self) -> Sequence[Any]:
        """The evaluation batches, read once from the iterable and kept."""
        if self._batches is None:
            source_batches = call_user_code(list, self._source)
            self._batches = self._unlabelled(source_batches)
            if not self._batches:
                raise UsageError(f"workload {self.name!r} has no batches; give at least one")
            if self._labelled and self._labels is None:
                self._labels = [batch[-1] for batch in source_batches]
            if self._labelled and self.score is not None:
                self._whole_batches = source_batches
        return self._batches

    def whole_batches(self) -> Sequence[Any] | None:
        """The batches with their labels if ``score`` needs the labels, else None."""
        self.batches()
        return self._whole_batches

    def labels(self) -> Sequence[Any] | None:
        """The labels of each batch of `batches`, or None if the workload has no labels."""
        self.batches()
        if self._labels is not None and not isinstance(self._labels, list):
            self._labels = list(self._labels)
        return self._labels

    def clean_batches(self, part: str, samples: int) -> Sequence[Any]:
        """Batches of clean inputs for one part, from the argument ``clean``.

        See `CalibratedWorkload`. If ``clean`` is a dict of batches, only whole batches are returned, up to the number
        of samples.

        Raises:
            UsageError: the workload has no clean inputs of that part.
        """
        _check_part(part)
        if self._clean is None or (isinstance(self._clean, Mapping) and part not in self._clean):
            raise UsageError(
                f"workload {self.name!r} has no clean inputs {part!r}; give them as Workload(…, clean={{{part!r}: batches}})"
            )
        if not isinstance(self._clean, Mapping):
            return self._unlabelled(call_user_code(list, call_user_code(self._clean, part, samples)))
        if part not in self._clean_parts:
            self._clean_parts[part] = self._unlabelled(call_user_code(list, self._clean[part]))
        result: list[Any] = []
        for batch in self._clean_parts[part]:
            if samples <= 0:
                break
            result.append(batch)
            samples -= count_samples(batch)
        return result

    def clean_originals(self, part: str, samples: int) -> Sequence[Sequence[int]]:
        """Numbers of the originals of the samples in each batch of `clean_batches`.

        Samples with the same number are not independent. The numbers come from the method ``originals_of_samples(part,
        samples)`` of ``clean``; without it, each sample is an original of its own.

        Raises:
            UsageError: the workload has no clean inputs of that part.
        """
        known = getattr(self._clean, "originals_of_samples", None)
        if known is not None:
            _check_part(part)
            result: Sequence[Sequence[int]] = call_user_code(known, part, samples)
            return result
        return own_originals(self.clean_batches(part, samples))

    def _unlabelled(self, batches: Iterable[Any]) -> list[Any]:
        """The batches without labels, in the form in which the model is called with them."""
        return [as_inputs(_inputs(batch) if self._labelled else batch, self._run) for batch in batches]

    def run(self, model: nn.Module, batch: Any) -> Any:
        """The output of one evaluation of one batch."""
        try:
            return call_user_code(self._run, model, batch)
        except TypeError as error:
            if self._run is call_model and not self._labelled and isinstance(batch, (tuple, list)):
                advise_on_arguments(error, "if the batches contain labels, pass labelled=True to Workload")
            raise


def own_originals(batches: Iterable[Any]) -> list[range]:
    """Numbers of the originals for batches in which each sample is its own original."""
    ends = list(accumulate((count_samples(batch) for batch in batches), initial=0))
    return [range(first, end) for first, end in pairwise(ends)]


def _inputs(batch: Any) -> Any:
    """The inputs of a labelled batch, without its label."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise UsageError(
            f"labelled=True removes the labels, the last item of each batch, but a batch is {type(batch).__name__}; "
            "give tuples like (inputs, labels), or leave out labelled=True"
        )
    return batch[0] if len(batch) == 2 else tuple(batch[:-1])


def _check_part(part: str) -> None:
    """Raise ``UsageError`` unless ``part`` is one of `CLEAN_PARTS`."""
    if part not in CLEAN_PARTS:
        raise unknown_name_error("part of clean inputs", part, CLEAN_PARTS)
