"""DeepSpeed ZeRO folders: a file with the model's state, and a file with the optimizer's state for each rank.

Follows DeepSpeed 0.19.8. All files are archives of ``torch.save``. The fp32 weights and the optimizer's state are flattened and
divided among the ranks; ``param_shapes`` in the model's file gives the order of the parameters:

    stage 1, 2   a group of parameters one after the other, divided into one partition for each rank
    stage 3      every parameter divided into equal parts; a rank's parts one after the other in its groups

The parts of a parameter become one tensor: ``optimizer/fc.weight/fp32`` are the weights that the optimizer updates, next to
``optimizer/fc.weight/exp_avg``. The padding after parameters and partitions is not listed. If the division is not certain (more
than one model-parallel rank, experts with their own groups, lengths that do not fit), partitions are listed undivided, with their
rank.

The weights of an expert (``layer_0_expert_3_mp_rank_00_model_states.pt``) and of a layer of a pipeline
(``layer_03-model_states.pt``) get their names in the whole model, if there is one model-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import Call, Mapped
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats import zero_partitions
from unsilent.checkpoints.formats.torch_pickle import key_text, size_values
from unsilent.checkpoints.formats.torch_zip import ArchiveValue, read_archive, with_names
from unsilent.checkpoints.formats.zero_partitions import Flat, Layout, Parameter
from unsilent.checkpoints.stored_tensors import Shape, StoredTensor

NAME = "DeepSpeed"
_LATEST = "latest"
_MOST_LATEST = 1000
_FRAGMENTS = "frozen_param_fragments"
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<mp>\d{1,6})_(?P<kind>model|optim)_states\.pt",
    re.ASCII,
)
_OTHER = re.compile(r"(layer_|expp_rank_|expert_).*_states\.pt")
_EXPERT = re.compile(r"layer_\d{1,6}_expert_\d{1,6}_mp_rank_(?P<mp>\d{1,6})_model_states\.pt", re.ASCII)
_LAYER = re.compile(r"layer_(?P<number>\d{1,6})(?:-model_(?P<mp>\d{1,6}))?-model_states\.pt", re.ASCII)


class _StateFile(NamedTuple):
    """One file of the folder: the pickled object and its values.

    Attributes:
        label: Label of the file in the names of its values; empty for values of the whole model.
        prefix: Prefix of the names of this part in the whole model; None for a file that is not such a part.
    """

    name: str
    is_optimizer: bool
    rank: int
    label: str
    prefix: str | None
    root: Any
    values: list[ArchiveValue]


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a DeepSpeed folder, or its parent folder with a file ``latest``."""
    if not files.is_folder:
        return False
    names = files.names()
    return any(map(_is_state, names)) or (_LATEST in names and any(map(_is_state, _latest_folder_and_files(files)[1])))


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors and numbers of all ranks."""
    names = files.names()
    folder, names = ("", names) if any(map(_is_state, names)) else _latest_folder_and_files(files)
    states = sorted(_read(files, folder, names), key=lambda state: (state.is_optimizer, state.label, state.rank))
    optimizer = [state for state in states if state.is_optimizer]
    parameters = _cut(files, states, optimizer) if optimizer and not any(map(_OTHER.fullmatch, names)) else []
    taken = {place for parameter in parameters for place in parameter.flats}
    divided = {parameter.parameter for parameter in parameters if parameter.stored.numel}
    result = []
    for state in states:
        for value in state.values:
            if (state.name, value.path) not in taken and not _is_placeholder(value, divided):
                if value.path and state.prefix is not None:
                    value = value._replace(path=("module", state.prefix + value.path[0], *value.path[1:]))
                elif value.path and (state.is_optimizer or state.rank or state.label):
                    path = (value.path[0], state.label or f"rank_{state.rank}", *value.path[1:])
                    value = value._replace(path=path)
                result.append(value)
    result += [ArchiveValue(parameter.path, True, parameter.stored) for parameter in parameters]
    return with_names(result, in_order=not optimizer)


def _is_state(name: str) -> bool:
    return bool(_FILE.fullmatch(name) or _OTHER.fullmatch(name))


def _latest_folder_and_files(files: CheckpointFiles) -> tuple[str, list[str]]:
    """The folder named in ``latest``, with a slash at its end, and the names of its files."""
    if files.size(_LATEST) > _MOST_LATEST:
        return "", []
    tag = files.read_all(_LATEST, "the name of a folder").decode("utf-8", "replace").strip()
    try:
        names = CheckpointFiles(files.path(tag)).names() if tag and files.path(tag).is_dir() else []
    except (UsageError, OSError, ValueError):  # a file of another program with that name
        return "", []
    return f"{tag}/", names


def _read(files: CheckpointFiles, folder: str, names: list[str]) -> Iterator[_StateFile]:
    matches = [match for pattern in (_FILE, _EXPERT, _LAYER) for match in map(pattern.fullmatch, names) if match]
    several = len({int(match["mp"] or 0) for match in matches}) > 1
    for name in names:
        match = _FILE.fullmatch(name)
        if match or _OTHER.fullmatch(name):
            root, values = read_archive(files, folder + name)
            rank = int(match["rank"] or 0) if match else 0
            label = "" if match and not several else name.removesuffix(".pt")
            is_optimizer = name.endswith("optim_states.pt")
            prefix = _prefix(name, f"{label}." if several else None)
            yield _StateFile(folder + name, is_optimizer, rank, label, prefix, root, values)


def _prefix(name: str, of_file: str | None) -> str | None:
    """The prefix for names in the file of an expert or layer; None if the file is neither.

    The prefix is that of the whole model unless ``of_file`` gives one.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None and not _EXPERT.fullmatch(name):
        return None
    return of_file or (f"{int(layer['number'])}." if layer else "")


