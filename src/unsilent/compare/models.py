"""Loads the two models of a comparison, from texts of a command line or from objects.

A text names a workload (built in, ``file.py:name``, ``hf:DIR``, ``FILE.pt2``), a checkpoint of the architecture of the basis, or
an adapter, which makes an adapted copy of the basis. The basis is the workload that gives architecture, inputs and judge:
``workload`` if it is given, otherwise the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from unsilent.basics.errors import UsageError, first_line, unknown_name_error, wrong_value_error
from unsilent.basics.nested import map_tensors
from unsilent.engine.device_placement import place
from unsilent.outcomes.classify import has_nonfinite_values
from unsilent.outcomes.tensors import array_of, leaves
from unsilent.sites.modules import copied, mode_readers, reject_training_mode
from unsilent.workloads.base import CALIBRATION, UNNAMED, CalibratedWorkload, InferenceWorkload, call_model
from unsilent.workloads.registry import is_weights_file, load
from unsilent.workloads.saved_files import read_weights, state_dict_misfit
from unsilent.workloads.zoo import HF, ZOO

CALIBRATION_SAMPLES = 200
"""Maximum number of clean inputs for the calibration of an adapter."""


@dataclass(frozen=True, eq=False)
class ComparedModel:
    """One of two models that should agree.

    Attributes:
        name: Name that the user gave.
        run: Function that returns the output for a batch of inputs.
        module: Network whose layers can be read; ``None`` if only outputs are available (a callable, an ONNX session).
    """

    name: str
    run: Callable[[Any], Any]
    module: nn.Module | None = None

    def answer(self, batch: Any, number: int) -> Any:
        """The output for batch ``number`` on the CPU.

        Raises ``UsageError`` if the model cannot run or the output is not finite.
        """
        try:
            with torch.no_grad():
                output = map_tensors(self.run(batch), lambda _, tensor: tensor.cpu())
        except UsageError:
            raise
        except Exception as error:  # any error that a model raises for inputs that do not fit it
            raise UsageError(
                f"{self.name} cannot run on batch {number}: {first_line(error)}; give inputs that both models take"
            ) from None
        if has_nonfinite_values(output):
            raise UsageError(
                f"{self.name} answers batch {number} with NaN or infinity; only finite outputs can be compared: repair the "
                "model, or leave out these inputs"
            )
        return output


@dataclass(frozen=True, eq=False)
class ModelPair:
    """Two models to compare, and the workload that gives inputs, judge and labels."""

    original: ComparedModel
    deployed: ComparedModel
    workload: InferenceWorkload


def compared_model(model: Any, name: str, run: Callable[[nn.Module, Any], Any] = call_model) -> ComparedModel:
    """Wrap a module, an ONNX Runtime session or a function of a batch for a comparison.

    A function is called like a module: a dict gives keyword arguments, a tuple positional ones.
    """
    if isinstance(model, ComparedModel):
        return model
    if isinstance(model, nn.Module):
        reject_training_mode(mode_readers(model))
        return ComparedModel(name, partial(run_where_it_is, model, run=run), model)
    if hasattr(model, "get_inputs") and hasattr(model, "run"):
        return ComparedModel(name, partial(_run_session, model))
    if callable(model):
        return ComparedModel(name, partial(run, model))
    raise wrong_value_error(name, model, "a torch.nn.Module, an ONNX Runtime session or a function of a batch")


def load_models(
    original: Any,
    deployed: Any,
    workload: str | InferenceWorkload | None = None,
    *,
    options: Mapping[str, str] | None = None,
    data: str | None = None,
    weights: str | None = None,
) -> ModelPair:
    """Load the two models of a comparison from texts or objects.

    Args:
        original: A workload, or with ``workload`` also a checkpoint, an adapter or an object that `compared_model` accepts.
        deployed: A workload, a checkpoint, an adapter or an object that `compared_model` accepts.
        workload: The basis; ``None`` if the original is the basis.
        options: Options of the basis; if ``deployed`` is a built-in workload or a folder, it gets those that it has.
        data: Data file of the basis.
        weights: Weights file of the basis; if ``None`` and it needs one, the checkpoint ``original`` is used.

    Raises:
        UsageError: a text names no model, a checkpoint does not fit the architecture, or the basis cannot be loaded.
    """
    if workload is None and isinstance(original, str) and is_weights_file(original):
        raise UsageError(
            f"{original} holds weights, not a model to run; name a workload of its architecture with --workload"
        )
    basis = original if workload is None else workload
    if isinstance(basis, InferenceWorkload):
        loaded = basis
    else:
        needs_weights = basis in ZOO and ZOO[basis].weights == "required"
        if weights is None and needs_weights and isinstance(original, str) and is_weights_file(original):
            weights = original
        loaded = load(basis, options, data=data, weights=weights)

    def make(source: Any, role: str) -> ComparedModel:
        if source is basis:
            return compared_model(
                loaded.model(), _name(loaded, source if isinstance(source, str) else role), loaded.run
            )
        if isinstance(source, InferenceWorkload):
            return compared_model(source.model(), _name(source, role), source.run)
        if not isinstance(source, str):
            return compared_model(source, role, loaded.run)
        named = _name(loaded, basis if isinstance(basis, str) else "the workload")
        module, run = _module(source, loaded, named, options or {}, {"data": data, "weights": weights})
        return compared_model(module, source, run)

    return ModelPair(make(original, "the original"), make(deployed, "the deployed model"), loaded)


def calibration_batches(workload: InferenceWorkload) -> Sequence[Any]:
    """Clean inputs for calibration, if possible other ones than those that are compared."""
    if isinstance(workload, CalibratedWorkload):
        try:
            return workload.clean_batches(CALIBRATION, CALIBRATION_SAMPLES)
        except UsageError:  # no inputs are left, or the user's own workload has none
            pass
    return workload.batches()


def _name(workload: InferenceWorkload, otherwise: str) -> str:
    """The name of a workload, or ``otherwise`` for a workload without a name."""
    return otherwise if workload.name == UNNAMED else workload.name


def _module(
    text: str, loaded: InferenceWorkload, name: str, options: Mapping[str, str], files: Mapping[str, str | None]
) -> tuple[nn.Module, Callable[[nn.Module, Any], Any]]:
    """The network that a text names, and the function that runs it on a batch.

    ``name``: name of the basis in error messages.
    """
    if is_weights_file(text):
        return _with_weights(loaded.model(), text, name), loaded.run
    if text.endswith(".pt2"):
        from unsilent.workloads.exported import load_program

        return load_program(text), loaded.run
    if not _names_workload(text):
        from unsilent.compare.adapters.names import ADAPTERS, adapt, first_adapter, is_adapter

        if not is_adapter(text):
            error = unknown_name_error("model", first_adapter(text), [*ADAPTERS, *ZOO], limit=40)
            raise UsageError(
                f"{error} Or give a checkpoint FILE.pt, a program FILE.pt2, a folder hf:DIR or a workload FILE.py:NAME"
            )
        return adapt(loaded.model(), text, calibration_batches(loaded), loaded.run), loaded.run
    entry = HF if text.startswith("hf:") else ZOO.get(text)
    known = {key: value for key, value in options.items() if entry is not None and key in entry.options}
    data, weights = (files[key] if entry and getattr(entry, key) != "no" else None for key in ("data", "weights"))
    deployed_workload = load(text, known, data=data, weights=weights)
    return deployed_workload.model(), deployed_workload.run


def _names_workload(text: str) -> bool:
    """Whether a text has the form of a workload.

    Adapters such as ``prune:0.8`` or ``int8:tensor`` do not have it.
    """
    place, _, name = text.partition("+")[0].partition(":")
    if text in ZOO or ("/" in text and name) or place.endswith(".py") or place == "hf":
        return True
    from unsilent.compare.adapters.names import is_adapter

    return name.isidentifier() and not is_adapter(text)


def _with_weights(model: nn.Module, path: str, basis: str) -> nn.Module:
    """A copy of a model with the weights of a checkpoint."""
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in read_weights(path).items()}
    state_of_model = model.state_dict()
    if problem := state_dict_misfit(state_of_model, state, basis):
        raise UsageError(f"{path} does not fit {basis}: it {problem}; give a checkpoint of that architecture")
    result = copied(model)
    result.load_state_dict({**state_of_model, **state})
    return result


def run_where_it_is(model: nn.Module, batch: Any, run: Callable[[nn.Module, Any], Any]) -> Any:
    """The output for a batch, which is moved to the device of the model first."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return run(model, batch if first is None else place(batch, str(first.device), None))


def _run_session(session: Any, batch: Any) -> Any:
    """The outputs of an ONNX Runtime session, or its only output.

    Inputs are given by name or in order.
    """
    names = [node.name for node in session.get_inputs()]
    feeds = batch if isinstance(batch, Mapping) else dict(zip(names, leaves(batch), strict=False))
    outputs = session.run(None, {name: array_of(feeds[name]) for name in names if name in feeds})
    return outputs[0] if len(outputs) == 1 else list(outputs)
