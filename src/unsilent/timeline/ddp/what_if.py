"""Predicted steps of a training under DDP with other buckets, precision, reduction or servers.

Forms: ``buckets=25`` or ``buckets=1,8,25`` (MiB, the last also for all further buckets), ``gradients=fp16`` or ``bf16``,
``reduction=PROGRAM`` (a name from `unsilent placement`), ``server=N``. Each is answered by `ddp_model`, with everything else as
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.sizes import human_bytes, parse_whole_number
from unsilent.report.text import count_text
from unsilent.timeline.change import Answer
from unsilent.timeline.ddp.model import MIB, LinkCost, assign_buckets, server_cost
from unsilent.timeline.ddp.traces import DdpJob, ddp_job
from unsilent.timeline.job import Job
from unsilent.timeline.link_costs import FLAT, reduction_costs
from unsilent.timeline.step_split import Floats

FORMS = ("buckets=25", "buckets=1,8,25", "gradients=fp16", "gradients=bf16", "reduction=PROGRAM", "server=N")
LARGEST_BUCKET, MOST_SERVERS = 2**20, 2**20
"""Largest bucket in MiB, and most servers; larger numbers are rejected as typing errors."""
SIXTEEN_BITS = ("fp16", "bf16")
DOES_NOT_GROW = (
    "in the measured times, larger collectives do not take longer, so what they cost is not known; measure the link (unsilent "
    "placement measure) and pass its file as --system"
)


class DdpQuestions:
    """Answers what-if questions about one training under DDP.

    Args:
        job: Job on one clock.
        system: Description of the machine for costs (see `unsilent.timeline.link_costs`); if empty, costs are fitted to the
            traces.
    """

    def __init__(self, job: Job, system: str = "") -> None:
        self._job, self._system = job, system

    def answer(self, text: str) -> Answer:
        """The predicted answer to a what-if question.

        Raises ``UsageError`` for an unknown question and for a job that is not a training under DDP.
        """
        word, _, value = text.partition("=")
        ddp, share, notes = self._ddp, 1.0, list[str]()
        buckets, change = ddp.buckets, _same_cost
        if word == "buckets":
            buckets = assign_buckets(ddp.steps.sizes.tolist(), _caps(value))
        elif word == "gradients":
            if value not in SIXTEEN_BITS:
                raise wrong_value_error("--what-if gradients", value, " or ".join(SIXTEEN_BITS))
            share = float(sixteen_bit_share(np.array([ddp.item_bytes]), "gradients")[0])
            notes += sixteen_bit_notes(np.array([ddp.item_bytes]))
        elif word == "reduction":
            program = self._program_cost(value)
            change = partial(_other_cost, program)
            notes.append(
                "the program runs while gradients are computed; unsilent.placement.program_hook waits for each bucket"
            )
        else:
            servers = parse_whole_number(value) or 0
            if not 1 <= servers <= MOST_SERVERS:
                raise wrong_value_error("--what-if server", value, f"a whole number from 1 to {MOST_SERVERS:,}")
            change = partial(server_cost, ranks=self._ranks, servers=servers)
            notes.append(
                f"{count_text(servers, 'server')} apart from the ranks, each with a link like that of a rank (its latency and "
                "bandwidth are those of an all-reduce by a ring); each bucket is divided evenly over the servers, pushed by all "
                "ranks at once, summed in no time and then pulled"
            )
        sizes = share * np.array([float(ddp.steps.sizes[bucket].sum()) for bucket in buckets])
        cost = change(ddp.cost)
        notes.append(
            f"with the recorded buckets, the mean step time by the model of DDP is {100 * abs(ddp.error):.2g} % "
            f"{'above' if ddp.error > 0 else 'below'} the recorded mean"
        )
        if not cost.grows:
            notes.append(DOES_NOT_GROW)
        elif not cost.covers(sizes):
            notes.append(f"{beyond_fit(cost, sizes)}; give a --system measured with --sizes around these")

        # Both are functions of the cost, as limits are computed with costs fitted to resampled steps.
        def predicted(fitted: LinkCost) -> Floats:
            return ddp.steps.step_seconds(buckets, change(fitted), share)

        def recorded(fitted: LinkCost) -> Floats:
            return ddp.steps.step_seconds(ddp.buckets, fitted)

        return Answer(
            text, recorded(ddp.cost), predicted(ddp.cost), (*notes, *ddp.notes), not cost.covers(sizes),
            ddp.ratio(predicted, recorded), ddp.doubt,
        )  # fmt: skip

    @cached_property
    def _ddp(self) -> DdpJob:
        return ddp_job(self._job, self._programs[FLAT] if self._system else None)

    @property
    def _ranks(self) -> int:
        return self._job.world_size or len(self._job.ranks)

    @cached_property
    def _programs(self) -> dict[str, LinkCost]:
        return reduction_costs(self._system, self._ranks)

    def _program_cost(self, name: str) -> LinkCost:
        if not self._system:
            raise UsageError(
                "--what-if reduction needs to know the machine; add --system with the file of unsilent placement measure -o, a "
                "TOML file or a preset"
            )
        if name not in self._programs:
            raise unknown_name_error("reduction program", name, self._programs)
        return self._programs[name]


def _caps(value: str) -> list[int]:
    """Bucket sizes in bytes, from a text of sizes in MiB."""
    sizes = [parse_whole_number(part) or 0 for part in value.split(",")]
    if not all(1 <= size <= LARGEST_BUCKET for size in sizes):
        expected = f"whole MiB from 1 to {LARGEST_BUCKET:,}, like 25 or 1,8,25"
        raise wrong_value_error("--what-if buckets", value, expected)
    return [MIB * size for size in sizes]


def _same_cost(cost: LinkCost) -> LinkCost:
    return cost


def _other_cost(cost: LinkCost, _: LinkCost) -> LinkCost:
    return cost


def sixteen_bit_share(item_bytes: NDArray[np.integer[Any]], setting: str) -> Floats:
    """Size of payloads in 16 bits as a share of their recorded size.

    ``item_bytes`` are the bytes of one recorded number; -1 is unknown and counts as 4.

    Raises:
        UsageError: All payloads have 16 bits already.
    """
    if (item_bytes == 2).all():
        raise UsageError(
            f"--what-if {setting}: the recorded gradients are already reduced in 16 bits; ask for another change"
        )
    return np.asarray(2 / np.where(item_bytes > 0, np.maximum(item_bytes, 2), 4))


def sixteen_bit_notes(item_bytes: NDArray[np.integer[Any]]) -> Iterator[str]:
    """Notes on the assumptions behind gradients in 16 bits."""
    if (item_bytes < 0).any():
        yield "gradients are taken to have 32 bits where the traces do not say"
    yield "casts to 16 bits are not counted"


def beyond_fit(cost: LinkCost, sizes: Floats) -> str:
    """Note that some sizes are outside the range that a cost was fitted to."""
    sent, fitted = _range(float(sizes.min()), float(sizes.max())), _range(cost.smallest, cost.largest)
    return f"collectives of {sent} are outside the sizes that the cost was fitted to ({fitted})"


def _range(low: float, high: float) -> str:
    first, last = human_bytes(round(low)), human_bytes(round(high))
    return first if first == last else f"{first} to {last}"
