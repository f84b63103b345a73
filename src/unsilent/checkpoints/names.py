"""The section of a checkpoint that a value belongs to, and a name for it that is independent of the format.

Examples: ``model/fc.weight``, ``optimizer/fc.weight/exp_avg``, ``scheduler/last_epoch``, ``rng/torch``, ``other/epoch``. Names
are made from the keys that lead to a value in its file, so a checkpoint saved with ``torch.save`` can be compared with one in
shards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Sequence

from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.optimizer_keys import optimizer_keys, undotted
from unsilent.checkpoints.stored_tensors import Shape

SECTIONS = ("model", "optimizer", "scheduler", "rng", "other")
_MODEL = {
    "model", "state_dict", "model_state_dict", "module", "modules", "net", "network", "model_state", "params", "weights",
    "layers",
}  # fmt: skip
_WRAPPERS = {"state", "app", "state_dict", "checkpoint", "ckpt"}
"""Keys around sections, and inside an optimizer's section, that do not describe their content."""
_SECTION_OF = (
    ("optimizer", re.compile(r"optim", re.IGNORECASE)),
    ("scheduler", re.compile(r"sched", re.IGNORECASE)),
    ("rng", re.compile(r"(^|[_.])rng|random|seed", re.IGNORECASE)),
)
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of buffers in a state dict; optimizers do not number buffers."""
MOST_CHARACTERS = 300
"""Largest number of characters of a name."""
_PARAMETER = re.compile(r"model/[^/]+")
"""A name in a state dict; tensors under further keys, such as a moving average of the weights, are not the model's."""
_NUMBERED = re.compile(r"optimizer/(0|[1-9][0-9]{0,8})/([^/]+)")
"""State of a parameter that an optimizer numbers; the number is written as in torch, because ``00`` is another key."""
_MODULE_VALUES = {"_parameters", "_buffers"}
"""Keys of the tensors in an `nn.Module` that was pickled as a whole; its submodules are in ``_modules``."""


