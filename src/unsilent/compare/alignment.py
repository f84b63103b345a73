"""Aligns the layers of two networks by their paths, even if a network is wrapped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unsilent.compare.lock_step import Layers
from unsilent.sites.modules import named_modules

ROOT = "(whole network)"
"""Name of a network that consists of one layer."""


def unreadable(model: nn.Module) -> str:
    """Reason why the layers of a model cannot be read, or an empty text."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return "layers of a network of torch.compile cannot be read: its graph calls no modules and fuses what they compute"
    if isinstance(model, torch.jit.ScriptModule):
        return "layers of a network of torch.jit cannot be read: it does not run hooks of its modules"
    return ""


@dataclass(frozen=True)
class Alignment:
    """The corresponding layers of two networks, by name.

    The name is the path in the original; for a tied layer, the first of its paths.

    Attributes:
        original, deployed: Each distinct layer once. If one network has a layer at several paths, both networks have one name for
            all of them, so that its calls are matched in their order.
        paths: Path in the original, by identity of the layer, for layers with one path whose name stands for several layers.
        unaligned: Paths of the original that the deployed network does not have.
        added: Paths of layers of the deployed network that the original does not have.
    """

    original: Layers
    deployed: Layers
    paths: Mapping[int, str]
    unaligned: tuple[str, ...]
    added: tuple[str, ...]


def align(original: nn.Module, deployed: nn.Module) -> Alignment:
    """Align the layers of two networks."""
    if not any(original.children()):
        return Alignment([(ROOT, original)], [(ROOT, deployed)], {}, (), ())
    layers, theirs = _modules(original), _modules(deployed)
    layers = {name: module for name, module in layers.items() if _is_layer(module)}
    ours, theirs_prefix = max(
        (("", _prefix(layers, theirs)), (_prefix(theirs, layers), "")),
        key=lambda prefixes: sum(other_name(name, *prefixes) in theirs for name in layers),
    )
    partners = {name: partner for name in layers if (partner := other_name(name, ours, theirs_prefix)) in theirs}
    names: dict[int, str] = {}
    paths: dict[int, list[str]] = defaultdict(list)
    for name, partner in partners.items():
        pair = dict.fromkeys((id(layers[name]), id(theirs[partner])))
        group = next((names[module] for module in pair if module in names), name)
        for module in pair:
            names.setdefault(module, group)
            paths[module].append(name)
    shared = {names[module] for module, of_module in paths.items() if len(of_module) > 1}
    return Alignment(
        _layers_with_names([layers[name] for name in partners], names),
        _layers_with_names([theirs[partner] for partner in partners.values()], names),
        {
            module: of_module[0]
            for module, of_module in paths.items()
            if len(of_module) == 1 and names[module] in shared
        },
        tuple(name for name in layers if name not in partners and not ours.startswith(name + ".")),
        _layers_without_counterpart(
            theirs, {partner: layers[name] for name, partner in partners.items()}, theirs_prefix
        ),
    )


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules below the model by path; a tied module has several paths."""
    return {name: module for name, module in named_modules(model, remove_duplicate=False) if name}


def _layers_with_names(modules: Sequence[nn.Module], names: Mapping[int, str]) -> Layers:
    return [(names[number], module) for number, module in {id(module): module for module in modules}.items()]


def _layers_without_counterpart(
    theirs: Mapping[str, nn.Module], originals: Mapping[str, nn.Module], prefix: str
) -> tuple[str, ...]:
    """Layers of the deployed network that have no counterpart in the original.

    The original itself and the replacements of its layers are left out.
    """
    known = {id(theirs[partner]) for partner in originals}
    replaced = tuple(partner + "." for partner, module in originals.items() if not any(module.children()))
    added = {
        id(module): name
        for name, module in reversed(list(theirs.items()))
        if _is_layer(module)
        and id(module) not in known
        and not prefix.startswith(name + ".")
        and not name.startswith(replaced)
    }
    return tuple(reversed(added.values()))


def other_name(name: str, prefix: str, new_prefix: str) -> str:
    """A path with its prefix replaced, such as that of a wrapper of the network."""
    return new_prefix + name.removeprefix(prefix)


def _prefix(inner: dict[str, nn.Module], outer: dict[str, nn.Module]) -> str:
    """The prefix that most often turns a path of ``inner`` into one of ``outer``."""
    counts: Counter[str] = Counter()
    for name in outer:
        places = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
        counts.update(name[:place] for place in places if name[place:] in inner)
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def _is_layer(module: nn.Module) -> bool:
    return not any(module.children()) or any(True for _ in module.parameters(recurse=False))
