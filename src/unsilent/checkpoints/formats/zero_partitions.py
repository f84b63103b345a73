"""Reassembly of parameters from the flat partitions of each rank in DeepSpeed ZeRO.

``sequence`` below is a concatenation: for stages 1 and 2 of the partitions of a group on all ranks, for stage 3 of the groups of
one rank. A parameter is a range of it, or in stage 3 one range on every rank, so it consists of 1-D blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from unsilent.checkpoints.formats.torch_pickle import KeyPath
from unsilent.checkpoints.stored_tensors import Block, Shape, StoredTensor

MASTER = "fp32"
"""Last part of the name of the weights that the optimizer updates, as in DeepSpeed's universal checkpoints."""
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_STATES = ("base_optimizer_state", "optimizer_state_dict")


class Layout(NamedTuple):
    """The order, shapes and padding of the parameters in the partitions.

    Attributes:
        stage: 2 for stages 1 and 2, or 3.
        ranks: Number of ranks.
        shapes: Name and shape of every parameter in the order of every group.
        fill: Number of padding elements after each parameter.
    """

    stage: int
    ranks: int
    shapes: list[list[tuple[str, Shape]]]
    fill: list[list[int]]


class Flat(NamedTuple):
    """The partitions of all ranks that have the same keys.

    Attributes:
        path: The keys that lead to it in each rank's file.
        files: File of each rank.
        partitions: Partition of each rank.
    """

    path: KeyPath
    files: tuple[str, ...]
    partitions: tuple[StoredTensor, ...]


class Parameter(NamedTuple):
    """A parameter's weights, or one of its optimizer states.

    Attributes:
        path: The keys that name it.
        parameter: Name of the parameter.
        stored: Positions of its elements.
        flats: File and keys of the partitions from which its whole group is read.
    """

    path: KeyPath
    parameter: str
    stored: StoredTensor
    flats: tuple[tuple[str, KeyPath], ...]


def parameters(layout: Layout, flats: Sequence[Flat]) -> list[Parameter]:
    """The parameters and optimizer states that can be reassembled without ambiguity, in the order of the files."""
    states: dict[str, dict[int, Flat]] = {}
    for flat in flats:
        role = _role(flat.path)
        if role is not None:
            states.setdefault(role[0], {})[role[1]] = flat
    masters = states.get(MASTER, {})
    result: list[Parameter] = []
    for state, groups in states.items():
        if groups and set(groups) == set(masters) == set(range(len(masters))):
            ordered = [groups[number] for number in range(len(groups))]
            if all(map(_is_state_of, ordered, [masters[number] for number in range(len(groups))])):
                result += (_stage_3 if layout.stage == 3 else _stage_2)(layout, state, ordered)
    return result


def frozen_parameters(ranks: int, shapes: Mapping[str, Shape], fragments: Sequence[Flat]) -> list[Parameter]:
    """The frozen parameters, reassembled from equal parts in the model files of ZeRO stage 3.

    Parameters whose parts do not fit are left out.
    """
    result: list[Parameter] = []
    for flat in fragments:
        name = flat.path[-1]
        if name in shapes:
            alone = _stage_3(Layout(3, ranks, [[(name, shapes[name])]], [[0]]), "", [flat])
            result += [parameter._replace(path=("module", name)) for parameter in alone]
    return result


def _role(path: KeyPath) -> tuple[str, int] | None:
    """The name of the optimizer state and the number of the parameter group that a partition holds; None if unknown."""
    match path:
        case (_, kind, group) if kind in _MASTERS:
            state = MASTER
        case (_, kind, "state", group, state) if kind in _STATES:
            pass
        case (_, "base_optimizer_state", group, state):
            pass
        case _:
            return None
    return (state, int(group)) if group.isascii() and group.isdecimal() and len(group) < 9 else None


def _is_state_of(flat: Flat, master: Flat) -> bool:
    """Whether partitions are as long as those of the weights; only the last may be longer, because of padding."""
    lengths = [(state.numel, weights.numel) for state, weights in zip(flat.partitions, master.partitions, strict=True)]
    return all(state == weights for state, weights in lengths[:-1]) and lengths[-1][0] >= lengths[-1][1]


def _stage_2(layout: Layout, state: str, groups: Sequence[Flat]) -> list[Parameter]:
    """The parameters of ZeRO stage 1 or 2, from all groups whose partitions they fill exactly."""
    result: list[Parameter] = []
    if len(groups) != len(layout.shapes):
        return result
    unit = 2 * layout.ranks
    for flat, shapes, fill in zip(groups, layout.shapes, layout.fill, strict=True):
        begin, of_group = 0, []
        for (name, shape), behind in zip(shapes, fill, strict=True):
            blocks = list(_range(flat.partitions, begin, math.prod(shape), 0))
            of_group.append(_parameter(name, state, shape, blocks, [flat]))
            begin += math.prod(shape) + behind
        # The last partition is padded to a multiple of twice the number of ranks, and may be saved without padding.
        if -(-begin // unit) == -(-sum(part.numel for part in flat.partitions) // unit):
            result += of_group if all(map(_is_complete, of_group)) else []
    return result


def _stage_3(layout: Layout, state: str, groups: Sequence[Flat]) -> list[Parameter]:
    """The parameters of ZeRO stage 3; an empty list unless they fill the partitions of every rank exactly."""
    begin, result = 0, []
    sequences = [[flat.partitions[rank] for flat in groups] for rank in range(layout.ranks)]
    for name, shape in (each for group in layout.shapes for each in group):
        numel = math.prod(shape)
        part = -(-numel // layout.ranks)
        blocks: list[Block] = []
        for rank, sequence in enumerate(sequences):
            first = rank * part
            blocks += _range(sequence, begin, max(0, min(part, numel - first)), first)
        result.append(_parameter(name, state, shape, blocks, groups))
        begin += part
    fits = all(sum(part.numel for part in sequence) == begin for sequence in sequences)
    return result if fits and all(map(_is_complete, result)) else []


def _range(sequence: Sequence[StoredTensor], begin: int, count: int, start: int) -> Iterator[Block]:
    """Yield the blocks of ``count`` elements from position ``begin`` of concatenated partitions.

    ``start`` is the index in the parameter of the first of these elements.
    """
    at = 0
    for partition in sequence:
        low, high = max(begin, at), min(begin + count, at + partition.numel)
        if low < high:
            block = partition.blocks[0]
            offset = block.offset + (low - at) * partition.item_size
            place, length = (start + low - begin,), (high - low,)
            yield replace(block, offset=offset, start=place, shape=length, strides=(1,))
        at += partition.numel


def _is_complete(parameter: Parameter) -> bool:
    return sum(block.numel for block in parameter.stored.blocks) == parameter.stored.numel


def _parameter(name: str, state: str, shape: Shape, blocks: list[Block], flats: Sequence[Flat]) -> Parameter:
    part, stored_as = flats[0].partitions[0], "/".join(flats[0].path)
    grid = (math.prod(shape),)
    stored = StoredTensor(name, part.dtype, shape, tuple(blocks), grid, part.big_endian, stored_as, part.obstacle)
    places = tuple((file, flat.path) for flat in flats for file in flat.files)
    return Parameter(("optimizer", name, state), name, stored, places)