def section_and_rest(path: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The section of a value, determined from its keys alone, and the keys that name it in that section.

    Args:
        path: The keys that lead to the value, as texts.

    >>> section_and_rest(("model", "fc.weight")), section_and_rest(("fc.weight",))
    (('model', ('fc.weight',)), ('model', ('fc.weight',)))
    >>> section_and_rest(("optimizer_state_dict", "state", "0", "exp_avg"))
    ('optimizer', ('0', 'exp_avg'))
    >>> section_and_rest(("_modules", "fc", "_parameters", "weight"))
    ('model', ('fc.weight',))
    """
    keys = _with_module_names(path)
    while len(keys) > 1 and keys[0].lower() in _WRAPPERS - _MODEL:
        keys = keys[1:]
    for section, pattern in _SECTION_OF:
        if len(keys) > 1 and pattern.search(keys[0]):
            rest = keys[1:]
            while section == "optimizer" and len(rest) > 1 and rest[0].lower() in _WRAPPERS:
                rest = rest[1:]
            return section, tuple(rest)
        # Only the last part counts, because a parameter's name begins with its module: random_features.weight is not in rng.
        if len(keys) == 1 and section == "rng" and pattern.search(keys[0].rpartition(".")[2]):
            return section, tuple(keys)
    while len(keys) > 1 and keys[0].lower() in _MODEL:
        keys = keys[1:]
    return "model", tuple(keys)


def _with_module_names(path: Sequence[str]) -> list[str]:
    """The keys, with those inside a pickled module replaced by one dotted name, as in a state dict."""
    keys = list(path)
    if _MODULE_VALUES.isdisjoint(keys[:-1]):
        return keys
    at = next(at for at, key in enumerate(keys) if key in _MODULE_VALUES)
    first = at
    while first > 1 and keys[first - 2] == "_modules":
        first -= 2
    return [*keys[:first], ".".join((*keys[first + 1 : at : 2], keys[at + 1])), *keys[at + 2 :]]


def _name(section: str, rest: Sequence[str], is_number: bool) -> str:
    """A value's name with its section: ``model/fc.weight``; a number in no known section is ``other/epoch``."""
    section = "other" if section == "model" and is_number else section
    return _printable("/".join((section, *(key.replace("/", ".") for key in rest))))


def _printable(name: str) -> str:
    """The name as one line of printable text of limited length."""
    short = name if len(name) <= MOST_CHARACTERS else name[: MOST_CHARACTERS - 1] + "…"
    return escape_unprintable(short)[:MOST_CHARACTERS]


def sections_and_rests(paths: Sequence[Sequence[str]], is_array: Sequence[bool]) -> list[tuple[str, tuple[str, ...]]]:
    """The section of every value of a checkpoint, and the keys that name it in that section.

    An optimizer is recognised by its structure, under any key; the other sections by their keys.
    """
    split = undotted(paths, is_array, is_section_key)
    pairs = zip(split, optimizer_keys(split, is_array), strict=True)
    return [section_and_rest(path) if keys is None else ("optimizer", keys) for path, keys in pairs]


def is_section_key(key: str) -> bool:
    """Whether a key alone determines the section of the values under it."""
    return key.lower() in _MODEL or any(pattern.search(key) for _, pattern in _SECTION_OF)


def unique_names(paths: Sequence[Sequence[str]], shapes: Sequence[Shape | None]) -> list[str]:
    """A unique name for every value; if two names would be equal, the later one keeps all of its keys.

    Values with the same keys, which occur only in damaged files, are numbered: ``model/w``, ``model/w'1``, ``model/w'2``.

    Args:
        paths: The keys that lead to each value.
        shapes: Shape of each tensor; None for other values.
    """
    result: list[str] = []
    taken: set[str] = set()
    used: Counter[str] = Counter()
    sections = sections_and_rests(paths, [bool(shape) for shape in shapes])
    for path, shape, (section, rest) in zip(paths, shapes, sections, strict=True):
        name = _name(section, rest, shape is None)
        if name in taken:
            name = free_name(_printable("/".join((name.partition("/")[0], *path))), taken, used)
        taken.add(name)
        result.append(name)
    return result


def free_name(name: str, taken: Container[str], used: Counter[str]) -> str:
    """The name, with a number appended if it is taken.

    Args:
        name: The name to use if it is free.
        taken: The names that are already used.
        used: The last number appended to each name; it is updated.
    """
    result = name
    while result in taken:
        used[name] += 1
        result = f"{name}'{used[name]}"
    return result


def with_parameter_names(
    names: Sequence[str], shapes: Sequence[Shape | None], numbers: Sequence[object]
) -> Sequence[str]:
    """The names, with an optimizer's parameter numbers replaced by the names of the parameters.

    For example, ``optimizer/0/exp_avg`` becomes ``optimizer/fc.weight/exp_avg``.

    They are replaced only if the order is certain: one group has consecutive numbers of exactly as many parameters as the model
    has. With a frozen parameter, or several groups, the file does not tell which number belongs to which parameter. Every tensor
    of more than one element must have its parameter's shape, and new names must not be in use.

    Args:
        names: All names of the checkpoint, without duplicates, with the model's names in the model's order.
        shapes: Shape of each tensor; None for other values.
        numbers: The value of each number; any value for entries that are not numbers.
    """
    in_model = [pair for pair in zip(names, shapes, strict=True) if _PARAMETER.fullmatch(pair[0])]
    parameters = [(name, shape) for name, shape in in_model if shape is not None and not name.endswith(BUFFERS)]
    in_optimizer = [pair for pair in zip(names, numbers, strict=True) if pair[0].startswith("optimizer/")]
    numbered_parameters = [(name, number) for name, number in in_optimizer if "/params/" in name]
    if numbered_parameters != [(f"optimizer/param_groups/0/params/{place}", place) for place in range(len(parameters))]:
        return names
    result = list(names)
    for place, shape in enumerate(shapes):
        numbered = _NUMBERED.fullmatch(names[place])
        if numbered is None:
            continue
        index = int(numbered[1])
        if index >= len(parameters) or shape not in (None, (), (1,), parameters[index][1]):
            return names
        result[place] = f"optimizer/{parameters[index][0].removeprefix('model/')}/{numbered[2]}"
    return result if len(set(result)) == len(result) else names
