"""The result of ``unsilent timeline optimise``, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from unsilent.basics.interval import Interval
from unsilent.basics.sizes import human_bytes
from unsilent.report.estimates import machine_table, measured
from unsilent.report.model import Column, Report, Section, Table, TextBlock
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, duration_text
from unsilent.timeline.ddp.model import DdpSteps, LinkCost
from unsilent.timeline.ddp.optimise import PRECISIONS, DdpSettings, bucket_sizes, optimise, predict, reasons
from unsilent.timeline.ddp.traces import DdpJob
from unsilent.timeline.ddp.what_if import DOES_NOT_GROW, beyond_fit
from unsilent.timeline.link_costs import FLAT
from unsilent.timeline.step_split import Floats

METHOD = (
    "Steps are replayed from when gradients were ready on each rank, with other buckets and the fitted cost of a collective; "
    "buckets travel one after the other. Each recorded step is predicted, and the mean is compared. The noise floor is twice the "
    "standard error of the mean of the recorded steps. Limits come from resampled steps, to which "
    "the cost is fitted anew. Casts of gradients to 16 bits are not counted."
)


@dataclass(frozen=True, repr=False, eq=False)
class Optimised(Shown):
    """The best settings for a recorded training under DDP.

    Attributes:
        job: The recorded job.
        recorded: Settings with the recorded buckets, the baseline of comparisons.
        default: DDP's default settings.
        best: Settings by gradient precision, the fastest first.
        reduction: Reduction program used in ``best``; `FLAT` is DDP's own.
        cost: Cost of the reduction program.
    """

    job: DdpJob
    recorded: DdpSettings
    default: DdpSettings
    best: list[DdpSettings]
    reduction: str
    cost: LinkCost

    @property
    def noise_floor(self) -> float:
        """Twice the standard error of the mean of the recorded steps, in seconds."""
        recorded = self.job.recorded
        return float(2 * recorded.std(ddof=1) / len(recorded) ** 0.5) if len(recorded) > 1 else float("inf")

    def label(self, settings: DdpSettings) -> str:
        """Name of settings: their DDP arguments, "as recorded", or "DDP's default"."""
        default = "DDP's default"
        if settings.buckets == self.recorded.buckets:
            return f"as recorded ({default})" if settings.buckets == self.default.buckets else "as recorded"
        return settings.arguments or default

    def precision(self, settings: DdpSettings) -> str:
        """Name of the precision in which gradients are sent."""
        recorded = {2: "16 bits", 8: "64 bits"}.get(self.job.item_bytes, "fp32")
        return recorded if settings.precision == "fp32" else settings.precision

    def cost_of(self, settings: DdpSettings) -> LinkCost:
        """Cost of a collective with these settings: the chosen program's for the best settings, else DDP's own."""
        return self.cost if any(settings is best for best in self.best) else self.job.cost

    def ratio(self, settings: DdpSettings) -> Interval:
        """Predicted step time divided by that of the recorded buckets, with an interval."""
        steps, share = self.job.steps, PRECISIONS[settings.precision]
        is_own = self.cost_of(settings) == self.job.cost
        return self.job.ratio(
            lambda fitted: steps.step_seconds(settings.buckets, fitted if is_own else self.cost, share),
            lambda fitted: steps.step_seconds(self.recorded.buckets, fitted),
        )

    @property
    def shown(self) -> list[DdpSettings]:
        """Recorded, default and best settings, each once, or the recorded ones alone if predictions are in doubt."""
        every = [self.recorded] if self.job.doubt else [self.recorded, self.default, *self.best]
        keys = [(settings.buckets, settings.precision, self.cost_of(settings)) for settings in every]
        return [settings for place, settings in enumerate(every) if keys[place] not in keys[:place]]

    def report(self, source: str = "") -> Report:
        """Report on the settings; ``source`` names the traces."""
        job, steps = self.job, count_text(len(self.job.recorded), "step")
        best = [] if job.doubt else self.best
        best_time = [
            ("best", duration_text(settings.mean), f"predicted, {self.precision(settings)} gradients")
            for settings in best[:1]
        ]
        lines = tuple((None, line) for settings in best[:1] for line in reasons(job.steps, self.cost, settings))
        ratios = {
            f"{self.precision(settings)} {self.label(settings)}": self.ratio(settings) for settings in self.shown[1:]
        }
        return Report(
            "unsilent/timeline-optimise/2", "timeline optimise", f"Buckets for {source or 'a job'}", _headline(self),
            machine_table(measured({}, ratios, "step"), ("measure", "")),
            numbers=(
                ("step time", duration_text(float(job.recorded.mean())), f"recorded, mean of {steps}"),
                ("as recorded", duration_text(self.recorded.mean), "predicted"),
                *best_time,
                ("noise floor", duration_text(self.noise_floor), "of the recorded mean"),
                ("error of the model", f"{100 * job.error:+.2g} %", "recorded buckets replayed, against recorded steps"),
            ),
            findings=tuple(_findings(self, best)),
            sections=(
                Section("Settings", "Predicted steps, and what to pass to DistributedDataParallel.", (_table(self),)),
                *([Section("Why these buckets", "", (TextBlock(lines),))] if lines else []),
            ),
            notes=tuple(_notes(self)),
            method=METHOD,
            further_json={"results": {
                "reduction": self.reduction, "best": best, "default": self.default,
                "recorded": self.recorded, "arguments": [settings.arguments for settings in best], "is_trusted": not job.doubt,
            }},
        )  # fmt: skip


def find_settings(job: DdpJob, programs: Mapping[str, LinkCost] | None = None) -> Optimised:
    """The settings of DDP that are predicted to be fastest.

    ``programs`` are costs of further reduction programs by name; with ``None``, only DDP's own reduction is considered.
    """
    is_halved = job.cost.grows and job.item_bytes in (-1, 4)
    precisions = list(PRECISIONS) if is_halved else ["fp32"]
    costs = {FLAT: job.cost, **(programs or {})}
    tried = {name: optimise(job.steps, costs[name], precisions) for name in _programs_not_beaten(costs, job.steps)}
    best = min(tried, key=lambda name: (round(tried[name][0].mean, 9), name != FLAT))
    recorded = DdpSettings((), "fp32", job.buckets, job.replayed())
    return Optimised(job, recorded, predict(job.steps, job.cost), tried[best], best, costs[best])


def _programs_not_beaten(costs: Mapping[str, LinkCost], steps: DdpSteps) -> Iterator[str]:
    """Names of the reduction programs that no other program beats at every size.

    DDP's own is always among them.
    """
    whole = float(steps.sizes.sum())
    sizes = np.unique(np.append(np.geomspace(1.0, whole, 200), whole * np.linspace(0.005, 1, 200)))
    better = list[Floats]()
    for name in sorted(costs, key=lambda name: (float(costs[name](sizes).sum()), name != FLAT)):
        seconds = costs[name](sizes)
        if name == FLAT or not any((better_seconds <= seconds).all() for better_seconds in better):
            better.append(seconds)
            yield name


def _headline(result: Optimised) -> str:
    if result.job.doubt:
        return f"No settings are recommended: {result.job.doubt}."
    best = next(settings for settings in result.best if settings.precision == "fp32")
    gain, floor = result.recorded.mean - best.mean, duration_text(result.noise_floor)
    if gain <= result.noise_floor:
        return (
            f"By prediction no buckets shorten a step by more than the noise floor ({floor}); keep the recorded ones."
        )
    ratio = result.ratio(best)
    if ratio.high >= 1:
        return (
            f"Whether other buckets shorten a step is not established: with {result.label(best)}, it would take {ratio.low:.3g} "
            f"to {ratio.high:.3g} times as long as with the recorded ones ({100 * ratio.confidence:g} % confidence); keep these."
        )
    setting = f"DistributedDataParallel(…, {best.arguments})" if best.arguments else "DDP's default"
    return (
        f"{setting} shortens a step from {duration_text(result.recorded.mean)} as recorded to {duration_text(best.mean)} by "
        f"prediction (noise floor {floor})."
    )


def _findings(result: Optimised, best: list[DdpSettings]) -> Iterator[str]:
    if best and result.reduction != FLAT:
        yield (
            f"in these settings buckets are reduced by: {result.reduction}, while gradients are computed; "
            "unsilent.placement.program_hook runs the program, but waits for each bucket"
        )
    for settings in best:
        if settings.precision != "fp32":
            ratio = result.ratio(settings)
            is_clear = ratio.high < 1 and result.recorded.mean - settings.mean > result.noise_floor
            unclear = "" if is_clear else "; whether that is faster is not established"
            yield (
                f"with gradients sent in 16 bits (torch's fp16_compress_hook, or with NCCL bf16_compress_hook) and the buckets "
                f"{result.label(settings)}, a step takes {duration_text(settings.mean)} by prediction{unclear}"
            )


def _table(result: Optimised) -> Table:
    steps = result.job.steps

    def buckets(settings: DdpSettings) -> str:
        sizes = bucket_sizes(steps, settings)
        least, most = (human_bytes(round(size)) for size in (min(sizes), max(sizes)))
        return f"{count_text(len(sizes), 'bucket')} of {most if least == most else f'{least} to {most}'}"

    heads = (
        Column.text("setting", result.label), Column.text("gradients", result.precision),
        Column("predicted step", "number", digits=duration_text, of="mean"), Column.text("buckets", buckets),
    )  # fmt: skip
    return Table.of(result.shown, heads, "settings")


def _notes(result: Optimised) -> Iterator[str]:
    cost = result.cost
    if not cost.grows:
        yield DOES_NOT_GROW
    latency, per_mib = duration_text(cost.latency), duration_text(cost.per_byte * 2**20)
    yield f"predicted time of a collective: {latency}, and {per_mib} more for each MiB"
    for settings in result.shown:
        link_cost, sizes = result.cost_of(settings), bucket_sizes(result.job.steps, settings)
        if link_cost.grows and not link_cost.covers(sizes):
            of = f"{result.label(settings)}, {result.precision(settings)}"
            yield f"{of}: {beyond_fit(link_cost, sizes)}; give a --system measured with --sizes around these"
    yield from result.job.notes
