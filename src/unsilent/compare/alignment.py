"""Layers of two networks aligned by their path, whatever wraps the networks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from unsilent.sites.modules import named_modules


def unreadable(model: nn.Module) -> str:
    """Why the layers of a model cannot be read; empty where they can."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return "layers of a network of torch.compile cannot be read: its graph calls no modules and fuses what they compute"
    if isinstance(model, torch.jit.ScriptModule):
        return "layers of a network of torch.jit cannot be read: it does not run hooks of its modules"
    return ""


def align(original: nn.Module, deployed: nn.Module) -> tuple[dict[str, tuple[nn.Module, nn.Module]], tuple[str, ...]]:
    """The layers of the original by name, each with its counterpart, and the names of those that have none."""
    modules = dict(named_modules(original))
    layers = {name: module for name, module in modules.items() if name and _is_layer(module)}
    theirs = {name: module for name, module in named_modules(deployed) if name}
    ours, other = max(
        (("", _prefix(layers, theirs)), (_prefix(theirs, layers), "")),
        key=lambda found: sum(other_name(name, *found) in theirs for name in layers),
    )
    pairs = {
        name: (module, theirs[partner])
        for name, module in layers.items()
        if (partner := other_name(name, ours, other)) in theirs
    }
    return pairs, tuple(name for name in layers if name not in pairs)


def other_name(name: str, prefix: str, other: str) -> str:
    """A path with another prefix, such as that of what wraps the network."""
    return other + name.removeprefix(prefix)


def _prefix(inner: dict[str, nn.Module], outer: dict[str, nn.Module]) -> str:
    """What most often stands before a path of ``inner`` to make one of ``outer``."""
    counts: Counter[str] = Counter()
    for name in outer:
        places = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
        counts.update(name[:place] for place in places if name[place:] in inner)
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def _is_layer(module: nn.Module) -> bool:
    return not any(module.children()) or any(True for _ in module.parameters(recurse=False))
