"""Recovery from an alarm in a fixed order of steps (rungs), each of which works alone.

``layer``      run the layer again from its inputs (mode ``early``): undoes a transient fault in it
``rerun``      run the whole call again: undoes any transient fault
``repair``     restore weights by checksums and parity if their bits are certain, then run the call again
``golden``     restore all weights from a copy in host memory, then run the call again
``clamp``      run the call again, with outputs of layers limited to the range of clean samples
``zero``       run the call again, with values outside of that range set to 0
``elsewhere``  another function or device answers
``abstain``    `CorruptedAnswer` is raised instead of returning an answer with an alarm

This ladder is the project's own: the mitigation of Dr. DNA is not published.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UnsilentError, UsageError, check_name
from unsilent.basics.nested import map_tensors
from unsilent.engine.device_placement import resolve_device
from unsilent.protection.corrupted_weights import CorruptedWeights, bytes_of, repaired_weights
from unsilent.protection.weight_integrity import WeightIntegrity, reject_packed_weights
from unsilent.sites.modules import copied, named_tensors

RUNGS = ("layer", "rerun", "repair", "golden", "clamp", "zero", "elsewhere", "abstain")


class CorruptedAnswer(UnsilentError):
    """Raised instead of an answer with an alarm that no rung of the ladder removed."""


def sort_rungs(recovery: str | Sequence[str]) -> tuple[str, ...]:
    """The rungs in the order of the ladder.

    Raises ``UsageError`` for an unknown rung.
    """
    if not isinstance(recovery, (str, Sequence)):
        raise UsageError(
            f"recovery is of type {type(recovery).__name__}; expected names like ('rerun', 'repair'), or ()"
        )
    requested = [recovery] if isinstance(recovery, str) else list(recovery)
    for rung in requested:
        check_name("recovery", rung, RUNGS)
    return tuple(rung for rung in RUNGS if rung in requested)


class WeightRepair:
    """Restores the weights that a model had when this object was created.

    Args:
        has_parity: Whether bad blocks can be repaired by parity.
        has_copy: Whether a copy of all tensors is kept in host memory.

    Attributes:
        parity_bytes, copy_bytes: Memory of the parity and of the copy, in bytes.
    """

    def __init__(
        self, model: nn.Module, has_parity: bool, has_copy: bool, integrity: WeightIntegrity | None = None
    ) -> None:
        self._model = model
        self._integrity = (integrity or WeightIntegrity(model)) if has_parity else None
        if has_copy:
            reject_packed_weights(model)
        tensors = named_tensors(model) if has_copy else {}
        self._copy = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self.parity_bytes = self._integrity.nbytes if self._integrity else 0
        self.copy_bytes = sum(t.numel() * t.element_size() for t in self._copy.values())

    def repair(self) -> tuple[tuple[CorruptedWeights, ...], tuple[CorruptedWeights, ...]]:
        """Repair bad blocks by parity.

        Returns the repaired weights and the weights that could not be repaired.
        """
        assert self._integrity is not None
        repair = self._integrity.repair()
        return repair.corrected, self._integrity.suspects(repair.refused)

    def restore(self) -> tuple[CorruptedWeights, ...]:
        """Restore all tensors from the copy, and return the weights that differed."""
        result = []
        with torch.no_grad():
            for name, tensor in named_tensors(self._model).items():
                differences = bytes_of(tensor) ^ bytes_of(self._copy[name])
                tensor.data.copy_(self._copy[name])
                if differences.any():
                    result.append(repaired_weights(name, tensor.shape, tensor.element_size(), differences))
        return tuple(result)


Elsewhere = Callable[[bool, tuple[Any, ...], dict[str, Any]], Any]
"""Function that answers instead of the model: takes whether ``generate`` was called, and the arguments of the call."""


def make_elsewhere(elsewhere: Callable[..., Any] | str | torch.device | None, model: nn.Module) -> Elsewhere:
    """The function that answers instead of the model, given or made from a copy of the model on a device.

    After ``generate``, the ``generate`` of the function or copy answers; a function that has none is called itself.

    Raises:
        UsageError: neither a function nor a device is given, or there is no such device.
    """
    if elsewhere is None:
        raise UsageError(
            "recovery 'elsewhere' needs somewhere to run: give elsewhere=FUNCTION, or elsewhere='cuda:1' for a copy of the model"
        )
    if not isinstance(elsewhere, (str, torch.device)) and not callable(elsewhere):
        raise UsageError(
            f"elsewhere is of type {type(elsewhere).__name__}; expected a function that is called as the model is, or a device "
            "like 'cuda:1'"
        )
    if not isinstance(elsewhere, (str, torch.device)):
        return lambda generates, args, kwargs: _method(elsewhere, generates)(*args, **kwargs)
    device = torch.device(resolve_device(str(elsewhere)))
    twin = copied(model).to(device)

    def run(generates: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        origin = next((tensor.device for tensor in named_tensors(model).values()), torch.device("cpu"))
        moved = map_tensors((args, kwargs), lambda _, tensor: tensor.to(device))
        output = _method(twin, generates)(*moved[0], **moved[1])
        return output if origin == device else _output_on_device(output, origin)

    return run


def _method(model: Any, generates: bool) -> Callable[..., Any]:
    """The ``generate`` of a model or function if it is wanted and exists, otherwise the object itself."""
    method: Callable[..., Any] = getattr(model, "generate", model) if generates else model
    return method


def _output_on_device(output: Any, device: torch.device) -> Any:
    """The output with all its tensors on a device; its type is kept."""
    if isinstance(output, Tensor):
        return output.to(device)
    if isinstance(output, dict):
        moved = copy.copy(output)
        for key, value in output.items():
            moved[key] = _output_on_device(value, device)
        return moved
    return map_tensors(output, lambda _, tensor: tensor.to(device))


def limit_to_range(output: Tensor, low: float, high: float, to_zero: bool) -> Tensor:
    """The output with values outside a range set to the limits or to 0.

    NaN becomes 0.
    """
    if to_zero:
        return torch.where((output >= low) & (output <= high), output, torch.zeros_like(output))
    return torch.nan_to_num(output, nan=0.0, posinf=high, neginf=low).clamp(low, high)
