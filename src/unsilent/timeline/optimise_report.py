"""What ``unsilent timeline optimise`` finds, and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unsilent.placement.report import time_text
from unsilent.report.estimates import machine_table, measured
from unsilent.report.model import Column, Report, Section, Table, TextBlock
from unsilent.report.shown import Shown
from unsilent.report.text import count_text
from unsilent.sizes import human_bytes
from unsilent.timeline.ddp_model import LinkCost
from unsilent.timeline.ddp_traces import DdpJob
from unsilent.timeline.link_costs import FLAT
from unsilent.timeline.optimise import PRECISIONS, DdpSettings, bucket_sizes, optimise, predict, reasons
from unsilent.timeline.slowdown import mean_ratio

METHOD = (
    "Steps are replayed from when gradients were ready on each rank, with other buckets and the fitted cost of a collective; "
    "buckets travel one after the other. Each recorded step is predicted, and the mean is compared. The noise floor is twice the "
    "standard error of the mean of the recorded steps. Casts of gradients to 16 bits are not counted."
)


@dataclass(frozen=True, repr=False, eq=False)
class Optimised(Shown):
    """The best settings for a recorded training under DDP.

    Attributes:
        job: What was recorded.
        default: What DDP's default would take.
        best: Settings by gradient precision, the fastest first.
        reduction: Program by which buckets are reduced in ``best``; `FLAT`: DDP's own.
        cost: Of that program.
    """

    job: DdpJob
    default: DdpSettings
    best: list[DdpSettings]
    reduction: str
    cost: LinkCost

    @property
    def noise_floor(self) -> float:
        """Twice the standard error of the mean of the recorded steps, in seconds."""
        recorded = self.job.recorded
        return float(2 * recorded.std(ddof=1) / len(recorded) ** 0.5) if len(recorded) > 1 else float("inf")

    def report(self, source: str = "") -> Report:
        """What is shown of it; ``source``: the name of the traces."""
        job, first, steps = self.job, self.best[0], count_text(len(self.job.recorded), "step")
        lines = tuple((None, line) for line in reasons(job.steps, self.cost, first))
        error = float(job.replayed().mean() / job.recorded.mean() - 1)
        ratios = {
            f"{one.precision} {one.arguments or 'default'}": mean_ratio(one.seconds, self.default.seconds)
            for one in self.best
        }
        return Report(
            "unsilent/timeline-optimise/1", "timeline optimise", f"Buckets for {source or 'a job'}", _headline(self),
            machine_table(measured({}, ratios, "step"), ("measure", "")),
            numbers=(
                ("step time", time_text(float(job.recorded.mean())), f"recorded, mean of {steps}"),
                ("DDP's default", time_text(self.default.mean), "predicted"),
                ("best", time_text(first.mean), f"predicted, {first.precision} gradients"),
                ("noise floor", time_text(self.noise_floor), "of the recorded mean"),
                ("error of the model", f"{100 * error:+.2g} %", "recorded buckets replayed, against recorded steps"),
            ),
            findings=tuple(_findings(self)),
            sections=(
                Section("Settings", "Predicted steps, and what to pass to DistributedDataParallel.", (_table(self),)),
                Section("Why these buckets", "", (TextBlock(lines),)),
            ),
            notes=tuple(_notes(self)),
            method=METHOD,
            further_json={"results": {
                "reduction": self.reduction, "best": [_json(one) for one in self.best], "default": _json(self.default),
            }},
        )  # fmt: skip


def find_settings(job: DdpJob, programs: Mapping[str, LinkCost] | None = None) -> Optimised:
    """The best settings by prediction; ``programs``: costs of reductions that may be chosen by name; None: DDP's own alone."""
    precisions = list(PRECISIONS) if job.cost.per_byte > 0 else ["fp32"]
    costs = {FLAT: job.cost, **(programs or {})}
    tried = {name: optimise(job.steps, costs[name], precisions) for name in _undominated(costs)}
    best = min(tried, key=lambda name: (round(tried[name][0].mean, 9), name != FLAT))
    return Optimised(job, predict(job.steps, job.cost), tried[best], best, costs[best])


def _undominated(costs: Mapping[str, LinkCost]) -> Iterator[str]:
    """Programs that no other one is better than for every size: steps with another one are no shorter."""
    least = float("inf")
    order = sorted(costs, key=lambda name: (costs[name].latency, costs[name].per_byte, name != FLAT))
    for name in order:
        if costs[name].per_byte < least or name == FLAT:
            least = min(least, costs[name].per_byte)
            yield name


def _headline(result: Optimised) -> str:
    best = next(one for one in result.best if one.precision == "fp32")
    gain = result.default.mean - best.mean
    if gain <= result.noise_floor:
        return (
            f"By prediction no buckets shorten a step by more than the noise floor ({time_text(result.noise_floor)}); "
            "keep DDP's default."
        )
    return (
        f"DistributedDataParallel(…, {best.arguments}) shortens a step from {time_text(result.default.mean)} with DDP's default "
        f"to {time_text(best.mean)} by prediction (noise floor {time_text(result.noise_floor)})."
    )


def _findings(result: Optimised) -> Iterator[str]:
    if result.reduction != FLAT:
        yield (
            f"in these settings buckets are reduced by: {result.reduction}, while gradients are computed; "
            "unsilent.placement.program_hook runs the program, but waits for each bucket"
        )
    for one in result.best:
        if one.precision != "fp32":
            yield (
                f"with gradients sent in 16 bits (torch's fp16_compress_hook, or with NCCL bf16_compress_hook) and "
                f"{one.arguments or 'the default buckets'}, a step takes {time_text(one.mean)} by prediction"
            )


def _table(result: Optimised) -> Table:
    steps = result.job.steps

    def buckets(one: DdpSettings) -> str:
        sizes = bucket_sizes(steps, one)
        return (
            f"{count_text(len(sizes), 'bucket')}, {human_bytes(round(min(sizes)))} to {human_bytes(round(max(sizes)))}"
        )

    heads = (
        Column.text("setting", lambda one: one.arguments or "default"), Column.text("gradients", lambda one: one.precision),
        Column("predicted step", "number", digits=time_text, of=lambda one: one.mean), Column.text("buckets", buckets),
    )  # fmt: skip
    return Table.of([result.default, *result.best], heads, "settings")


def _notes(result: Optimised) -> Iterator[str]:
    cost, steps = result.cost, result.job.steps
    if cost.per_byte <= 0:
        yield "what a larger collective costs does not show in the traces; measure the link, and pass its file as --system"
    yield f"a collective costs {time_text(cost.latency)} and {time_text(cost.per_byte * 2**20)} for each MiB"
    for one in (result.default, *result.best):
        cost = result.job.cost if one is result.default else result.cost
        if not cost.covers(bucket_sizes(steps, one)):
            yield (
                f"buckets of {one.arguments or 'the default'} are outside the sizes that the cost was fitted to "
                f"({human_bytes(round(cost.smallest))} to {human_bytes(round(cost.largest))}): measure the link with unsilent "
                "placement measure; pass its file as --system"
            )
            return


def _json(one: DdpSettings) -> dict[str, Any]:
    return {
        "caps_mib": list(one.caps),
        "precision": one.precision,
        "arguments": one.arguments,
        "seconds": one.seconds.tolist(),
    }
