"""Results to report on: an ordinary one, a hostile one, and the corners (no event, no trial, a rate, many layers)."""

from dataclasses import replace

import numpy as np
import pytest

from unsilent.report.heat import HeatMap
from unsilent.statistics import Interval, bounded_mean
from unsilent.statistics.comparing import difference, ratio
from unsilent.studies.pvf.comparison import CampaignDifference, ComparedRow, Comparison
from unsilent.studies.pvf.records import LookupRow, PvfResult, PvfRow

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "[red]x[/red]",
    "%{x} <a href='javascript:alert(3)'>k</a>",
    "\x1b[31mred\u202egnp",
    "überlänge.层.😀." + "x" * 90,
    'a" onmouseover="alert(4)',
)


def make_row(target, level="component", parent="", flips=1, estimate=0.01, low=0.004, high=0.02, n=500, **more):
    """A row with consistent counts: ``units`` samples of which the estimate's share is wrong, most of them silent."""
    units = more.pop("units", n * 100)
    wrong = round((estimate or 0) * units)
    due = wrong // 5
    counts = {"masked": (units - wrong) * 9 // 10, "sdc": wrong - due, "due": due}
    counts["benign"] = units - sum(counts.values())
    fields = {
        "target": target,
        "level": level,
        "parent": parent,
        "flips": flips,
        "estimate": estimate,
        "low": low,
        "high": high,
        "confidence": 0.95,
        "n": n,
        "unit": "sample",
        "units": units,
        "due_kinds": {"nonfinite": due},
        **counts,
        "elements": 1000,
        "bits": 32000,
        "method": "Gaffke, clustered by fault",
        "joint_low": low,
        "joint_high": high,
    }
    fields |= more
    wrong = fields["sdc"] + fields["due"]
    return PvfRow(**{"silent_share": fields["sdc"] / wrong if wrong else None, **fields})


def none_row(target, **more):
    """A row that no trial corrupted."""
    return make_row(target, estimate=None, low=0.0, high=1.0, n=0, units=0, **more)


def make_result(rows, **more):
    fields = {
        "workload": "dlrm",
        "info": {"accuracy": {"name": "AUC", "value": 0.7931}, "data": "clicks"},
        "fault": "bitflip",
        "at": "param:*",
        "per": "component",
        "law": "per-element",
        "unit": "sample",
        "judge": "top1",
        "seed": 7,
        "confidence": 0.95,
        "spec": {
            "workload": "dlrm",
            "options": (("rows", "2048"),),
            "data": "clicks.tsv",
            "weights": None,
            "fault": "bitflip",
            "flips": (1, 4, 16),
            "at": ("param:*",),
            "per": "component",
            "law": "per-element",
            "judge": None,
            "seed": 7,
            "device": "cpu",
            "dtype": None,
            "threads": 1,
            "study": "pvf",
        },
        "store": "pvf.sqlite",
        "campaign": "3f" * 16,
        "command": "unsilent pvf dlrm --seed 7 --flips 1,4,16 --trials 500",
        "samples": 2048,
        "batches": 2,
        "trials_done": 6000,
        "trials_planned": 6000,
        "seconds": 93.4,
        "cpu_seconds": 180.2,
        "golden_seconds": 0.031,
        "versions": {"unsilent": "0.1.0", "torch": "2.13.0"},
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "rows": tuple(rows),
        "heat_maps": (),
        "lookups": (),
        "notes": (),
    }
    return PvfResult(**{**fields, **more})


def drawn_row(rng, target, level, parent, flips, rate, elements, bits=32, trials=500):
    """A row from simulated trials: a share of faults that matter, each with its own share of wrong samples."""
    hit = rng.random(trials) < 1 - (1 - rate) ** flips
    wrong = rng.binomial(200, np.where(hit, rng.beta(0.8, 1.2, trials), 0.0))
    due = rng.binomial(wrong, 0.35)
    found = bounded_mean(wrong / 200)
    benign = int(rng.binomial(200 * trials - wrong.sum(), 0.2))
    return make_row(
        target,
        level,
        parent,
        flips,
        found.estimate,
        found.low,
        found.high,
        trials,
        units=200 * trials,
        sdc=int(wrong.sum() - due.sum()),
        due=int(due.sum()),
        due_kinds={"nonfinite": int(due.sum())},
        benign=benign,
        masked=int(200 * trials - wrong.sum() - benign),
        elements=elements,
        bits=elements * bits,
        method=found.method,
    )


def make_heat(rng, layers):
    """Exponent bits matter, some cells saw no trial, most saw nothing go wrong."""
    bits = tuple(range(32))
    rate = np.where(np.arange(32) == 30, 0.6, np.where(np.arange(32) >= 23, 0.01, 0.0002))
    n = rng.integers(0, 12, (len(layers), 32))
    wrong = rng.binomial(n * 100, np.broadcast_to(rate, n.shape))
    share = wrong / np.maximum(100 * n, 1)
    cells = [[float(p) if k else None for p, k in zip(*pair, strict=True)] for pair in zip(share, n, strict=True)]
    fields = {b: "sign" if b == 31 else "exponent" if b >= 23 else "mantissa" for b in bits}
    shape = tuple(tuple(int(k) for k in row) for row in n)
    return HeatMap("float32", tuple(layers), bits, fields, tuple(map(tuple, cells)), shape)


def make_tokens():
    """Integers: every flip of a high bit makes a number that the model refuses."""
    bits = tuple(range(64))
    fields = {b: "sign" if b == 63 else "value" for b in bits}
    return HeatMap("int64", ("input:tokens",), bits, fields, ((1.0,) * 64,), ((2,) * 64,))


def make_demo():
    rng = np.random.default_rng(4)
    parts = {
        "embedding": (2_000_000, 0.001),
        "bottom_mlp": (60_000, 0.01),
        "top_mlp": (90_000, 0.06),
        "bias": (400, 0.0),
    }
    rows, layers = [], []
    for part, (elements, rate) in parts.items():
        rows += [drawn_row(rng, part, "component", "", k, rate, elements) for k in (1, 4, 16)]
        for i in range(4):
            layers.append(f"{part}.{i}")
            rows.append(drawn_row(rng, layers[-1], "layer", part, 1, rate * (i + 1) / 3, elements // 4, trials=125))
    rows += [drawn_row(rng, "model", "model", "", k, 0.002, 2_150_400, trials=2000) for k in (1, 4, 16)]
    lookups = (
        LookupRow("hot", 410, 98_304, 0.0004, 0.021, 0.011, 0.038, 260),
        LookupRow("warm", 20_100, 98_304, 0.12, 0.0011, 0.0003, 0.0162, 240),
        LookupRow("cold", 140_000, 0, 0.87, 0.0, 0.0, 0.0156, 244),
    )
    notes = (
        "Intervals of single layers rest on 125 faults each.",
        "Only the 2,048 evaluation samples were judged; another data set may give other numbers.",
    )
    return make_result(rows, heat_maps=(make_heat(rng, layers),), lookups=lookups, notes=notes)


def make_hostile():
    rng = np.random.default_rng(5)
    rows = [make_row(name, due_kinds={"<b>hang</b>": 5}) for name in HOSTILE]
    rows += [make_row(name, "layer", HOSTILE[i - 1], flips=4) for i, name in enumerate(HOSTILE)]
    rows += [make_row("model", "model")]
    bad = HOSTILE[1]
    texts = dict.fromkeys(("workload", "fault", "at", "per", "law", "judge", "command", "store", "campaign"), bad)
    return make_result(
        rows,
        **texts,
        device=bad,
        dtype=bad,
        info={bad: bad, "accuracy": {"name": bad, "value": 0.5}, "list": [bad], "map": {bad: bad}},
        versions={bad: bad},
        heat_maps=(replace(make_heat(rng, HOSTILE), dtype=bad, fields=dict.fromkeys(range(32), bad)), make_tokens()),
        lookups=(LookupRow(bad, 1, 1, 0.1, 0.1, 0.05, 0.2, 9),),
        notes=(bad, HOSTILE[2]),
    )


@pytest.fixture
def row():
    return make_row


@pytest.fixture
def no_trial():
    return none_row


@pytest.fixture
def result():
    return make_result


@pytest.fixture(scope="session")
def demo():
    return make_demo()


@pytest.fixture(scope="session")
def hostile():
    return make_hostile()


@pytest.fixture(scope="session")
def hostile_names():
    return HOSTILE


@pytest.fixture(scope="session")
def corners(demo):
    """Name -> result: each must be shown by every renderer."""
    rng = np.random.default_rng(6)
    layers = [f"encoder.layers.{i}.self_attention.out_proj.weight" for i in range(200)]
    many = [drawn_row(rng, name, "layer", "encoder", 1, 0.02 * rng.random(), 4096, trials=60) for name in layers]
    deep = [make_row("encoder"), *many, make_row("model", "model")]
    mixed = (make_heat(rng, ["input:dense", "fc"]), make_tokens())
    return {
        "mixed": make_result([make_row("input")], transient=True, heat_maps=mixed, dtype="float32 and int64"),
        "no event": make_result([make_row(t, estimate=0.0, low=0.0, high=0.00383) for t in ("a", "b")]),
        "no trial": make_result([make_row("a"), none_row("b"), none_row("model", level="model")], trials_done=500),
        "nothing": make_result([], trials_done=0),
        "rate": make_result([replace(make_row(t), flips=None) for t in ("a", "b")], fault="rate:at=1e-6"),
        "deep": make_result(deep, heat_maps=(make_heat(rng, layers),)),
        "layers only": make_result(
            [make_row(f"l{i}", "layer", estimate=0.01 * i + 0.001, high=0.3) for i in range(12)]
        ),
        "batch": make_result([make_row("a", unit="batch"), make_row("model", "model", unit="batch")], unit="batch"),
        "certain": make_result([make_row("a", estimate=1.0, low=0.99, high=1.0), make_row("b")]),
        "bf16": replace(
            demo,
            heat_maps=(HeatMap("bfloat16", ("a",), (0, 15), {0: "mantissa", 15: "sign"}, ((None, 0.0),), ((0, 9),)),),
        ),
    }


def make_compared(a, b, p=0.5, paired=False, alpha=0.05):
    """B against A with limits made from those of both rows; ``p`` counts as corrected already."""
    one, other = (Interval(r.estimate, r.low, r.high, r.confidence, r.n, r.method) for r in (a, b))
    apart, times = difference(other, one), ratio(other, one)
    p = None if apart.estimate is None else p
    return ComparedRow(
        a=a,
        b=b,
        difference=apart,
        ratio=times,
        p=p,
        adjusted_p=p,
        differs=p is not None and p < alpha,
        is_paired=paired,
        method=apart.method,
    )


def make_comparison(a, b, rows=None, **more):
    """Two results with the same rows, every third one called different."""
    if rows is None:
        pairs = enumerate(zip(a.rows, b.rows, strict=True))
        rows = [make_compared(r, s, p=0.5 if i % 3 else 0.001, paired=i % 2 == 1) for i, (r, s) in pairs]
    fields = {
        "changes": (
            CampaignDifference("dtype", "float32", "bfloat16"),
            CampaignDifference("weights", "3f" * 16, "a0" * 16),
        ),
        "only_a": (),
        "only_b": (),
        "command": "unsilent report pvf.sqlite other.sqlite",
        "identical": False,
    }
    return Comparison(a=a, b=b, rows=tuple(rows), **{**fields, **more})


def softer(result):
    """The same rows with 40 % more of everything."""
    rows = [
        row if row.estimate is None else replace(row, estimate=min(1.4 * row.estimate, 1), high=min(1.4 * row.high, 1))
        for row in result.rows
    ]
    return replace(result, rows=tuple(rows), store="other.sqlite", campaign="a0" * 16, dtype="bfloat16")


@pytest.fixture
def compared():
    return make_compared


@pytest.fixture
def comparison():
    return make_comparison


@pytest.fixture(scope="session")
def comparisons(demo, hostile, corners):
    """Name -> comparison: an ordinary one, a hostile one, and the corners."""
    found = {name: make_comparison(one, softer(one)) for name, one in {"demo": demo, **corners}.items()}
    bad = HOSTILE[1]
    changes = tuple(CampaignDifference(name, name, name) for name in HOSTILE)
    found["hostile"] = make_comparison(
        hostile,
        softer(hostile),
        changes=changes,
        notes=HOSTILE,
        command=bad,
        only_a=hostile.rows[:9],
        only_b=hostile.rows,
    )
    found["hostile"] = replace(found["hostile"], rows=tuple(replace(r, method=bad) for r in found["hostile"].rows))
    found["same"] = make_comparison(
        demo, demo, [make_compared(r, r, 1.0, True) for r in demo.rows], identical=True, changes=()
    )
    return found
