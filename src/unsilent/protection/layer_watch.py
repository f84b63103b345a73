"""Reads the layers of a model in each forward pass, in the order in which they run, and passes what they give to a listener.

A layer that runs several times in a pass is read each time: ``head``, ``head#2``. Layers are modules without children; what
happens between them is seen in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from unsilent.errors import UsageError
from unsilent.protection.layer_readers import Reader, has_reader, make_reader
from unsilent.sites.modules import named_modules


class LayerRun(NamedTuple):
    """One run of a layer.

    Attributes:
        name: Of the module, with the number of the run from the second one on.
        module, inputs, named_inputs, output: As the forward hook has them.
        reading: float32[samples, numbers].
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    named_inputs: Mapping[str, Any]
    output: Tensor
    reading: Tensor


Listener = Callable[[LayerRun], Tensor | None]
"""Is called with each run of a layer; what it returns replaces the output."""


class LayerWatch:
    """Hooks on the layers of a model; a context manager that removes them.

    Args:
        model: Whose weights are right when a layer is first read.
        kind: What is read: of `unsilent.detectors.activations.rule.READINGS`.
        layers: Globs over names of modules.
        seed: Of the choice of sites.
        wanted: Runs of layers that are read; None: all that can be.

    Raises:
        UsageError: a glob matches no layer.

    Attributes:
        listener: Is called with each run; None: nothing is read.
        passes: Forward passes of the whole model so far.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        layers: tuple[str, ...] = ("*",),
        seed: int = 0,
        wanted: frozenset[str] | None = None,
    ) -> None:
        self._kind, self._seed, self._wanted = kind, seed, wanted
        self._readers: dict[str, Reader] = {}
        self._runs: Counter[str] = Counter()
        self.listener: Listener | None = None
        self.passes = 0
        found = [(name, module) for name, module in named_modules(model) if not any(module.children())]
        for glob in layers:
            if not any(fnmatchcase(name, glob) for name, _ in found):
                some = ", ".join(name for name, _ in found[:6])
                raise UsageError(f"no layer is named {glob!r}; the model has {some} …")
        chosen = [(name, module) for name, module in found if any(fnmatchcase(name, glob) for glob in layers)]
        self._hooks = [model.register_forward_pre_hook(self._begin)]
        self._hooks += [module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in chosen]

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, *_: Any) -> None:
        self._runs.clear()
        self.passes += 1

    def _hook(self, name: str) -> Callable[..., Any]:
        def after(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            if self.listener is None or torch.compiler.is_compiling():
                return None
            self._runs[name] += 1
            run = name if self._runs[name] == 1 else f"{name}#{self._runs[name]}"
            if (self._wanted is not None and run not in self._wanted) or not has_reader(self._kind, module, output):
                return None
            with torch.no_grad():
                reading = self.read(run, module, inputs, output)
                return self.listener(LayerRun(run, module, inputs, named, output, reading))

        return after

    def read(self, run: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """The reading of an output, float32[samples, numbers]."""
        if run not in self._readers:
            generator = torch.Generator().manual_seed(self._seed + len(self._readers))
            self._readers[run] = make_reader(self._kind, module, output, generator)
        return self._readers[run](inputs, output)
