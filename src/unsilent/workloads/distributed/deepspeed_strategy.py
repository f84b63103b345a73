"""The strategy `zero1`: stage 1 of ZeRO in DeepSpeed.

Every rank holds all parameters and a part of the optimizer's state.

DeepSpeed concatenates the parameters of a group and divides the result into as many equal parts as there are ranks. A
rank keeps a second copy of its part, the master weights. The optimizer updates only this copy; the parts of all ranks
are then gathered into the parameters of every rank. The effect of a fault on a parameter therefore lasts beyond the
next update only if it reached the master weights of the rank that has the element.

DeepSpeed differs from the other strategies in three ways. It clips gradients itself, in its update. It skips an update
if a gradient is not finite. A rank has one step counter for a whole group, the counter of the group's first parameter.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.sites.modules import named_parameters
from unsilent.workloads.distributed.strategies import Snapshot, Strategy
from unsilent.workloads.trainings import TrainingState


class Zero1(Strategy):
    """The strategy that calls ``deepspeed.initialize`` with ``stage`` 1."""

    def __init__(self, ranks: int) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(distributed.get_rank())}
        import deepspeed

        warnings.filterwarnings("ignore", message=".*all_gather_into_tensor. is deprecated", category=FutureWarning)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Sums in shared memory are compiled at the first use, which takes a minute and a compiler. Without them, gloo
        # adds.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._initialize: Any = deepspeed.initialize

    def prepare(self, state: TrainingState, clip: float | None) -> None:
        if len(state.optimizers) != 1 or state.scaler is not None:
            obstacle = "mixed precision" if state.scaler is not None else f"{len(state.optimizers)} optimizers"
            raise UsageError(f"strategy 'zero1' cannot train with {obstacle}; expected one optimizer and amp=none")
        elements = sum(parameter.numel() for parameter in state.model.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 1,  # affects only the reports of DeepSpeed
            "gradient_clipping": clip or 0.0,
            "zero_allow_untested_optimizer": True,
            # As large as all gradients, instead of 2 GB.
            "zero_optimization": {"stage": 1, "reduce_bucket_size": max(elements, 2)},
        }
        engine, *_ = self._initialize(model=state.model, optimizer=state.optimizers[0], config=config)
        inner = engine.optimizer.optimizer
        state.optimizers[0] = type(type(inner).__name__, (_EngineStep,), {})(engine)
        state.wrapped_model = engine

    def after_loading(self, state: TrainingState) -> None:
        engine: Any = state.wrapped_model
        engine.optimizer.refresh_fp32_params()

    def release(self, state: TrainingState) -> None:
        engine: Any = state.wrapped_model
        engine.destroy()

    def gathered(self, snapshot: Any, state: TrainingState) -> Any:
        (optimizer,) = snapshot["optimizers"]
        whole: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(_groups_of(state)):
            if part := optimizer["state"].get(_row_name(number)):
                whole |= group.whole(part)
        return {**snapshot, "optimizers": [{**optimizer, "state": whole}]}

    def own_part(self, snapshot: Snapshot, state: TrainingState) -> Snapshot:
        (optimizer,) = snapshot["optimizers"]
        groups = enumerate(_groups_of(state))
        own_state = {_row_name(number): group.own(optimizer["state"]) for number, group in groups if optimizer["state"]}
        return {**snapshot, "optimizers": [{**optimizer, "state": own_state}]}


class _EngineStep(Optimizer):
    """An optimizer with the groups and the state of the real optimizer, whose step is DeepSpeed's."""

    def __init__(self, engine: Any) -> None:
        inner = engine.optimizer.optimizer
        super().__init__(inner.param_groups, {})
        self.state = inner.state
        self._engine = engine

    def step(self, closure: Any = None) -> Any:
        self._engine.step()


@dataclass(frozen=True)
class _Group:
    """A parameter group in the memory layout of DeepSpeed.

    Attributes:
        places: Name of a parameter -> position of its first element in the concatenation, and its shape.
        size: Number of elements of each rank's part; the last part may end with padding.
    """

    places: Mapping[str, tuple[int, torch.Size]]
    size: int

    def whole(self, part: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The optimizer state of each parameter, gathered from the parts of all ranks.

        Must be called on all ranks at once.
        """
        rows = {key: self._row(value) for key, value in part.items() if self._is_part(value)}

        def value_of(key: str, value: Any, start: int, shape: torch.Size) -> Any:
            if key in rows:
                return rows[key][start : start + shape.numel()].view(shape).clone()
            return value.clone() if isinstance(value, Tensor) else value

        return {
            name: {key: value_of(key, value, *place) for key, value in part.items()}
            for name, place in self.places.items()
        }

    def own(self, whole: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The optimizer state of this rank's part, cut out of the state of all parameters."""
        first = whole[next(iter(self.places))]
        return {key: self._part([whole[name][key] for name in self.places]) for key in first}

    def _part(self, values: Sequence[Any]) -> Any:
        shapes = [shape for _, shape in self.places.values()]
        if [getattr(value, "shape", None) for value in values] != shapes:
            return values[0]
        row = torch.cat([value.reshape(-1) for value in values])
        padding = self.size * distributed.get_world_size() - len(row)
        return torch.nn.functional.pad(row, (0, padding))[self.size * distributed.get_rank() :][: self.size].clone()

    def _is_part(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == (self.size,)

    def _row(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, part)
        return torch.cat(parts)


def _groups_of(state: TrainingState) -> list[_Group]:
    zero: Any = state.wrapped_model
    zero = zero.optimizer
    names = {id(parameter): name for name, parameter in named_parameters(state.model)}
    groups = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, zero.partition_size, strict=True)
    return [
        _Group({names[id(p)]: (start, p.shape) for p, start in zip(parameters, starts, strict=True)}, size)
        for parameters, starts, size in groups
    ]


def _row_name(group: int) -> str:
    """The name under which a snapshot stores the optimizer state of a parameter group."""
    return f"parameter {group}"
