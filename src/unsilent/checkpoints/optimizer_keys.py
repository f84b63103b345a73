"""Recognition of the values of optimizers in a checkpoint by the structure of their state dicts.

A state dict of an optimizer is a mapping with ``state`` and ``param_groups``, saved under any key. Torch can flatten it
(``flatten_optimizer_state_dict``): then one mapping has the keys ``state.fc.weight.exp_avg`` and ``param_groups.fc.weight.lr``.
If a whole training was flattened, the keys are ``optim.state.fc.weight.exp_avg``, next to ``model.fc.weight``.

A group of an optimizer lists its ``params``, or contains only numbers; this is checked because modules may have these names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

Keys = tuple[str, ...]
_STATE, _GROUPS = "state", "param_groups"


def undotted(
    paths: Sequence[Sequence[str]], is_array: Sequence[bool], is_section_key: Callable[[str], bool]
) -> list[Keys]:
    """Paths with the nested keys that a flattened optimizer had before flattening; other paths are unchanged.

    Args:
        paths: The keys that lead to every value of a checkpoint.
        is_array: Whether each value is a tensor with axes, which no flattened group holds.
        is_section_key: Whether a key names the section of the values below it.
    """
    heads: dict[Keys, set[str]] = {}
    of_models: set[tuple[Keys, str]] = set()
    for path, array in zip(paths, is_array, strict=True):
        for at, key in enumerate(path):
            if _GROUPS in key and (parts := _split_key(key, _GROUPS)) is not None:
                heads.setdefault(tuple(path[:at]), set()).add(parts[0])
                if array:
                    of_models.add((tuple(path[:at]), parts[0]))
    for above, head in of_models:
        heads[above].discard(head)
    heads = {above: known for above, known in heads.items() if known}
    if not heads:
        return list(map(tuple, paths))
    depths = sorted({len(above) for above in heads})
    return [_path_with_split_key(tuple(path), heads, depths, is_section_key) for path in paths]


def _split_key(key: str, part: str) -> tuple[str, str, str] | None:
    """Split a dotted key into the text before ``part``, the parameter's name, and the name of its value."""
    head, _, rest = f".{key}".partition(f".{part}.")
    parameter, _, value = rest.rpartition(".")
    return (head[1:], parameter, value) if parameter else None


def _path_with_split_key(
    path: Keys, heads: dict[Keys, set[str]], depths: Sequence[int], is_section_key: Callable[[str], bool]
) -> Keys:
    """The path with one key split, if that key is in a mapping with a flattened optimizer."""
    for depth in depths:
        known = heads.get(path[:depth])
        if known is None or depth >= len(path):
            continue
        for part in (_STATE, _GROUPS):
            parts = _split_key(path[depth], part)
            if parts is not None and parts[0] in known:
                head, parameter, value = parts
                return (*path[:depth], *([head] if head else []), part, parameter, value, *path[depth + 1 :])
        section, _, rest = path[depth].partition(".")
        if known != {""} and rest and is_section_key(section):
            return (*path[:depth], section, rest, *path[depth + 1 :])
    return path


def optimizer_keys(paths: Sequence[Keys], is_array: Sequence[bool]) -> list[Keys | None]:
    """The keys that name each value in its optimizer's state dict; None for a value outside of optimizers.

    If there are several optimizers, the keys in which the paths to them differ come first.

    >>> optimizer_keys([("fc.weight",), ("opt", "state", "0", "m"), ("opt", "param_groups", "0", "lr")], [True, True, False])
    [None, ('0', 'm'), ('param_groups', '0', 'lr')]
    """
    places, of_models, with_params = set[Keys](), set[Keys](), set[Keys]()
    for path, array in zip(paths, is_array, strict=True):
        if _GROUPS in path[:-2]:
            place = path[: path.index(_GROUPS)]
            places.add(place)
            if path[len(place) + 2] == "params" and not array:
                with_params.add(place)
            elif array:
                of_models.add(place)
    places -= of_models - with_params
    if not places:
        return [None] * len(paths)
    shared = sum(1 for _ in itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*places, strict=False)))
    depths = sorted({len(place) for place in places})
    return [_keys(path, places, depths, shared) for path in paths]


def _keys(path: Keys, places: set[Keys], depths: Sequence[int], shared: int) -> Keys | None:
    for depth in depths:
        part = path[depth : depth + 1]
        if part in ((_STATE,), (_GROUPS,)) and len(path) > depth + 1 and path[:depth] in places:
            return (*path[shared:depth], *(path[depth + 1 :] if part == (_STATE,) else path[depth:]))
    return None
