"""The operations of one evaluation as sites, and the faults applied to them while they run.

One dispatch mode sees every operation with its real operands, below autograd and module hooks. It changes only values with a
fault: a run with the mode and without faults gives the same bits, which `unsilent.sites.survey` checks.

An operation can be corrupted at ``out``, its first output, if the operation created or wrote this memory (not a view of an
operand that it only read, not uninitialised memory), and at ``first`` and ``second``, its tensor arguments in positional order.
A corrupted argument is a corrupted copy that only this operation sees; an argument that the operation writes is corrupted in its
own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from unsilent.faults import Fault
from unsilent.faults.naming import OPERANDS, PHASES, SiteName, parse_site
from unsilent.sites.caches import KvCacheObserver, kv_cache_entries
from unsilent.sites.calling import AimedFault, corrupted_call
from unsilent.sites.calls import OperationNamer
from unsilent.sites.corrupting import corruptible
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.landing import Landings
from unsilent.sites.operands import corruptible_output, gives_uninitialised, is_view, operand_number, operands_of

Tell = Callable[[SiteName, "Tensor | None", "int | None"], None]
"""Function that receives each site in the run: name, tensor (None if the operation cannot be corrupted), occurrence."""


class OperationInjector(DispatchMode):
    """Names every operation of one evaluation of a batch, applies faults, and reports corruptible sites.

    Args:
        model: Model whose modules give the names.
        faults: ``op:`` and ``kv:`` faults of this evaluation.
        on_site: Function that is called with every site in the run.
        operands: Operands (``first``, ``second``) that are reported in addition to ``out``.

    Attributes:
        landings: Faults that were applied, and faults that did not fit.
    """

    def __init__(
        self, model: nn.Module, faults: Sequence[Fault] = (), on_site: Tell | None = None, operands: Sequence[str] = ()
    ) -> None:
        self._calls = OperationNamer(model)
        super().__init__(self._calls)
        self._tell = on_site
        self._operands = [name for name in OPERANDS[1:] if name in operands]
        self._aims: dict[str, list[AimedFault]] = {}
        self._cached: list[tuple[str, Fault]] = []
        for fault in faults:
            site = parse_site(fault.site)
            if site.kind == "kv":
                self._cached.append((f"{site.name}/{site.operand}", fault))
            elif site.phase == PHASES[0]:
                self._aims.setdefault(site.name, []).append(AimedFault(site, fault))
        self._caches = KvCacheObserver(model, self._cache) if self._cached or on_site else None
        self.landings = Landings()

    def _around(self, stack: ExitStack) -> None:
        self.landings = Landings()
        super()._around(stack)
        if self._caches:
            stack.enter_context(self._caches)

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._calls.next_name(func)
        aims = self._aims.get(name)
        result = corrupted_call((func, args, kwargs), aims, self.landings) if aims else func(*args, **kwargs)
        if self._tell is not None:
            self._describe(self._tell, name, func, args, kwargs, result)
        return result

    def _cache(self, number: int, cache: Any) -> None:
        """Corrupt and report the key/value cache that a call receives."""
        result = kv_cache_entries(cache)
        for name, fault in self._cached:
            if fault.occurrence == number and name in result:
                self.landings.corrupt(parse_site(fault.site), fault, result[name], False)
        for name, tensor in result.items() if self._tell else ():
            layer, _, entry = name.partition("/")
            self._tell(SiteName("kv", layer, "", entry), tensor, number)  # type: ignore[misc]

    def _describe(
        self, tell: Tell, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        tell(SiteName("op", name, "fwd", "out"), corruptible_output(func, args, kwargs, result), None)
        if not self._operands or gives_uninitialised(func) or is_view(func, args, kwargs, result):
            return
        tensors = operands_of(args, kwargs)
        for operand in self._operands:
            number = operand_number(func, operand)
            if number < len(tensors) and corruptible(tensors[number]):
                tell(SiteName("op", name, "fwd", operand), tensors[number], None)
