"""A recorded training step: its initial state, batch and results in a file, so that a device can repeat it.

The file has the safetensors format with JSON and a hash of its content (`protection.hashed_file`). Nothing in it is executed,
and it does not contain the code of the step. The expected results are hashes of all tensors after the step, which depend on the
position of each element, and their values, which are read only to name the first wrong element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import leaves_in
from unsilent.checkpoints.hashes import hash_elements
from unsilent.engine.device_placement import environment, place, torch_threads
from unsilent.outcomes.tensors import words_of
from unsilent.protection.hashed_file import FileKind
from unsilent.recovery.own_step import OwnStep, StepFunction, own_code
from unsilent.selftest.mismatch import Mismatch, mismatch
from unsilent.sites.memory import content_of, dtype_name
from unsilent.sites.modules import named_parameters
from unsilent.workloads.registry import load_training
from unsilent.workloads.trainings.base import TrainingState, TrainingWorkload
from unsilent.workloads.trainings.snapshots import first_snapshot_difference, model_tensors
from unsilent.workloads.zoo import TRAININGS

STEPS = 3
"""Number of training steps before the recorded one, so that the optimizer has a state."""
MOST_THREADS = 4096
_FILE = FileKind("recording", "unsilent/recorded-step/", 1, "a recorded step", "unsilent selftest record")


class _Step(Protocol):
    """A training step that can be executed again from the same state."""

    model: nn.Module

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, snapshot: Mapping[str, Any]) -> None: ...

    def run(self) -> Any: ...


class _TrainingStep:
    def __init__(self, training: TrainingWorkload, state: TrainingState) -> None:
        self._training, self._state, self.model = training, state, state.model

    def snapshot(self) -> dict[str, Any]:
        """A snapshot of the training."""
        return self._training.snapshot(self._state)

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the training from a snapshot."""
        self._training.restore_into(self._state, snapshot)

    def run(self) -> Any:
        """Execute the next step of the training and return its loss."""
        return self._training.step(self._state).loss


