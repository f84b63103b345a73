"""The strategy `fsdp2`: every rank holds a part of each parameter and of the optimizer's state.

A fault in one rank's file has an effect only if the element is in that rank's part. No way of restarting copies
parameters from one rank to another. The module is separate from the other strategies because its imports take a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from unsilent.basics.nested import map_tensors
from unsilent.sites.modules import named_parameters
from unsilent.workloads.distributed.strategies import Snapshot, Strategy
from unsilent.workloads.trainings import TrainingState


class Fsdp2(Strategy):
    """The strategy that applies ``torch.distributed.fsdp.fully_shard`` to each block, then to the model."""

    holds_whole_model = False

    def __init__(self, ranks: int) -> None:
        self._mesh: DeviceMesh = init_device_mesh("cpu", (ranks,))

    def wrap(self, model: nn.Module) -> nn.Module:
        for block in blocks_of(model):
            fully_shard(block, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        return model

    def gathered(self, snapshot: Any, state: TrainingState) -> Any:
        return map_tensors(snapshot, lambda _, tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def own_part(self, snapshot: Snapshot, state: TrainingState) -> Snapshot:
        parameters = dict(named_parameters(state.model))

        def part(name: str, value: Any) -> Any:
            parameter = parameters.get(name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
                # Without a source, every rank takes its part of its own tensor, and nothing is sent.
                return distribute_tensor(value, self._mesh, parameter.placements, src_data_rank=None)
            return value

        model = {name: part(name, tensor) for name, tensor in snapshot["model"].items()}
        optimizers = []
        for optimizer in snapshot["optimizers"]:
            state_by_name = {}
            for name, entries in optimizer["state"].items():
                state_by_name[name] = {key: part(name, value) for key, value in entries.items()}
            optimizers.append({**optimizer, "state": state_by_name})
        return {**snapshot, "model": model, "optimizers": optimizers}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are sharded separately.

    They are its children, and the items of lists and of sequences of blocks. Modules that share a parameter with
    another module are left out: they stay together in the model's own group.
    """
    blocks = [block for child in model.children() for block in _parts(child) if any(True for _ in block.parameters())]
    in_model = _uses(model)
    return [block for block in blocks if all(in_model[key] == count for key, count in _uses(block).items())]


def _uses(module: nn.Module) -> Counter[int]:
    """How often each parameter, identified by ``id``, occurs in a module."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _parts(child: nn.Module) -> Iterator[nn.Module]:
    """The items of a list, dict or sequence of blocks, or else the child itself."""
    is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
    of_blocks = isinstance(child, nn.Sequential) and all(any(True for _ in part.children()) for part in child)
    if is_list or of_blocks:
        yield from child.children()
    else:
        yield child
