"""Claim (Jiao et al., arXiv 2405.01741; Meta engineering blog, 2024-06-19): in a DLRM the top MLP is most vulnerable, the
bottom MLP less, embedding tables least; vulnerability grows with the number of flips; some outputs are NaN at 128.

Only the order is tested: the published data set, batch size, number of injections and intervals are not known.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import unsilent_cli

BANK = Path(__file__).parents[3] / "shared" / "data" / "bank-full.csv"
BUILD = Path(__file__).parents[2] / "build" / "claims"
DATA = {"synthetic": (), "bank": ("--data", BANK, "--with", "drop=duration")}


@pytest.mark.parametrize("data", DATA)
def test_embedding_below_bottom_below_top(data: str) -> None:
    if data == "bank" and not BANK.exists():
        pytest.skip("bank-full.csv is not here")
    BUILD.mkdir(parents=True, exist_ok=True)
    done = unsilent_cli(
        "pvf", "dlrm", *DATA[data], "--flips", "1,8,128", "--trials", 20000, "--jobs", 2,
        "--store", BUILD / f"dlrm-{data}.sqlite", "--json", "--quiet", seconds=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {(r["target"], r["flips"]): r for r in json.loads(done.stdout)["results"] if r["level"] == "component"}
    for (name, flips), r in sorted(rows.items(), key=lambda item: item[0][1]):
        print(
            f"{name:12} x{flips:<4} {r['estimate']:.5f} [{r['low']:.5f}, {r['high']:.5f}] due {r['due'] / r['units']:.5f}"
        )
    for flips in (1, 8, 128):
        embedding, bottom, top = (rows[name, flips] for name in ("embedding", "bottom_mlp", "top_mlp"))
        assert embedding["high"] < bottom["low"]
        assert bottom["high"] < top["low"]
    for name in ("embedding", "bottom_mlp", "top_mlp"):
        assert rows[name, 1]["high"] < rows[name, 8]["high"] < rows[name, 128]["high"]
    assert sum(rows[name, 128]["due_kinds"]["nonfinite"] for name in ("bottom_mlp", "top_mlp")) > 0
