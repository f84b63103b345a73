"""The operations of one evaluation as sites: which can be struck, and faults applied to them while they run.

One dispatch mode sees every operation with its real operands, below autograd and module hooks. It changes nothing but what
a fault names: a run with the mode on and no fault gives the same bits, which `unsilent.sites.survey` checks.

An operation can be struck at ``out``, its first output, where that is memory it made or wrote (no view of an operand that
it only read, nothing uninitialised), and at ``first`` and ``second``, its tensor arguments in positional order. A struck
argument is a corrupted copy that this operation alone sees; one that the operation writes is struck in its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.faults import Fault
from unsilent.faults.naming import OPERANDS, SiteName, parse_site
from unsilent.sites.caches import Caches, entries
from unsilent.sites.calls import Calls, operation_name
from unsilent.sites.modes import Mode
from unsilent.sites.striking import corrupt, corrupted_copy, misfit, plain, strikeable

Tell = Callable[[SiteName, "Tensor | None", "int | None"], None]
"""Told of each site that is met: its name, its tensor (None where the operation cannot be struck), its occurrence."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments or results in positional order, lists flattened."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def operands_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor arguments: positional ones, then those by keyword."""
    return [*tensors_in(tuple(args)), *tensors_in(tuple(kwargs.values()))]


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into, by its schema."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def struck_output(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Tensor | None:
    """The output of an operation that a fault can strike; None where it has none (see the module)."""
    out = next(tensors_in(result), None)
    if out is None or not strikeable(out) or gives_uninitialised(func) or is_view(func, args, kwargs, result):
        return None
    return out


def is_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether the first output is memory of an argument that the operation only read, or gave another shape (``t_``)."""
    out = next(tensors_in(result), None)
    if out is None or not plain(out):
        return False
    if torch.Tag.inplace_view in func.tags:
        return True
    memory = out.untyped_storage()._cdata
    if any(plain(t) and t.untyped_storage()._cdata == memory for t in written_by(func, args, kwargs)):
        return False
    return any(plain(t) and t.untyped_storage()._cdata == memory for t in operands_of(args, kwargs))


def gives_uninitialised(func: Any) -> bool:
    """Whether an operation gives memory that nothing has written yet: ``empty``, ``empty_like``, ``new_empty`` …"""
    return operation_name(func).startswith(("empty", "new_empty"))


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.storage_offset(), one.shape, one.stride()) == (other.storage_offset(), other.shape, other.stride())
    )


class Operations(Mode):
    """Active around one evaluation of one batch: names every operation, applies faults, tells what could be struck.

    Args:
        model: whose modules give the names. faults: ``op:`` and ``kv:`` faults of this evaluation.
        tell: told of every site that is met. operands: which of ``first`` and ``second`` it is told of beside ``out``.

    Attributes:
        landed: faults that were applied. misfits: (fault, reason) of those whose site came with another dtype or shape.
    """

    def __init__(
        self, model: nn.Module, faults: Sequence[Fault] = (), tell: Tell | None = None, operands: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._calls = Calls(model)
        self._tell = tell
        self._told = [name for name in OPERANDS[1:] if name in operands]
        self._faults: dict[str, list[tuple[str, Fault]]] = {}
        self._cached: list[tuple[str, Fault]] = []
        for fault in faults:
            site = parse_site(fault.site)
            if site.kind == "kv":
                self._cached.append((f"{site.name}/{site.operand}", fault))
            else:
                self._faults.setdefault(site.name, []).append((site.operand, fault))
        self._caches = Caches(model, self._cache) if self._cached or tell else None
        self._hooks = ExitStack()
        self.landed: list[Fault] = []
        self.misfits: list[tuple[Fault, str]] = []

    def __enter__(self) -> Operations:
        self.landed, self.misfits = [], []
        with ExitStack() as stack:
            stack.enter_context(self._calls)
            if self._caches:
                stack.enter_context(self._caches)
            super().__enter__()
            self._hooks = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self._calls.name(func)
        kwargs = kwargs or {}
        mine = self._faults.get(name)
        if mine:
            args, kwargs = self._operands(func, args, kwargs, mine)
        result = func(*args, **kwargs)
        for operand, fault in mine or ():
            if operand == "out":
                out = struck_output(func, args, kwargs, result)
                self._apply(fault, out, corrupt)
        if self._tell is not None:
            self._describe(self._tell, name, func, args, kwargs, result)
        return result

    def _operands(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], faults: Sequence[tuple[str, Fault]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with faults in them."""
        for operand, fault in faults:
            number = OPERANDS.index(operand) - 1
            if number < 0:
                continue
            tensors = operands_of(args, kwargs)
            if number >= len(tensors):
                self.misfits.append((fault, f"the operation has {len(tensors)} tensor arguments"))
                continue
            old = tensors[number]
            if any(same_place(old, t) for t in written_by(func, args, kwargs) if plain(t) and plain(old)):
                self._apply(fault, old, corrupt)
            elif (new := self._apply(fault, old, corrupted_copy)) is not None:
                args, kwargs = _exchanged((args, kwargs), number, new)
        return args, kwargs

    def _apply(self, fault: Fault, tensor: Tensor | None, how: Callable[[Tensor, Fault], Any]) -> Any:
        """Strike a tensor if the fault fits it, else remember why it does not."""
        why = "it cannot be struck: a view, or empty" if tensor is None else misfit(tensor, fault)
        if tensor is None or why:
            self.misfits.append((fault, why))
            return None
        done = how(tensor, fault)
        self.landed.append(fault)
        return done

    def _cache(self, number: int, cache: Any) -> None:
        """Strike and describe the key/value cache that a call is given."""
        found = entries(cache)
        for name, fault in self._cached:
            if fault.occurrence == number and name in found:
                self._apply(fault, found[name], corrupt)
        for name, tensor in found.items() if self._tell else ():
            layer, _, entry = name.partition("/")
            self._tell(SiteName("kv", layer, "", entry), tensor, number)  # type: ignore[misc]

    def _describe(
        self, tell: Tell, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        tell(SiteName("op", name, "fwd", "out"), struck_output(func, args, kwargs, result), None)
        if not self._told or gives_uninitialised(func) or is_view(func, args, kwargs, result):
            return
        tensors = operands_of(args, kwargs)
        for operand in self._told:
            number = OPERANDS.index(operand) - 1
            if number < len(tensors) and strikeable(tensors[number]):
                tell(SiteName("op", name, "fwd", operand), tensors[number], None)


def _exchanged(
    call: tuple[tuple[Any, ...], dict[str, Any]], number: int, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with their tensor of that number replaced."""
    left = number

    def walk(value: Any) -> Any:
        nonlocal left
        if isinstance(value, Tensor):
            left -= 1
            return new if left == -1 else value
        return type(value)(walk(v) for v in value) if isinstance(value, (tuple, list)) else value

    args, kwargs = call
    return tuple(walk(a) for a in args), {key: walk(value) for key, value in kwargs.items()}
