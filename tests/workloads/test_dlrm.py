"""DLRM's data: the synthetic clicks, and CSV files good and bad."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from unsilent.basics.errors import UsageError
from unsilent.workloads import load
from unsilent.workloads.click_csv import from_csv
from unsilent.workloads.clicks import synthetic_clicks

from .conftest import SHARED


def _rows(count=200, sep=","):
    """A CSV with a learnable target, two numeric and two categorical columns."""
    rng = np.random.default_rng(1)
    lines = [sep.join(("age", "city", "click", "price", "code"))]
    for i in range(count):
        age, city = int(rng.integers(18, 80)), rng.choice(["Rome", "Oslo", "Köln"])
        label = "yes" if age + 20 * (city == "Rome") + rng.normal(0, 10) > 65 else "no"
        lines.append(sep.join((str(age), city, label, "" if i % 7 == 0 else f"{age / 3:.2f}", f"c{rng.integers(5)}")))
    return lines


def _file(folder, lines, name="clicks.csv"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_synthetic_is_balanced_and_has_the_schema():
    clicks = synthetic_clicks()
    assert clicks.dense.shape[1] == 13
    assert clicks.sparse.shape[1] == len(clicks.tables) == 26
    assert (clicks.tables[0], clicks.tables[-1]) == (10, 10_000)
    assert (clicks.sparse < torch.tensor(clicks.tables)).all()
    assert clicks.sparse.min() >= 0
    assert abs(clicks.labels.mean() - 0.5) < 0.02
    counts = torch.bincount(clicks.sparse[:, 20], minlength=clicks.tables[20]).sort(descending=True).values
    assert counts[:20].sum() > 0.5 * counts.sum(), "few categories take most look-ups"


def test_score_agrees_with_sklearn(zoo):
    clicks, workload = synthetic_clicks(), zoo("dlrm")
    held_out = slice(clicks.training_row_count, None)
    with torch.no_grad():
        scores = workload.run(workload.model(), {"dense": clicks.dense[held_out], "sparse": clicks.sparse[held_out]})
    assert roc_auc_score(clicks.labels[held_out], scores) == pytest.approx(workload.info["accuracy"]["value"], abs=1e-6)
    assert ((scores > 0) & (scores < 1)).float().mean() > 0.99


def test_threshold(zoo):
    assert zoo("dlrm").judge.at == 0.5
    assert load("dlrm", {"threshold": "0.25"}).judge.at == 0.25
    for wrong in ("0", "1", "-1", "nan"):
        with pytest.raises(UsageError, match="option 'threshold' is .*expected a probability"):
            load("dlrm", {"threshold": wrong})


@pytest.mark.parametrize("sep", [",", ";", "\t"])
def test_csv(tmp_path, sep):
    clicks = from_csv(_file(tmp_path, _rows(sep=sep)))
    assert clicks.dense.shape == (200, 2)
    assert clicks.sparse.shape == (200, 2)
    assert clicks.tables == (64, 128)
    train = clicks.dense[: clicks.training_row_count]
    assert abs(train[:, 0].mean()) < 1e-5
    assert abs(train[:, 0].std(correction=0) - 1) < 1e-5
    assert (clicks.dense[:, 1] == 0).sum() >= 200 // 7, "missing numbers are the mean"
    assert 0 < clicks.labels.mean() < 0.6


def test_csv_workload(tmp_path):
    path = _file(tmp_path, _rows(600))
    workload = load("dlrm", {"eval": "50", "drop": "code"}, data=path)
    assert workload.info["accuracy"]["value"] > 0.8
    assert workload.judge.at == workload.info["threshold"] == workload.info["positive_share"]
    assert workload.batches()[0]["sparse"].shape == (50, 1)
    assert load("dlrm", {"drop": "code"}, data=path).batches()[0]["dense"].shape == (120, 2), "all held-out rows"
    with pytest.raises(UsageError, match="option 'eval' is 500; expected 1 to 120"):
        load("dlrm", {"eval": "500"}, data=path)


def test_csv_without_signal(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["n,c,y"] + [f"{rng.random()},{rng.choice(['a', 'b'])},{rng.integers(2)}" for _ in range(2000)]
    with pytest.raises(
        UsageError, match=r"reached AUC 0\.[45]\d*, expected at least 0\.55: the columns hardly predict"
    ):
        load("dlrm", data=_file(tmp_path, lines))


@pytest.mark.slow
def test_same_content_in_another_process(tmp_path):
    """Hashing of categories must not be Python's."""
    path = _file(tmp_path, _rows())
    code = f"from unsilent.workloads.click_csv import from_csv; print(from_csv({path!r}).sparse.sum(0).tolist())"
    done = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert done[0] == done[1] == f"{from_csv(path).sparse.sum(0).tolist()}\n"


