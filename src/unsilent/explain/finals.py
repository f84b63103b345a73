"""The state at the end of a loop: bits of parameters, buffers, optimizer state and the returned value."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from unsilent.engine.digests import digest
from unsilent.sites.modules import named_tensors, parameters_of


class FinalStateRecorder:
    """Collects every module that is called while the recorder is active."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._handle: Any = None

    def __enter__(self) -> FinalStateRecorder:
        self._handle = register_module_forward_pre_hook(self._note_called_module)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._handle.remove()

    def _note_called_module(self, module: nn.Module, args: Any) -> None:
        self._modules.setdefault(id(module), module)

    def hashes(self, optimizers: Sequence[Optimizer], returned: Any) -> list[tuple[str, int]]:
        """Name and hash of every tensor at the end, in the same order in each run."""
        mapping: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (
            *self._of_modules(returned),
            *_of_optimizers(optimizers),
            *_tensors_returned(returned, "returned"),
        ):
            mapping.setdefault(id(tensor), (name, tensor))
        return [(name, digest([tensor])) for name, tensor in mapping.values()]

    def _of_modules(self, returned: Any) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the outermost modules.

        Names contain the class of the module and its number.
        """
        modules = [*self._modules.values(), *([returned] if isinstance(returned, nn.Module) else [])]
        inside = {id(part) for m in modules for part in m.modules() if part is not m}
        counts: Counter[str] = Counter()
        for module in {id(m): m for m in modules if id(m) not in inside}.values():
            kind = type(module).__name__
            number = f"[{counts[kind]}]" if counts[kind] else ""
            counts[kind] += 1
            for name, tensor in named_tensors(module).items():
                yield f"{kind}{number}.{name}", tensor


def _of_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    for number, optimizer in enumerate(optimizers):
        kind = f"{type(optimizer).__name__}[{number}]"
        for i, p in enumerate(parameters_of([optimizer])):
            yield f"{kind} parameter {i}", p
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    yield f"{kind} parameter {i} {key}", value


def _tensors_returned(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in the returned value.

    Numbers are left out, because one may be a measured time.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_returned(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors_returned(item, f"{name}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_returned(getattr(value, field.name), f"{name}.{field.name}")