def record_step(path: str | Path, step: StepFunction, model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """Record a training step of your own.

    Afterwards, model and optimizer have the state from before the step again.

    Args:
        path: File to write.
        step: Called with model, optimizer and batch; does one update and returns the loss. Random numbers of torch have seed 0.
        model: Model whose parameters and buffers are stored.
        optimizer: Optimizer whose state is stored.
        batch: Tensors and plain values in lists, tuples and dicts.

    Raises:
        UsageError: Two executions from the same state differ, or something cannot be stored.
    """
    own_step = OwnStep(step, model, optimizer, batch)
    original = own_step.snapshot()
    try:
        _record(path, own_step, {"training": ""}, batch, str(next(iter(model_tensors(model).values())).device))
    finally:
        own_step.restore(original)


def record_training(path: str | Path, training: str, *, device: str = "cpu") -> None:
    """Record a step of a training given by its name.

    Args:
        path: File to write.
        training: Name of a built-in training, or ``file.py:name`` of your own.
        device: Device on which a built-in training runs.

    Raises:
        UsageError: There is no such training, or two executions of its step differ.
    """
    step = _training_step(training, device)
    for _ in range(STEPS):
        step.run()
    _record(path, step, {"training": training}, None, device)


def _training_step(name: str, device: str) -> _TrainingStep:
    training = load_training(name, {"device": device} if name in TRAININGS else {})
    return _TrainingStep(training, training.start(0))


def _record(path: str | Path, step: _Step, text: dict[str, str], batch: Any, device: str) -> None:
    arrays: dict[str, Tensor] = {}
    before = _encode_value(step.snapshot(), arrays)
    state = _decode_value(before, arrays)
    answers = _answers(step, state)
    if difference := first_snapshot_difference(answers, _answers(step, state)):
        raise UsageError(
            f"two executions of the step from the same state differ: {difference}; "
            "make it deterministic, or test this device without --step first"
        )
    content = {
        **text,
        "before": before,
        "batch": _encode_value(batch, arrays),
        "environment": environment(device),
        "threads": torch.get_num_threads(),
        "hashes": {name: _hash(tensor) for name, tensor in answers.items()},
    }
    _FILE.write(path, content, arrays | {f"after/{name}": tensor for name, tensor in answers.items()})


@dataclass
class RecordedStep:
    """A recorded step that can be executed again."""

    step: _Step
    before: dict[str, Any]
    hashes: Mapping[str, str]
    after: Mapping[str, Tensor]
    threads: int
    operation: str = field(default="recorded step", init=False)
    dtype: str = field(default="as recorded", init=False)

    def execute(self) -> Mismatch | None:
        """Execute the step from its recorded state and compare all tensors bit for bit; None if all are equal."""
        with torch_threads(self.threads):
            answers = _answers(self.step, self.before)
        for name, stored in self.hashes.items():
            got = answers.get(name)
            if got is None or (got.dtype, got.shape) != (self.after[name].dtype, self.after[name].shape):
                raise UsageError(f"the step gives no {name} of the recorded dtype and shape; record it again")
            if _hash(got) != stored:
                expected = self.after[name]
                wrong = (words_of(got) != words_of(expected)).reshape(got.shape)
                return mismatch(f"{self.operation}, {name}", got, expected, wrong)
        return None


def load_recording(path: str | Path, device: str, code: str | None = None) -> RecordedStep:
    """The recorded step in a file.

    Args:
        path: File written by `record_step` or `record_training`.
        device: Device on which the step is executed.
        code: ``file.py:name`` of a training, or of a function that returns step, model and optimizer; ``None`` for a built-in
            one.

    Raises:
        UsageError: The file is not a recording, was made with another device or version of torch, or its code is not known.
    """
    with _FILE.reading(path) as (text, arrays):
        if (here := environment(device)) != text["environment"]:
            raise UsageError(f"it was recorded on {text['environment']}, and bits differ on {here}; record it there")
        before, name = _decode_value(text["before"], arrays), text["training"]
        after = {key.removeprefix("after/"): tensor for key, tensor in arrays.items() if key.startswith("after/")}
        batch = place(_decode_value(text["batch"], arrays), device, None)
        threads, hashes = int(text["threads"]), dict(text["hashes"])
        if set(hashes) != set(after) or not 1 <= threads <= MOST_THREADS:
            raise ValueError("its hashes are not those of its tensors, or it has no number of threads")
    step: _Step
    if name and (code is not None or name in TRAININGS):
        step = _training_step(code or name, device)
    elif code is not None:
        own_step = step = OwnStep(*own_code(code), batch, code)
        own_step.model.to(device)
        own_step.check_fit(before, str(path))
    else:
        of = f"of {name!r}, which is not built in" if name else "of a step of your own"
        wanted = "the training" if name else "a function that returns step, model and optimizer"
        raise UsageError(f"{path} is {of}; give {wanted} with --code FILE.py:NAME")
    return RecordedStep(step, before, hashes, after, threads)


def _answers(step: _Step, before: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors after one execution: gradients, parameters, optimizer state and loss, on the CPU."""
    step.restore(before)
    loss = step.run()
    result = {"/".join(path): tensor for path, tensor in leaves_in(step.snapshot()) if isinstance(tensor, Tensor)}
    result |= {f"gradient/{name}": p.grad for name, p in named_parameters(step.model) if p.grad is not None}
    result |= {"loss": torch.as_tensor(loss, dtype=torch.float64)} if isinstance(loss, (float, Tensor)) else {}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in result.items()}


def _hash(tensor: Tensor) -> str:
    return hash_elements([content_of(tensor)], dtype_name(tensor.dtype), tuple(tensor.shape)).xxh3_128


def _encode_value(value: Any, arrays: dict[str, Tensor]) -> Any:
    """A nested value as JSON, which keeps tuples and whole numbers as keys.

    Its tensors are added to ``arrays``.
    """
    if isinstance(value, Tensor):
        arrays[name := str(len(arrays))] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return {"items": [[key, _encode_value(part, arrays)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {
            type(value).__name__ if type(value) in (list, tuple) else "tuple": [_encode_value(v, arrays) for v in value]
        }
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(
        f"the step's state or batch has a {type(value).__name__}; expected tensors, numbers, texts, lists and dicts"
    )


def _decode_value(value: Any, arrays: Mapping[str, Tensor]) -> Any:
    """The value from which `_encode_value` made JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return arrays[content]
    if kind == "items":
        return {key: _decode_value(part, arrays) for key, part in content}
    parts = [_decode_value(part, arrays) for part in content]
    return parts if kind == "list" else tuple(parts)