def test_hash_follows_content_and_options(tmp_path):
    path = _file(tmp_path, _rows())
    hashes = {
        from_csv(path).hash,
        from_csv(path, drop=("code",)).hash,
        from_csv(path, rows=8).hash,
        from_csv(path, positive="no").hash,
        from_csv(_file(tmp_path, _rows(201), "b.csv")).hash,
    }
    assert len(hashes) == 5
    assert from_csv(path).hash == from_csv(_file(tmp_path, _rows(), "copy.csv")).hash


def test_rows_caps_a_table(tmp_path):
    clicks = from_csv(_file(tmp_path, _rows()), rows=10)
    assert clicks.tables == (10, 10)
    assert clicks.sparse.max() < 10


def test_target_and_positive(tmp_path):
    lines = ["kind,x,last"] + [f"{'a' if i % 3 else 'b'},{i},{'lo' if i % 5 else 'hi'}" for i in range(100)]
    path = _file(tmp_path, lines)
    assert from_csv(path).labels.mean() == pytest.approx(0.2), "the last column, its rarer value"
    assert from_csv(path, positive="lo").labels.mean() == pytest.approx(0.8)
    assert from_csv(path, target="kind").labels.mean() == pytest.approx(0.34)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, r"is empty; expected a CSV file with a header line"),
        (_rows()[:1], {}, r"has 0 data rows; expected at least 100"),
        (_rows()[:50], {}, r"has 49 data rows; expected at least 100"),
        ([*_rows()[:9], "1,2,3", *_rows()[9:]], {}, r"data row 9 has 3 cells, the header has 5"),
        ([*_rows()[:9], '1,2,yes,"3,4', *_rows()[9:]], {}, r"is not a readable CSV file: "),
        (_rows(), {"target": "clock"}, r"unknown target column in .* 'clock'; did you mean 'click'"),
        (_rows(), {"drop": "city+cde"}, r"unknown column to drop from .* 'cde'; did you mean 'code'"),
        (_rows(), {"positive": "yess"}, r"unknown positive value of column 'click' 'yess'; did you mean 'yes'"),
        (_rows(), {"target": "city"}, r"target column 'city' has 3 distinct values \('Köln', 'Oslo', 'Rome'\); expected two"),
        (_rows()[:1] + [line.replace("yes", "no") for line in _rows()[1:]], {}, r"target column 'click' has 1 distinct"),
        (_rows(), {"drop": "age+price"}, r"has no numeric column besides the target"),
        (_rows(), {"drop": "city+code"}, r"has no categorical column besides the target"),
        (_rows(), {"rows": "0"}, r"option 'rows' is 0; expected 1 to"),
        (["a,b,a,d,y", *_rows()[1:]], {}, r"has two columns named 'a'; name each column once"),
    ],
)  # fmt: skip
def test_bad_csv(tmp_path, lines, options, message):
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(lines) + "\n" if lines else "", encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load("dlrm", options, data=str(path))
    assert "\n" not in str(caught.value)


def test_unreadable_csv(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*gone.csv: No such file"):
        load("dlrm", data=str(tmp_path / "gone.csv"))
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        load("dlrm", data=str(tmp_path))
    (tmp_path / "latin.csv").write_bytes("a,b\n1,2\n3,Köln\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin.csv is not UTF-8 text \(line 3, byte 11\)"):
        load("dlrm", data=str(tmp_path / "latin.csv"))
    with pytest.raises(UsageError, match=r"options target, positive, drop, rows and room describe a CSV; give data="):
        load("dlrm", {"drop": "a"})


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "bank-full.csv").exists(), reason="real data not there")
def test_bank_marketing():
    workload = load("dlrm", {"drop": "duration"}, data=str(SHARED / "bank-full.csv"))
    assert 0.75 < workload.info["accuracy"]["value"] < 0.85
    assert workload.judge.at == pytest.approx(0.117, abs=0.002)
    with torch.no_grad():
        clicks = workload.run(workload.model(), workload.batches()[0]) >= workload.judge.at
    assert 0.1 < clicks.float().mean() < 0.5, "both answers are given"