def _is_placeholder(value: ArchiveValue, divided: set[str]) -> bool:
    """Whether a value is the empty tensor with which ZeRO stage 3 replaces a partitioned parameter."""
    return value.path[:1] == ("module",) and not value.stored.numel and value.path[-1] in divided


def _cut(files: CheckpointFiles, states: list[_StateFile], optimizer: list[_StateFile]) -> list[Parameter]:
    """The parameters, reassembled from the partitions of all ranks; an empty list if that is ambiguous."""
    if any(state.label for state in states):
        return []
    models = [state for state in states if not state.is_optimizer]
    if not models:
        raise UsageError(f"{files.root} has no file of the model's state; copy mp_rank_00_model_states.pt as well")
    zero = _get(optimizer[0].root, "optimizer_state_dict")
    count = _get(zero, "partition_count")
    counts = count if isinstance(count, list) else [count]
    described = _get(models[0].root, "param_shapes")
    if any(type(n) is not int for n in counts) or len(set(counts)) != 1 or described is None:
        return []
    if len(optimizer) != counts[0] or not _are_all_ranks(optimizer):
        raise UsageError(
            f"{files.root} has the optimizer's state of {len(optimizer)} ranks, but was saved by {counts[0]}; copy all files"
        )
    try:
        layout = _layout(described, zero, counts[0])
        frozen = dict(_shapes(_get(models[0].root, "frozen_param_shapes")))
    except ValueError as error:
        raise UsageError(
            f"{files.shown(models[0].name)}: param_shapes cannot be read: {error}; it is damaged"
        ) from None
    result = zero_partitions.parameters(layout, _flats(optimizer))
    if layout.stage == 3 and len(models) == layout.ranks and _are_all_ranks(models):
        fragments = [flat for flat in _flats(models) if flat.path[0] == _FRAGMENTS and len(flat.path) == 2]
        result += zero_partitions.frozen_parameters(layout.ranks, frozen, fragments)
    return result


def _are_all_ranks(states: list[_StateFile]) -> bool:
    return [state.rank for state in states] == list(range(len(states)))


def _flats(states: list[_StateFile]) -> list[Flat]:
    """The one-dimensional tensors that the files of all ranks have under the same keys."""
    of_rank = [{value.path: value.stored for value in state.values if _is_flat(value)} for state in states]
    result = []
    for path, first in of_rank[0].items():
        same = [each[path] for each in of_rank if path in each]
        if len(same) == len(states) and {(t.dtype, t.big_endian) for t in same} == {(first.dtype, first.big_endian)}:
            result.append(Flat(path, tuple(state.name for state in states), tuple(same)))
    return result


def _is_flat(value: ArchiveValue) -> bool:
    """Whether a value is a one-dimensional tensor with contiguous elements."""
    stored = value.stored
    return value.is_tensor and len(stored.shape) == 1 and len(stored.blocks) == 1 and stored.blocks[0].is_c_ordered


def _layout(described: Any, zero: Any, ranks: int) -> Layout:
    """The layout of the parameters in the partitions, from a checkpoint's ``param_shapes``.

    Raises ``ValueError`` if it is inconsistent.
    """
    stage = _get(zero, "zero_stage")
    if isinstance(stage, Call) and isinstance(stage.arguments, tuple) and stage.arguments:  # an enumeration's member
        stage = stage.arguments[-1]  # its value, or, in files of Python 3.11.2, its name
    shapes = [_shapes(group) for group in (described if isinstance(described, list) else [described])]
    paddings = _get(zero, "param_alignment_paddings")
    if not isinstance(paddings, list):  # an earlier version, or stage 3
        paddings = [[0] * len(group) for group in shapes]
    fill = [part if isinstance(part, list) else [] for part in paddings]
    if [len(part) for part in fill] != [len(group) for group in shapes]:
        raise ValueError("there is not one padding for each parameter")
    if any(type(n) is not int or not 0 <= n < 2**62 for part in fill for n in part):
        raise ValueError("a padding is no number of elements")
    return Layout(3 if stage in (3, "weights") else 2, ranks, shapes, fill)


def _shapes(described: Any) -> list[tuple[str, Shape]]:
    """Name and shape of each parameter.

    Raises ``ValueError`` if the description is damaged.
    """
    return [(key_text(name), size_values(size)) for name, size in _items(described)]


def _get(value: Any, key: str) -> Any:
    """The value for a key in a pickled dict; None if the object is not a dict."""
    return next((part for name, part in _items(value) if type(name) is str and name == key), None)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items if isinstance(value, (Mapped, Call)) else ()
