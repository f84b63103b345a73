"""The report of a comparison of two models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unsilent.basics.interval import known_value
from unsilent.basics.nested import leaves_in
from unsilent.compare.disagreement import MOST_OVERLAP
from unsilent.compare.language import QUANTILE
from unsilent.compare.layer_report import layer_findings, layer_sections
from unsilent.report.estimates import Estimate, machine_table, measured, rows_across
from unsilent.report.model import Column, Heading, Plot, Report, Section, SideBySide, Table, TextBlock
from unsilent.report.text import count_text, number_text, ratio_text, share_with_limits_text, upper_bound_text
from unsilent.report.theme import Figure, figure
from unsilent.statistics import clopper_pearson

if TYPE_CHECKING:
    from unsilent.compare.comparing import Comparison
    from unsilent.compare.language import LanguageComparison

MOST_PIXELS = 64
"""Most pixels per side of a picture; of larger pictures every second pixel or fewer are shown."""
MOST_VALUES = 64
"""Largest number of values of an input that is shown as text."""
CHANNELS = (1, 3)
RATIO = "perplexity ratio"


def report(result: Comparison) -> Report:
    """Report on a comparison."""
    rows = _estimates(result)
    sections = [*_sections(result, rows), *_layers(result)]
    names = {"original": result.original, "deployed": result.deployed, "judge": result.judge}
    names |= {"judged output": result.judged_output, "data": result.data}
    findings = (*_findings(result), *_layer_findings(result))
    facts = [("inputs", f"{result.n:,}"), *((name, text) for name, text in names.items() if text)]
    return Report(
        "unsilent/compare/1", "comparison", f"{result.deployed} compared with {result.original}", headline(result),
        machine_table(rows, ["class", "measure", ""]), tuple(_numbers(result)), findings, tuple(sections),
        tuple(facts), tuple(_notes(result)),
    )  # fmt: skip


def headline(result: Comparison) -> str:
    """Headline with the number of lost answers, or without labels the number of changed ones."""
    text = _headline(result)
    return (
        f"At the last position only: {text[0].lower()}{text[1:]}" if _judges_one_position_of_each_text(result) else text
    )


def _judges_one_position_of_each_text(result: Comparison) -> bool:
    """Whether the judge reads one position of each text although all positions were compared."""
    return result.language is not None and bool(result.language.sequences)


def _headline(result: Comparison) -> str:
    if not result.records.changed.any():
        limit = upper_bound_text(result.changed.high, 100)
        sure, inputs = f"with {100 * result.confidence:g} % confidence", count_text(result.n, "input")
        return f"The answer changed for none of {inputs}; {sure}, it changes for at most {limit} % of such inputs"
    if result.gained is None:
        share = share_with_limits_text(result.changed)
        return f"Answers changed for {result.records.changed.sum():,} of {count_text(result.n, 'input')}: {share}"
    lost, gained = (round((share.estimate or 0) * result.n) for share in (result.lost, result.gained))
    share = share_with_limits_text(result.lost)
    return (
        f"Of {count_text(result.n, 'input')}, the deployed model answers {lost:,} wrongly that the original answers rightly "
        f"({share}), and {gained:,} rightly that the original answers wrongly"
    )


def _estimates(result: Comparison) -> list[Estimate]:
    """All estimates of a comparison: for all inputs, for each class, and for texts."""
    records, text, confidence = result.records, result.language, result.confidence
    rows = measured({"class": ""}, result.measures, "input")
    if records.kl is not None:
        rows += measured({"class": ""}, {"KL divergence": known_value(float(records.kl.mean()), result.n)}, "input")
    if text is None:
        rows += _class_estimates(result)
    if text is not None and text.sequences:
        of_sequences = {**text.shares(confidence), RATIO: text.perplexity_ratio(confidence)}
        rows += measured({"class": ""}, of_sequences, "sequence")
        rows += measured({"class": ""}, {n: known_value(v, text.positions) for n, v in _token_kl(text)}, "token")
    if text is not None and text.greedy is not None:
        rows += measured({"class": ""}, {"greedy runs that differ": text.greedy.differing(confidence)}, "prompt")
    return rows


def _class_estimates(result: Comparison) -> list[Estimate]:
    """Shares of the inputs of each class, the class with most changed answers first.

    There are none if answers are not classes.
    """
    records, classes = result.records, result.records.classes
    if classes is None:
        return []
    flags = {"changed": records.changed, "lost": records.lost, "gained": records.gained}
    names, counts = np.unique(classes, return_counts=True)
    shares = [float(records.changed[classes == name].mean()) for name in names]
    rows: list[Estimate] = []
    for k in sorted(range(len(names)), key=lambda k: -shares[k]):
        events = {key: int(flag[classes == names[k]].sum()) for key, flag in flags.items() if flag is not None}
        of_class = {key: clopper_pearson(n, int(counts[k]), result.confidence) for key, n in events.items()}
        rows += measured({"class": str(names[k])}, of_class, "input")
    return rows


def _token_kl(text: LanguageComparison) -> list[tuple[str, float]]:
    quantile = float(np.quantile(text.kl, QUANTILE, method="higher"))
    return [("mean KL of a token", float(text.kl.mean())), (f"{100 * QUANTILE:g} % quantile of KL", quantile)]


def _numbers(result: Comparison) -> Iterator[tuple[str, str, str]]:
    where = ", last position only" if _judges_one_position_of_each_text(result) else ""
    yield "changed answers", share_with_limits_text(result.changed), f"n = {result.n:,} inputs{where}"
    if result.records.kl is not None:
        mean, most = (number_text(float(value)) for value in (result.records.kl.mean(), result.records.kl.max()))
        yield "KL divergence", f"{mean} nats", f"largest {most}"
    if (text := result.language) is not None and text.sequences:
        ratio = text.perplexity_ratio(result.confidence)
        before, after = text.perplexities
        ratio_shown = ratio_text(ratio)
        yield RATIO, f"{ratio_shown.estimate} {ratio_shown.limits}", f"{number_text(before)} and {number_text(after)}"
        for name, value in _token_kl(text):
            yield name, f"{number_text(value)} nats", f"{text.positions:,} positions"


def _findings(result: Comparison) -> Iterator[str]:
    identical = int(result.records.identical.sum())
    yield f"Outputs have the same bits for {identical:,} of {count_text(result.n, 'input')}."
    if result.most_changed is not None:
        limit, allowed = upper_bound_text(result.changed.high, 100), f"{100 * result.most_changed:g} %"
        verdict = "more than is allowed" if result.exit_code else "within what is allowed"
        yield f"The upper limit of the share of changed answers is {limit} %: {verdict}, {allowed}."
    text = result.language
    if text is None:
        return
    if text.sequences:
        same = text.shares(result.confidence)["same top-1 token"]
        yield f"Both models name the same most likely token at {share_with_limits_text(same)} of {text.positions:,} positions."
    if (runs := text.greedy) is not None:
        differ = runs.first_differences
        places = (min(differ) + 1, int(np.median(differ)) + 1) if differ else ()
        where = "; the earliest first difference is at token {}, the median one at {}".format(*places) if places else ""
        yield f"Greedy runs of {runs.tokens} tokens differ for {len(differ):,} of {count_text(runs.prompts, 'prompt')}{where}."


def _notes(result: Comparison) -> Iterator[str]:
    yield (
        f"limits: {100 * result.confidence:g} % intervals, each for its own number; they hold for inputs drawn at random from "
        "those that the models will get, not for chosen ones"
    )
    sides = (
        "" if result.gained is None else "; lost: only the original is right; gained: only the deployed model is right"
    )
    yield f"changed: by the judge, the two models answer differently, even if both are wrong{sides}"
    yield "that each model gives the same outputs when it is run again was checked on batch 0 only"
    if _judges_one_position_of_each_text(result):
        yield "changed, lost and gained answers are those for the token after the last one of each text that is no padding"
    if result.language is not None and (problem := result.language.without_greedy):
        of_which = "" if result.language.greedy is None else " of some texts"
        yield f"greedy runs{of_which} were left out: {problem}"
    if result.gained is None:
        yield "no labels are known: a changed answer counts as lost"
    if result.records.overlap is not None:
        yield (
            "confidence delta: difference of the probabilities of the class; "
            f"top-k overlap: share of at most {MOST_OVERLAP} of the most likely classes that both models name; "
            "JS divergence: as a share of its largest possible value, 1 bit; KL divergence: in nats, of the deployed model from "
            "the original"
        )


def _sections(result: Comparison, estimates: Sequence[Estimate]) -> Iterator[Section]:
    for title, about, unit in (
        ("Disagreement", "Shares of inputs, and means over them.", "input"),
        ("Next tokens", "Shares of positions; both models read the same texts.", "sequence"),
    ):
        overall = [estimate for estimate in estimates if estimate.unit == unit and not estimate.keys["class"]]
        rows = [
            {**estimate.keys, "value": estimate.interval}
            for estimate in overall
            if estimate.keys["measure"] != RATIO and not math.isnan(estimate.interval.low)
        ]
        if rows:
            yield Section(title, about, (Table.of(rows, (Column.text("measure"), Column.share("value"))),))
    if classes := rows_across((estimate for estimate in estimates if estimate.keys["class"]), "measure"):
        inputs = {estimate.keys["class"]: estimate.interval.n for estimate in estimates}
        rows = [{"inputs": inputs[row["class"]], **row} for row in classes]
        columns = (Column.text("class"), Column.count("inputs"), *map(Column.share, list(classes[0])[1:]))
        noun = "the label" if result.gained is not None else "the original's answer"
        table = Table.of(rows, columns, terminal_rows=10, sortable=True)
        yield Section("By class", f"The class is {noun}.", (table,))
    if result.worst_inputs:
        yield _worst(result)


def _worst(result: Comparison) -> Section:
    parts: list[SideBySide | Heading | TextBlock] = []
    pictures: list[Plot] = []
    for number, sample in result.worst_inputs:
        title = _verdict(result, number)
        picture = _picture(sample)
        if picture is None:
            parts += [Heading(f"Input {number}", title), TextBlock(((None, _text(sample)),))]
        else:
            picture["layout"]["title"] = {"text": f"input {number}: {title}", "font": {"size": 12}}
            pictures.append(Plot(f"input-{number}", f"Input {number}: {title}", picture))
    every = [*(SideBySide(tuple(pictures[i : i + 4])) for i in range(0, len(pictures), 4)), *parts]
    lead = "Lost answers first, then changed ones, then those whose outputs differ most."
    return Section("Worst inputs", lead, tuple(every))


def _verdict(result: Comparison, number: int) -> str:
    records = result.records
    if records.lost is not None and records.gained is not None and (records.lost[number] or records.gained[number]):
        word = "lost" if records.lost[number] else "gained"
    else:
        word = "changed" if records.changed[number] else "same answer"
    size = "" if math.isinf(records.severity[number]) else f", severity {number_text(float(records.severity[number]))}"
    return f"{word}{size}" + ("" if records.classes is None else f", class {records.classes[number]}")


def _picture(sample: Any) -> Figure | None:
    """Figure of an image [1, 1 or 3, h, w] with full contrast, or None for other inputs."""
    if not (isinstance(sample, Tensor) and sample.is_floating_point() and sample.ndim == 4):
        return None
    if sample.shape[1] not in CHANNELS:
        return None
    step = math.ceil(max(sample.shape[2:]) / MOST_PIXELS)
    values = sample[0, :, ::step, ::step].float().cpu()
    spread = (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12)
    pixels = (255 * spread).round().byte().permute(1, 2, 0).expand(-1, -1, 3).tolist()
    trace = {"type": "image", "z": pixels, "hoverinfo": "skip"}
    xaxis, margin = {"visible": False}, {"l": 8, "r": 8, "t": 34, "b": 8}
    return figure([trace], 220, xaxis=xaxis, yaxis={**xaxis, "scaleanchor": "x"}, margin=margin)


def _text(sample: Any) -> str:
    """Text with the first values of each tensor of an input."""
    if isinstance(sample, str):
        return " ↵ ".join(sample.splitlines())
    lines = []
    for path, leaf in leaves_in(sample):
        if isinstance(leaf, Tensor):
            values = leaf.flatten()[:MOST_VALUES].tolist()
            more = " …" if leaf.numel() > MOST_VALUES else ""
            name = f"{'.'.join(path)}: " if isinstance(sample, Mapping) else ""
            lines.append(name + " ".join(f"{value:g}" for value in values) + more)
    return "; ".join(lines)


def _layers(result: Comparison) -> tuple[Section, ...]:
    return () if result.layers is None else layer_sections(result.layers)


def _layer_findings(result: Comparison) -> Iterator[str]:
    if result.layers is not None:
        yield from (f"{text[:1].upper()}{text[1:]}." for text in layer_findings(result.layers))
