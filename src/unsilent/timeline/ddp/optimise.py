"""Finds the buckets and gradient precision of DDP with the shortest predicted steps.

All bucket sizes that make a difference are tried, and then sizes of single buckets, as long as they shorten a step. The reason
why neighbouring buckets stay separate is given by dPRO's condition for fusing tensors: two buckets should be fused if the
transfer of the first ends later than the second is filled, plus the additional time of the larger bucket (MLSys 2022,
https://arxiv.org/abs/2205.02473).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unsilent.timeline.ddp.model import DEFAULT_CAPS, MIB, Cost, DdpSteps, LinkCost, assign_buckets
from unsilent.timeline.step_split import Floats

PRECISIONS = {"fp32": 1.0, "fp16": 0.5}
"""Bytes sent for each byte of a 32-bit gradient, by precision."""
MOST_ROUNDS = 20


@dataclass(frozen=True)
class DdpSettings:
    """Bucket sizes and gradient precision, with the buckets and step times that they lead to.

    Attributes:
        caps: MiB of each bucket, the last one also for all further buckets; empty: DDP's default.
        precision: One of `PRECISIONS`.
        buckets: Indices of gradients by bucket.
        seconds: Predicted seconds of each step, float64[steps].
    """

    caps: tuple[int, ...]
    precision: str
    buckets: list[list[int]]
    seconds: Floats

    @property
    def mean(self) -> float:
        """Predicted mean seconds of a step."""
        return float(self.seconds.mean())

    @property
    def arguments(self) -> str:
        """Arguments to pass to ``DistributedDataParallel``, or an empty text for its defaults."""
        if not self.caps:
            return ""
        return f"bucket_cap_mb={self.caps[0]}" if len(self.caps) == 1 else f"bucket_cap_mb_list={list(self.caps)}"


def predict(recorded: DdpSteps, cost: Cost, caps: Sequence[int] = (), precision: str = "fp32") -> DdpSettings:
    """Predicted step times with buckets of ``caps`` MiB, or with DDP's default buckets if it is empty."""
    limits = [MIB * cap for cap in caps] or list(DEFAULT_CAPS)
    buckets = assign_buckets(recorded.sizes.tolist(), limits)
    return DdpSettings(tuple(caps), precision, buckets, recorded.step_seconds(buckets, cost, PRECISIONS[precision]))


def bucket_sizes(recorded: DdpSteps, settings: DdpSettings) -> Floats:
    """Bytes that are sent for each bucket, float64[buckets]."""
    sizes = [float(recorded.sizes[bucket].sum()) for bucket in settings.buckets]
    return PRECISIONS[settings.precision] * np.array(sizes)


def optimise(recorded: DdpSteps, cost: LinkCost, precisions: Sequence[str] = tuple(PRECISIONS)) -> list[DdpSettings]:
    """The best settings for each precision, the fastest first.

    Among equally fast settings, those with the fewest bucket sizes are chosen.

    No bucket is larger than the sizes that the cost was fitted to, unless every setting exceeds them.
    """
    result = []
    for precision in precisions:
        tried = [
            predict(recorded, cost, caps, precision) for caps in [(), *((cap,) for cap in _different_caps(recorded))]
        ]
        best = min(
            tried,
            key=lambda settings: (_is_beyond(recorded, cost, settings), round(settings.mean, 9), len(settings.caps)),
        )
        result.append(_settings_with_resized_buckets(recorded, cost, best))
    return sorted(result, key=lambda settings: settings.mean)


def _is_beyond(recorded: DdpSteps, cost: LinkCost, settings: DdpSettings) -> bool:
    """Whether a bucket is larger than the sizes that the cost was fitted to."""
    return bool(bucket_sizes(recorded, settings).max() > cost.largest)


def _different_caps(recorded: DdpSteps) -> Iterator[int]:
    """Bucket sizes in MiB that lead to different divisions of the gradients into buckets."""
    seen = set()
    sizes = recorded.sizes.tolist()
    for cap in range(1, sum(sizes) // MIB + 2):
        buckets = tuple(map(tuple, assign_buckets(sizes, [cap * MIB])))
        if buckets not in seen:
            seen.add(buckets)
            yield cap


def _settings_with_resized_buckets(recorded: DdpSteps, cost: LinkCost, best: DdpSettings) -> DdpSettings:
    """Settings improved by resizing single buckets, while a change saves 0.1 % of the step time."""
    for _ in range(MOST_ROUNDS):
        filled = [int(recorded.sizes[bucket].sum()) for bucket in best.buckets]
        caps = [max(1, size // MIB) for size in filled]
        candidates = [
            (*caps[:place], max(1, cap + change), *caps[place + 1 :])
            for place, cap in enumerate(caps)
            for change in sorted({-cap // 2, -1, 1, cap})
        ]
        tried = [predict(recorded, cost, caps, best.precision) for caps in candidates]
        better = min(tried, key=lambda settings: (_is_beyond(recorded, cost, settings), settings.mean), default=best)
        if better.mean > best.mean * 0.999 or _is_beyond(recorded, cost, better):
            return best
        best = better
    return best


def reasons(recorded: DdpSteps, cost: Cost, settings: DdpSettings) -> list[str]:
    """A sentence for each pair of neighbouring buckets on whether they would end earlier as one.

    Times are medians over steps, and those of the last rank count.
    """
    sizes = bucket_sizes(recorded, settings)
    filled = [float(np.median(recorded.ready[:, :, bucket].max((0, 2)))) for bucket in settings.buckets]
    seconds, end, result = cost(sizes), -np.inf, []
    for number, (size, ready, taken) in enumerate(zip(sizes, filled, seconds, strict=True)):
        if number:
            alone = max(end, ready) + taken
            fused = ready + float(cost(np.array([sizes[number - 1] + size]))[0])
            word = "earlier" if fused < alone else "no earlier"
            result.append(
                f"buckets {number} and {number + 1} as one would end {word}: {1e3 * fused:.3g} ms after the backward pass began, "
                f"as two {1e3 * alone:.3g} ms"
            )
        end = max(end, ready) + taken
    return result
