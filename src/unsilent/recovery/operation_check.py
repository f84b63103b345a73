"""Checks each operation of a step while it runs: it is computed a second time, and once more in float64.

A dispatch mode, active for one execution, does not change the step, which continues with its own results. Each operation is
computed a second time from the same inputs in its own dtype, and once in float64. Later operations do not use the float64 result:
each operation is checked from its own inputs, so the first one that overflows is reported. Collective operations, operations on
tensors that are not plain, and operations that torch does not have in float64 are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.nested import map_tensors, tensors_in
from unsilent.outcomes.tensors import words_of
from unsilent.sites.calling import OperationCall
from unsilent.sites.operands import gives_uninitialised, gives_views, operands_of, operation_name, written_by
from unsilent.sites.training.step import StepInjection
from unsilent.sites.training.step_operation_names import OperationOccurrence, next_number

IN_RANGE = 0.99
"""Share of a dtype's largest number; a smaller result does not overflow by rounding."""
NARROW = (torch.float16, torch.bfloat16, torch.float32)
FAR = 0.1
"""Share of the largest magnitude of inputs and result in float64; rounding of one operation never comes near it."""


class OperationCheck(StepInjection):
    """Context that checks each operation during one or more executions of iterations.

    Attributes:
        overflowed: The first operation with finite inputs whose result is finite only in float64 and out of the dtype's range, if
            no operation before it is `far`: ``MODULE#OP.k``, or ``MODULE#OP.k/grad`` in a backward pass.
        differing: The first operation that gave other bits the second time.
        far: The first operation with any other result that is far from the one in float64.
        checked: Number of operations that were computed in float64.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, whole_step=True)
        self.overflowed = self.differing = self.far = ""
        self.checked = 0
        self._forward_names: dict[int, str] = {}

    def _forward(self, met: OperationOccurrence, call: OperationCall) -> Any:
        self._forward_names[next_number() - 1] = met.name
        return self._checked(met.name, call, lambda: super(OperationCheck, self)._forward(met, call))

    def _backward(self, node: Any, call: OperationCall) -> Any:
        forward = self._forward_names.get(node._sequence_nr(), f"{node.name()}#{operation_name(call[0])}")
        return self._checked(f"{forward}/grad", call, lambda: super(OperationCheck, self)._backward(node, call))

    def _update(self, call: OperationCall) -> Any:
        name = f"update#{operation_name(call[0])}"
        return self._checked(name, call, lambda: super(OperationCheck, self)._update(call))

    def _checked(self, name: str, call: OperationCall, run: Callable[[], Any]) -> Any:
        func, args, kwargs = call
        if not _can_be_checked(call):
            return run()
        with torch.no_grad():
            inputs = (args, kwargs)
            if written_by(func, args, kwargs) or "batch_norm" in operation_name(func):
                inputs = map_tensors(inputs, lambda _, t: t.clone())
            draws = _Generators(args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
            result = run()
            if draws is not None:
                draws.begin_again()
            self._compare(name, call, result, inputs, is_random=draws is not None and not _draws_nothing(call))
            if draws is not None:
                draws.go_on()
        return result

    def _compare(self, name: str, call: OperationCall, result: Any, inputs: tuple[Any, Any], is_random: bool) -> None:
        func = call[0]
        results = _results(func, call[1], call[2], result)
        if not results:
            return
        wide_inputs = (
            None
            if self.overflowed or is_random or not _is_finite(operands_of(*inputs))
            else _arguments_in_float64(inputs)
        )
        again = map_tensors(inputs, lambda _, t: t.clone()) if written_by(func, *inputs) else inputs
        if not self.differing:
            second = _results(func, again[0], again[1], func(*again[0], **again[1]))
            if any(not torch.equal(words_of(a), words_of(b)) for a, b in zip(results, second, strict=True)):
                self.differing = name
        if wide_inputs is None:
            return
        try:
            wide = _results(func, wide_inputs[0], wide_inputs[1], func(*wide_inputs[0], **wide_inputs[1]))
        except (RuntimeError, TypeError, ValueError, IndexError):  # the kernel does not exist
            return
        self.checked += 1
        scale = max((_largest(t) for t in (*operands_of(*wide_inputs), *wide)), default=0.0)
        for narrow_result, wide_result in zip(results, wide, strict=True):
            if narrow_result.dtype not in NARROW or not _is_finite([wide_result]):
                continue
            # After a wrong result, later results prove nothing.
            if self.far:
                continue
            is_out_of_range = _largest(wide_result) >= IN_RANGE * torch.finfo(narrow_result.dtype).max
            if is_out_of_range and not _is_finite([narrow_result]):
                self.overflowed = name
                return
            has_shape = narrow_result.shape == wide_result.shape
            if has_shape and not _largest(narrow_result - wide_result) <= FAR * scale:
                self.far = name


def _can_be_checked(call: OperationCall) -> bool:
    func, args, kwargs = call
    tensors = operands_of(args, kwargs)
    if gives_views(func) or gives_uninitialised(func):
        return False
    are_plain = all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)
    return are_plain and any(t.is_floating_point() and t.numel() for t in tensors)


def _results(func: Any, args: Any, kwargs: Any, result: Any) -> Sequence[Tensor]:
    """The floating-point tensors that an operation returns or writes to."""
    outputs = (*tensors_in(result), *written_by(func, args, kwargs))
    return [t for t in outputs if t.is_floating_point() and t.numel()]


def _arguments_in_float64(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """The arguments converted to float64, including requested dtypes."""
    args, kwargs = map_tensors(inputs, lambda _, t: t.to(torch.float64, copy=True) if t.dtype in NARROW else t.clone())
    return tuple(map(_wide_dtype, args)), {key: _wide_dtype(value) for key, value in kwargs.items()}


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def _draws_nothing(call: OperationCall) -> bool:
    """Whether an operation's dropout probability is 0, or it is an attention operation without dropout."""
    func, args, kwargs = call
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if "dropout_p" in arguments:
        return bool(arguments["dropout_p"] == 0.0)
    return "scaled_dot_product" in func._schema.name


class _Generators:
    """The random generators of an operation, which are reset so that it draws the same numbers twice."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        devices = {t.device for t in operands_of(args, kwargs) if t.is_cuda}
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)]
        self._generators += [g for g in (*args, *kwargs.values()) if isinstance(g, torch.Generator)]
        self._before = [g.get_state() for g in self._generators]

    def begin_again(self) -> None:
        """Reset the generators before the operation is computed again."""
        self._after = [g.get_state() for g in self._generators]
        self._set(self._before)

    def go_on(self) -> None:
        """Restore the generators to their states after the operation."""
        self._set(self._after)

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
