"""Changes that planted causes make to a simulated job, by family and kind of the cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.incidents.planted_job import RATE
from unsilent.incidents.planted_workloads import CLASSES, Batch, Classifier, draw_batch
from unsilent.triage.farm.planned import PlannedIncident

TOP_EXPONENT, EXPONENT_BITS, LANES = 30, 8, 8
FLOAT16_MAX = 65504.0
RARE_CONTRAST = 3.0


@dataclass(eq=False)
class Replica:
    """The model, optimizer and batch of one rank.

    Attributes:
        batch, loss: Batch and loss of the step.
        sent: Gradients that the other ranks receive.
        is_zeroing: Whether gradients are set to zero before this step.
        is_updating: Whether the optimizer updates parameters in this step.
    """

    rank: int
    model: Classifier
    optimizer: torch.optim.Adam
    batch: Batch = field(init=False)
    loss: float = float("nan")
    sent: list[Tensor] = field(default_factory=list)
    is_zeroing: bool = True
    is_updating: bool = True

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def saved_state(self) -> dict[str, Tensor]:
        """Parameters and optimizer moments by their names in a checkpoint, without copying."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state[f"model.{name}"] = parameter.detach()
            state |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Copy the state in a checkpoint into the parameters and optimizer moments."""
        for name, tensor in self.saved_state().items():
            tensor.copy_(state[name])


class Point(Enum):
    """The point of a step at which a cause acts."""

    BETWEEN_STEPS = auto()
    BATCH = auto()
    GRADIENT = auto()
    SENT = auto()
    RECEIVED = auto()
    UPDATED = auto()


@dataclass(frozen=True)
class Cause:
    """The change that a cause makes, and when.

    Attributes:
        apply: Function that makes the change in one rank; it also gets the step.
        lasts: Whether the change is made in each step from then on.
    """

    point: Point
    apply: Callable[[Replica, PlannedIncident, int], None]
    lasts: bool = False


def words_of(tensor: Tensor) -> NDArray[np.uint32]:
    """The memory of a tensor as 32-bit words; torch does not notice writes to them."""
    return tensor.detach().view(torch.int32).numpy().view(np.uint32)


def flip_exponent(tensor: Tensor, planned: PlannedIncident) -> None:
    """Flip one exponent bit of one element."""
    _flip(tensor, planned, TOP_EXPONENT - int(planned.draws[2] * EXPONENT_BITS))


def _flip(tensor: Tensor, planned: PlannedIncident, bit: int) -> None:
    words, element = words_of(tensor), int(planned.draws[1] * tensor.numel())
    words.flat[element] ^= np.uint32(1 << bit)


def _chosen(tensors: Sequence[Tensor], planned: PlannedIncident) -> Tensor:
    return tensors[int(planned.draws[0] * len(tensors))]


def _weight(replica: Replica, planned: PlannedIncident) -> Tensor:
    return _chosen([*replica.model.parameters()], planned)


def _weight_exponent(replica: Replica, planned: PlannedIncident, step: int) -> None:
    flip_exponent(_weight(replica, planned), planned)


def _weight_sign(replica: Replica, planned: PlannedIncident, step: int) -> None:
    _flip(_weight(replica, planned), planned, 31)


def _zeroed_weights(replica: Replica, planned: PlannedIncident, step: int) -> None:
    words = words_of(_weight(replica, planned))
    first = int(planned.draws[1] * words.size)
    words.flat[first : first + max(1, int(words.size * planned.draws[2] / 2))] = 0


def _gradient_exponent(replica: Replica, planned: PlannedIncident, step: int) -> None:
    flip_exponent(_chosen(replica.gradients, planned), planned)


def _stuck_lane(replica: Replica, planned: PlannedIncident, step: int) -> None:
    words = words_of(_chosen(replica.gradients, planned))
    bit = np.uint32(1 << TOP_EXPONENT - int(planned.draws[2] * EXPONENT_BITS))
    words.flat[int(planned.draws[1] * LANES) :: LANES] |= bit


def _scaled_gradient(replica: Replica, planned: PlannedIncident, step: int) -> None:
    torch._foreach_mul_(replica.gradients, 4.0 ** (1 + 4 * planned.draws[2]))


def _moment(key: str) -> Callable[[Replica, PlannedIncident, int], None]:
    def apply(replica: Replica, planned: PlannedIncident, step: int) -> None:
        flip_exponent(replica.optimizer.state[_weight(replica, planned)][key], planned)

    return apply


def _lost_contribution(replica: Replica, planned: PlannedIncident, step: int) -> None:
    torch._foreach_zero_(replica.sent)


def _skipped_update(replica: Replica, planned: PlannedIncident, step: int) -> None:
    replica.is_updating = False


@torch.no_grad()
def _other_weights(replica: Replica, planned: PlannedIncident, step: int) -> None:
    generator = torch.Generator().manual_seed(planned.seed)
    share = 10.0 ** (2 * planned.draws[2] - 3)
    for parameter in replica.model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.abs().mean() * share)


def _nan_element(replica: Replica, planned: PlannedIncident, step: int) -> None:
    replica.batch.images.view(-1)[int(planned.draws[1] * replica.batch.images.numel())] = float("nan")


def _shuffled_labels(replica: Replica, planned: PlannedIncident, step: int) -> None:
    generator, labels = torch.Generator().manual_seed(planned.seed + step), replica.batch.labels
    replica.batch = replica.batch._replace(labels=labels[torch.randperm(len(labels), generator=generator)])


def _repeated_shard(replica: Replica, planned: PlannedIncident, step: int) -> None:
    """Give a rank the batch of the next rank, or repeat an earlier batch if there is one rank."""
    next_rank = (replica.rank + 1) % planned.world_size
    replica.batch = draw_batch(planned.seed, step if planned.world_size > 1 else planned.step - 1, next_rank)


def _set_rate(replica: Replica, planned: PlannedIncident, step: int) -> None:
    replica.optimizer.param_groups[0]["lr"] = RATE * rate_factor(planned)


def rate_factor(planned: PlannedIncident) -> float:
    """Factor of the learning rate: 10 to 100 as a mistake, or 0.1 or 5 as a planned change."""
    if planned.is_healthy:
        return 0.1 if planned.draws[2] < 0.5 else 5.0
    return float(round(10 ** (1 + planned.draws[2])))


def _other_seed(replica: Replica, planned: PlannedIncident, step: int) -> None:
    replica.batch = draw_batch(planned.seed + 1, step, replica.rank)


def _not_zeroed(replica: Replica, planned: PlannedIncident, step: int) -> None:
    replica.is_zeroing = False


@torch.no_grad()
def _to_bfloat16(replica: Replica, planned: PlannedIncident, step: int) -> None:
    for parameter in replica.model.parameters():
        parameter.copy_(parameter.bfloat16())


def _overflow(replica: Replica, planned: PlannedIncident, step: int) -> None:
    """Round gradients to float16 with a scale at which the largest ones overflow."""
    largest = max(float(gradient.abs().max()) for gradient in replica.gradients)
    scale = FLOAT16_MAX * 2 ** (1 + 4 * planned.draws[2]) / largest
    torch._foreach_copy_(
        replica.gradients, [(gradient * scale).half().float() / scale for gradient in replica.gradients]
    )


def _unusual_batch(replica: Replica, planned: PlannedIncident, step: int) -> None:
    """Replace the batch by one of a single class, or by one with more contrast."""
    if planned.draws[2] < 0.5:
        replica.batch = replica.batch._replace(images=replica.batch.images * RARE_CONTRAST)
        return
    wanted, batches, at = int(planned.draws[1] * CLASSES), list[Batch](), step
    while sum(int((batch.labels == wanted).sum()) for batch in batches) < len(replica.batch.labels):
        at += 1000
        batches.append(draw_batch(planned.seed, at, replica.rank))
    images, labels = torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])
    chosen = (labels == wanted).nonzero()[: len(replica.batch.labels), 0]
    replica.batch = replica.batch._replace(images=images[chosen], labels=labels[chosen])


def _other_data(replica: Replica, planned: PlannedIncident, step: int) -> None:
    replica.batch = replica.batch._replace(images=1 - replica.batch.images)


CAUSES: dict[tuple[str, str], Cause] = {
    ("weight bits", "exponent bit"): Cause(Point.BETWEEN_STEPS, _weight_exponent),
    ("weight bits", "sign bit"): Cause(Point.BETWEEN_STEPS, _weight_sign),
    ("weight bits", "zeroed elements"): Cause(Point.BETWEEN_STEPS, _zeroed_weights),
    ("gradient bits", "exponent bit"): Cause(Point.GRADIENT, _gradient_exponent),
    ("gradient bits", "stuck lane"): Cause(Point.GRADIENT, _stuck_lane, lasts=True),
    ("gradient bits", "scaled"): Cause(Point.GRADIENT, _scaled_gradient, lasts=True),
    ("optimizer bits", "first moment"): Cause(Point.BETWEEN_STEPS, _moment("exp_avg")),
    ("optimizer bits", "second moment"): Cause(Point.BETWEEN_STEPS, _moment("exp_avg_sq")),
    ("payload", "changed result"): Cause(Point.RECEIVED, _gradient_exponent),
    ("payload", "lost contribution"): Cause(Point.SENT, _lost_contribution, lasts=True),
    ("replica", "skipped update"): Cause(Point.BETWEEN_STEPS, _skipped_update),
    ("replica", "other weights"): Cause(Point.BETWEEN_STEPS, _other_weights),
    ("data", "NaN"): Cause(Point.BATCH, _nan_element),
    ("data", "shuffled labels"): Cause(Point.BATCH, _shuffled_labels, lasts=True),
    ("data", "repeated shard"): Cause(Point.BATCH, _repeated_shard, lasts=True),
    ("configuration", "learning rate"): Cause(Point.BETWEEN_STEPS, _set_rate),
    ("configuration", "seed"): Cause(Point.BATCH, _other_seed, lasts=True),
    ("configuration", "gradients not zeroed"): Cause(Point.BETWEEN_STEPS, _not_zeroed, lasts=True),
    ("precision", "bfloat16 weights"): Cause(Point.UPDATED, _to_bfloat16, lasts=True),
    ("precision", "float16 overflow"): Cause(Point.GRADIENT, _overflow),
    ("healthy", "learning rate by plan"): Cause(Point.BETWEEN_STEPS, _set_rate),
    ("healthy", "unusual batch"): Cause(Point.BATCH, _unusual_batch),
    ("healthy", "other data for all"): Cause(Point.BATCH, _other_data, lasts=True),
}
"""Causes that change the computation. Others change files, times, or which ranks continue: see `simulated_job`, `record`."""
