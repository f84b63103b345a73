"""Where two fault-free runs part: the first operation whose result differs, by name.

Only for the message about a workload that cannot be repeated. Both runs are watched by a dispatch mode that hashes the
raw bits of what every operation is given from outside and of what it makes. Memory that nobody has written yet is zeroed first,
so that it is not taken for a difference; if that makes the runs equal, it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from unsilent.engine.tape import flatten
from unsilent.engine.values import words_of_storage
from unsilent.sites.calls import Calls
from unsilent.sites.modes import Mode

UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operations whose result is whatever is in the memory."""
_LARGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: hashes of what it is given by Python, of tensors no operation made, and of what it makes."""

    name: str
    given: int
    outside: int
    made: int
    random: bool


class Watch(Mode):
    """Active around one run; ``steps`` then says what it did. ``clear``: zero memory that nobody has written."""

    def __init__(self, model: nn.Module, clear: bool) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._calls = Calls(model)
        self._clear = clear
        self._made: dict[int, Any] = {}
        """Storages of results by address, held so that no address is used twice."""

    def run(self, run: Callable[[], Any]) -> list[Step]:
        """Watch one run."""
        with self._calls, self:
            run()
        self._made.clear()
        return self.steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = self._calls.name(func)
        given = list(flatten((*args, *kwargs.values())))
        numbers = _digest([a for a in given if not isinstance(a, Tensor)])
        outside = 0  # a view reads nothing: the operation that uses it is the one to name
        if not func.is_view:
            outside = _digest([t for t in given if isinstance(t, Tensor) and _storage(t) not in self._made])
        result = func(*args, **kwargs)
        made = [*flatten(result), *_written(func, args, kwargs)]
        for tensor in (t for t in made if isinstance(t, Tensor)):
            if (key := _storage(tensor)) is not None and not func.is_view:
                self._made[key] = tensor.untyped_storage()
        if func._schema.name.rpartition("::")[2] in UNWRITTEN:
            if self._clear:
                _zero(result)
            made = []
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.steps.append(Step(name, numbers, outside, 0 if func.is_view else _digest(made), random))
        return result


def first_difference(run: Callable[[], Any], model: nn.Module) -> str | None:
    """Name the operation at which two runs part, and say how, in words that follow "first at ".

    Args:
        run: one evaluation. model: what it runs; its modules give the operations their names.

    Returns:
        None where every operation gives the same bits twice, or where watching makes the run fail: the caller has an error
        to tell already.
    """
    try:
        found = _first_difference(run, model, clear=True)
        if found is None and (found := _first_difference(run, model, clear=False)) is not None:
            found = f"{found.split(', which ')[0]}, which reads memory that was never written"
    except Exception:
        return None
    return found


def _first_difference(run: Callable[[], Any], model: nn.Module, clear: bool) -> str | None:
    with torch.no_grad():
        one, two = Watch(model, clear).run(run), Watch(model, clear).run(run)
    before = ""
    for a, b in zip_longest(one, two):
        if a is None or b is None or a.name != b.name:
            names = [_quoted(step) for step in (a, b)]
            if not before:
                return f"its beginning, which is {names[0]} in one run and {names[1]} in the other"
            return f"{before}, which is followed by {names[0]} in one run and by {names[1]} in the other"
        if (why := _why(a, b)) is not None:
            return f"{_quoted(a)}, {why}"
        before = _quoted(a)
    return None


def _why(a: Step, b: Step) -> str | None:
    """How two executions of one operation differ; None: not at all."""
    if a.given != b.given:
        return "which Python gives other numbers in each run (a counter, an order?)"
    if a.outside != b.outside:
        return "which reads a tensor that differs and that no operation made (from numpy, or kept from an earlier run?)"
    if a.made == b.made:
        return None
    if a.random:
        return "which draws random numbers"
    return "which gives other bits for the same inputs (a kernel that is not deterministic?)"


def _quoted(step: Step | None) -> str:
    return "nothing" if step is None else repr(step.name[:_LARGEST_NAME])


def _storage(tensor: Tensor) -> int | None:
    """Which memory a tensor is on; None where it has none to speak of."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and the like
        return None


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors an operation writes into, by its schema."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (part for part in flatten(value) if isinstance(part, Tensor))


def _zero(result: Any) -> None:
    for part in flatten(result):
        if isinstance(part, Tensor) and _storage(part) is not None and part.device.type != "meta":
            words_of_storage(part).zero_()


def _digest(values: list[Any]) -> int:
    """Hash of raw bits of tensors, and of what other values say of themselves."""
    digest = xxhash.xxh3_64()
    for value in values:
        if not isinstance(value, Tensor):
            digest.update(bits_of_text(value))
            continue
        digest.update(f"{value.dtype}{tuple(value.shape)}{value.device}".encode())
        if (raw := _bits(value)) is not None:
            digest.update(raw)
    return digest.intdigest()


def bits_of_text(value: Any) -> bytes:
    """Numbers to the last bit; things without a text of their own (their address differs) by their type."""
    if isinstance(value, float):
        return value.hex().encode()
    if value is None or isinstance(value, (bool, int, complex, str, torch.dtype, torch.device, torch.layout)):
        return repr(value).encode("utf-8", "replace")
    return type(value).__name__.encode()


def _bits(tensor: Tensor) -> Any:
    """The bytes of a tensor in C order; None where it has none (sparse, meta)."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.int_repr() if plain.is_quantized else plain
    return plain.contiguous().cpu().flatten().view(torch.uint8).numpy().data
