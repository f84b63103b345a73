"""Duplication: layers are computed a second time with a copy of their weights, and the bits compared.

Full duplication runs a copy of the whole model and compares its answer: no detector can find more. With ``layers`` or ``share``,
only these layers are computed again, from the inputs that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.detectors.activations.rule import Floats
from unsilent.outcomes.tensors import leaves, samples_that_differ
from unsilent.protection.layer_watch import LayerRun, find_layers
from unsilent.protection.recorded_pass import RecordedPass
from unsilent.sites.modules import copied, named_tensors
from unsilent.workloads.base import call_model


class Duplication:
    """Computes the whole model or some of its layers twice, and compares the bits.

    Args:
        layers: Globs over names of modules, joined by ``|``; if empty, the whole model, or the layers that ``share`` selects.
        share: Share of the parameters of these layers, 0 … 1, that is computed twice; layers with the highest scores come first.
            A layer that does not fit in the rest is skipped.
        scores: Vulnerability of each layer (for example its PVF in a campaign), by name of the module or a part of it. By default
            the smallest layers come first, and among equal ones those that are first in the model.

    Raises:
        UsageError: the share is not above 0 and at most 1.
    """

    kind: ClassVar[str] = "duplication"

    def __init__(self, layers: str = "", share: float = 1.0, scores: Mapping[str, float] | None = None) -> None:
        if not 0 < share <= 1:
            raise UsageError(
                f"duplication: share is {share:g}; expected a share of the parameters above 0 and at most 1"
            )
        parameters = [f"layers={layers}"] if layers else []
        parameters += [f"share={share:g}"] if share < 1 else []
        self.name = self.kind + (f":{','.join(parameters)}" if parameters else "")
        self._glob, self._share, self._scores = layers, share, scores
        self.needs_layers = bool(parameters)
        self._copy: nn.Module | None = None
        self._copies: dict[str, nn.Module] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copied layers."""
        copies = [self._copy] if self._copy is not None else [*self._copies.values()]
        return sum(t.numel() * t.element_size() for copy in copies for t in named_tensors(copy).values())

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any] = (), run: Callable[[nn.Module, Any], Any] = call_model
    ) -> None:
        """Copy the model or its layers.

        Raises ``UsageError`` for a glob that matches no layer, or a share too small for any layer.
        """
        if not self.needs_layers:
            self._copy = copied(model)
            return
        layers = find_layers(model, self._glob.split("|") if self._glob else ("*",))
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in layers.items()}
        scores = self._scores or {name: 1 / max(1, size) for name, size in sizes.items()}
        left = self._share * sum(sizes.values())
        self._copies = {}
        for name in sorted(layers, key=lambda name: -_score_of(name, scores)):
            if sizes[name] <= left:
                self._copies[name] = copied(layers[name])
                left -= sizes[name]
        if any(sizes.values()) and not any(sizes[name] for name in self._copies):
            smallest = min(size for size in sizes.values() if size) / sum(sizes.values())
            raise UsageError(
                f"duplication: share is {self._share:g}, but the smallest layer has {smallest:.2g} of the parameters; "
                "give a higher share"
            )

    def runs_computed_twice(self, recorded: RecordedPass) -> list[LayerRun]:
        """The runs of layers that are computed twice, one per row of the margins.

        There are none if the whole model is computed twice.
        """
        return [run for run in recorded.layers if run.module_name in self._copies]

    def margins(self, recorded: RecordedPass) -> Floats:
        """Margins that are 1 where any bit differs and otherwise 0, float64[layers computed twice, samples].

        There is one row if the whole model is computed twice.
        """
        with torch.no_grad():
            if self._copy is not None:
                again = list(leaves(recorded.run(self._copy, recorded.batch)))
                pairs = [(list(leaves(recorded.output)), again)]
            else:
                runs = self.runs_computed_twice(recorded)
                copies = [run._replace(compute=self._copies[run.module_name]) for run in runs]
                pairs = [([run.output], [copy.run_again()]) for run, copy in zip(runs, copies, strict=True)]
        rows = np.zeros((max(1, len(pairs)), recorded.samples))
        for row, (first, second) in zip(rows, pairs, strict=False):
            if len(first) != len(second):
                row[:] = 1
                continue
            for tensor, tensor_again in zip(first, second, strict=True):
                row[samples_that_differ(tensor, tensor_again, recorded.samples).cpu().numpy()] = 1
        return rows


def _score_of(name: str, scores: Mapping[str, float]) -> float:
    """The score of a layer from the longest name or glob in ``scores`` that matches it, or 0."""
    fitting = [key for key in scores if key == name or name.startswith(f"{key}.") or fnmatchcase(name, key)]
    return scores[max(fitting, key=len)] if fitting else 0.0
