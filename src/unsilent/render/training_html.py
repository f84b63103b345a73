"""Struck trainings as one self-contained HTML file; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.outcomes.training import TrainingOutcome
from unsilent.render.pages import capitalised, render_page, write_page
from unsilent.render.tables import Cell, Line
from unsilent.render.training_cells import (
    caught_cells,
    class_cells,
    condition_cells,
    counts_text,
    example,
    ordered_groups,
    part_cells,
    plainly,
    thresholds,
    told,
)
from unsilent.render.training_conditions import MOST, conditions_figure, drawn
from unsilent.render.training_curves import GOLDEN, curve_figures, stroke
from unsilent.render.training_figures import (
    DIFFERENT,
    HARM,
    LATENT,
    ROWS,
    classes_figure,
    group_figures,
    guard_figure,
    look,
    parts_figure,
)
from unsilent.render.training_info import FACTOR, findings, headline, how, pvf_text
from unsilent.report.look import Figure
from unsilent.report.text import clean, shown
from unsilent.studies.trainings.records import ClassShare, Curve, Group, Part, TrainingResult

TEMPLATE = "training.html.jinja"
SHAPES = {
    "circle-open": "○", "circle": "●", "triangle-up": "▲", "triangle-down": "▼", "square": "■", "diamond": "◆",
    "pentagon": "⬟", "star": "★", "cross": "✚", "x": "✖",
}  # fmt: skip
"""Plotly's markers as text."""
HEADS = {
    "classes": ("class", "trials", "different", "share %", "interval", "what it is", "example"),
    "groups": ("group", "by", "trials", "different %", "harmful %", "latent %"),
    "conditions": (
        "largest within two steps", "above × golden's", "latent with", "latent without", "harmless with",
        "harmless without", "loud with", "loud without",
        "sensitivity %", "specificity %", "sensitivity, different %",
    ),
    "parts": ("target", "of it", "elements", "trials", "failures", "PVF %", "interval", "different %"),
    "guard": ("faults", "trials", "caught", "share %", "interval", "ended with golden's bits"),
    "thresholds": ("threshold", "value", "what it is", "source of the default"),
}  # fmt: skip


