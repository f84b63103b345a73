"""Operands and outputs of an operation by role, with the outputs that a fault can corrupt.

In products, ``first`` and ``second`` are the factors from the view of hardware: activation and weight of a convolution, both
matrices of an ``addmm`` (whose bias is ``third``), indices and table of an embedding. In other operations they are the tensor
arguments in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unsilent.basics.nested import Path, map_tensors, tensors_in
from unsilent.faults.naming import OPERANDS
from unsilent.sites.corrupting import corruptible, has_plain_memory

_ROLES = {
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm", "_addmm_activation"), (1, 2, 0)),
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), (1, 0)),
}
"""Numbers of the tensor arguments that are first, second and third, if the order differs from that of the arguments."""


PRODUCTS = ("convolution", "addmm", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
"""Operations of two factors; the gradient of each factor is computed from the output gradient and the other factor."""


def operation_name(func: Any) -> str:
    """The short name of an operation: ``relu`` for ``aten.relu_.default``.

    Operations of other libraries keep their namespace: ``mylib.scan``.
    """
    namespace, _, name = func._schema.name.partition("::")
    name = name if name.endswith("__") else name.removesuffix("_")
    return name if namespace == "aten" else f"{namespace}.{name}"


def operand_number(func: Any, operand: str) -> int:
    """Number of an operand among the tensor arguments; -1 for the output."""
    number = OPERANDS.index(operand) - 1
    roles = _ROLES.get(operation_name(func), ())
    return roles[number] if 0 <= number < len(roles) else number


def listed_operand_number(func: Any, args: Sequence[Any], operand: str, entry: int | None) -> int | None:
    """Number of an operand, or of an entry of its list, among the tensor arguments; None if there is none."""
    if entry is None:
        return operand_number(func, operand)
    lists = [list(tensors_in(a)) for a in args if isinstance(a, (list, tuple))]
    number = OPERANDS.index(operand) - 1
    return sum(map(len, lists[:number])) + entry if number < len(lists) and entry < len(lists[number]) else None


def operands_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor arguments: positional ones, then keyword ones."""
    return [*tensors_in(tuple(args)), *tensors_in(tuple(kwargs.values()))]


def first_tensor_list(args: Sequence[Any]) -> Sequence[Any] | None:
    """The first list of tensors among the arguments of an operation on lists; None for any other operation."""
    return next((a for a in args if isinstance(a, (list, tuple)) and any(isinstance(t, Tensor) for t in a)), None)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into, according to its schema."""
    items: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            items += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return items


def corruptible_output(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, number: int = 0
) -> Tensor | None:
    """The output of an operation that a fault can corrupt, or None.

    None for a view of an input, and for uninitialised memory.
    """
    out = next(itertools.islice(tensors_in(result), number, None), None)
    if out is None or not corruptible(out) or gives_uninitialised(func) or is_view(func, args, kwargs, result):
        return None
    return out


def output_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, number: int, entry: int | None
) -> Tensor | None:
    """The corruptible output with this number, or the list entry that an operation on lists returns or writes."""
    if entry is None:
        return corruptible_output(func, args, kwargs, result, number)
    outputs = list(tensors_in(result)) or written_by(func, args, kwargs)
    return outputs[entry] if entry < len(outputs) else None


def is_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether the first output is a view of an input that the operation did not write."""
    out = next(tensors_in(result), None)
    if out is None or not has_plain_memory(out):
        return False
    if torch.Tag.inplace_view in func.tags:
        return True
    memory = out.untyped_storage()._cdata
    if any(has_plain_memory(t) and t.untyped_storage()._cdata == memory for t in written_by(func, args, kwargs)):
        return False
    return any(has_plain_memory(t) and t.untyped_storage()._cdata == memory for t in operands_of(args, kwargs))


def gives_views(func: Any) -> bool:
    """Whether an operation only returns views of its inputs and computes nothing."""
    returns = [r.alias_info for r in func._schema.returns]
    named = operation_name(func) in ("_unsafe_view", "detach", "alias", "lift_fresh")
    return named or (bool(returns) and all(info is not None and not info.is_write for info in returns))


def draws_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers; attention without dropout, for example, does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


def gives_uninitialised(func: Any) -> bool:
    """Whether an operation returns uninitialised memory: ``empty``, ``empty_like``, ``new_empty`` and so on."""
    return operation_name(func).startswith(("empty", "new_empty"))


def same_place(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors consist of the same elements of the same memory."""
    return first is second or (
        first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and (first.storage_offset(), first.shape, first.stride())
        == (second.storage_offset(), second.shape, second.stride())
    )


def exchanged(
    call: tuple[tuple[Any, ...], dict[str, Any]], number: int, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the tensor of this number replaced."""
    left = number

    def change(path: Path, tensor: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        return new if left == -1 else tensor

    args, kwargs = map_tensors(call, change)
    return args, kwargs