def write_training(result: TrainingResult, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_page(render_training_html(result), path)


def render_training_html(result: TrainingResult) -> str:
    """The whole page as text."""
    return render_page(TEMPLATE, page(result), figures(result))


def figures(result: TrainingResult) -> dict[str, Figure]:
    """The figures that have something to show, by the id of their place in the page."""
    found = {"classes": classes_figure(result), **curve_figures(result)}
    found |= {f"group-{i}": drawn for i, drawn in enumerate(group_figures(result).values())}
    conditions = conditions_figure(result.points)
    if conditions is not None:
        found["conditions"] = conditions
    if result.parts:
        found["parts"] = parts_figure(result.parts)
    if result.guard is not None and any(one.n for one in result.guard.sizes):
        found["guard"] = guard_figure(result.guard.sizes)
    return found


def page(result: TrainingResult) -> dict[str, Any]:
    """Everything the template shows."""
    guard = result.guard
    return {
        "title": f"Struck trainings of {clean(result.workload)}",
        "headline": capitalised(headline(result)),
        "findings": [capitalised(line) for line in findings(result)],
        "numbers": numbers(result),
        "heads": HEADS,
        "colours": {"different": DIFFERENT, "harm": HARM, "latent": LATENT, "golden": GOLDEN},
        "classes": [_class(one, result) for one in result.classes],
        "examples": _examples(result),
        "window": result.thresholds.window,
        "kinds": [(f"group-{i}", clean(kind)) for i, kind in enumerate(group_figures(result))],
        "most_rows": ROWS if any(len(groups) > ROWS for groups in result.groups.values()) else 0,
        "counted": (seen := [name for name in map(str, TrainingOutcome) if result.whole.counts.get(name)]),
        "groups": [_group(kind, g, seen) for kind, groups in ordered_groups(result).items() for g in groups],
        "conditions": [condition_cells(found) for found in result.conditions],
        "factor": f"{FACTOR:g}",
        "left_out": MOST if len(drawn(result.points)) < len(result.points) else 0,
        "pvf": capitalised(pvf_text(result)) if result.parts else "",
        "parts": [_part(part) for part in result.parts],
        "guard": []
        if guard is None
        else [caught_cells(one) for one in (guard.different, guard.all, guard.largest, *guard.sizes, *guard.groups)],
        "how": [capitalised(line) for line in how(result)],
        "thresholds": thresholds(result),
        "facts": facts(result),
    }


def numbers(result: TrainingResult) -> list[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    found = [("struck trainings", f"{result.n:,}", f"of {result.steps:,} steps")]
    whole = result.whole
    shares = [("different", whole.different), ("harmful", whole.harmful), ("latent", whole.latent)]
    if result.parts:
        found.append(("targets", f"{len(result.parts):,}", ""))
        worst = max((part.pvf for part in result.parts), key=lambda share: (share.estimate or 0.0, share.low))
        shares = [("largest training PVF", worst)]
    for term, share in shares:
        text = shown(share.estimate, share.low, share.high)
        found.append((term, f"{text.estimate} %", text.limits if share.estimate else ""))
    found.append(("fault-free accuracy", f"{100 * result.golden_test:.2f} %", f"of {result.samples:,} samples"))
    return [*found, ("cost of a trial", f"{100 * result.cost.steps:.0f} %", "of a run's steps")]


def _class(found: ClassShare, result: TrainingResult) -> tuple[str, str, list[str]]:
    """Colour, shape, and the cells of a class."""
    colour, symbol = look(found.name)
    return colour, SHAPES[symbol], [*class_cells(found), told(found.name, result), example(result, found.name)]


def _part(part: Part) -> Line:
    name, what, *texts = part_cells(part)
    keys = (
        part.elements,
        part.n,
        part.failures,
        -1.0 if part.pvf.estimate is None else part.pvf.estimate,
        part.pvf.high,
        -1.0 if part.different.estimate is None else part.different.estimate,
    )
    return Line(name, "", (Cell(what), *(Cell(text, float(key)) for text, key in zip(texts, keys, strict=True))))


def _examples(result: TrainingResult) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Class, what it is, and its examples: the colour of the line and a sentence."""
    found = []
    for name in dict.fromkeys(curve.outcome for curve in result.curves):
        mine = [curve for curve in result.curves if curve.outcome == name]
        found.append((name, told(name, result), [(stroke(i)["color"], _curve(c)) for i, c in enumerate(mine)]))
    return found


def _curve(curve: Curve) -> str:
    test = "end not reached" if curve.test is None else f"held-out accuracy {100 * curve.test:.2f} %"
    return f"{clean(curve.trial)}: {clean(curve.told)}; {test}" + (", made by hand" if curve.made else "")


def _group(kind: str, group: Group, seen: list[str]) -> Line:
    own = (group.different, group.harmful, group.latent)
    shares = (Cell(plainly(s), -1.0 if s.estimate is None else s.estimate) for s in own)
    counts = (Cell(f"{group.counts.get(name, 0):,}", float(group.counts.get(name, 0))) for name in seen)
    cells = (Cell(clean(kind)), Cell(f"{group.n:,}", float(group.n)), *shares, *counts)
    return Line(clean(group.name), "", cells, title=counts_text(group.counts))


def facts(result: TrainingResult) -> list[tuple[str, str]]:
    """How this was made, as pairs of term and text."""
    spec, info = result.spec, result.info
    known: dict[str, Any] = {"command": result.command, "campaign": result.campaign, "store": result.store}
    known |= {"seed of the faults": spec.get("seed"), "seed of the training": spec.get("init")}
    known["training"] = info.get("description", result.workload)
    known["settings"] = _pairs(info.get("settings"))
    known["faults"] = ", ".join(f"{weight:g}*{name}" for name, weight in _weights(spec.get("faults")))
    for term in ("accelerator", "value", "per"):
        known[term] = spec.get(term)
    if spec.get("per"):
        known["memory is struck"] = f"at the moment {spec.get('moment')!r} of a step"
    for term in ("phases", "layers"):
        known[term] = ", ".join(map(str, spec.get(term) or ()))
    floors = (result.floors.implementation, result.floors.seeds)
    known |= {"replicas": ", ".join(f"{len(floor.accuracy)} with {floor.switches}" for floor in floors)}
    known |= {"data": info.get("data"), "citation": info.get("citation"), "versions": _pairs(result.versions, " ")}
    return [(term, clean(text)) for term, text in known.items() if text not in (None, "")]


def _weights(given: Any) -> list[tuple[str, float]]:
    return [(str(pair[0]), float(pair[1])) for pair in given or ()]


def _pairs(given: Any, between: str = "=") -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in given.items()) if isinstance(given, Mapping) else ""
