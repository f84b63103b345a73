"""``--dry-run``: the headline has the estimate that the findings speak of."""

from __future__ import annotations

import json
import re

import pytest

from conftest import in_process
from studies.clean_inference import write_clean
from unsilent.basics.sizes import rough_duration_text


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0021, "0.0021 s"), (42.3, "42 s"), (99.6, "100 s"), (119, "120 s"), (7199, "2 h")]
)
def test_a_time_has_no_power_of_ten(seconds, said):
    assert rough_duration_text(seconds) == said


@pytest.mark.parametrize("budget", [("--trials", 5), ("--rel", "20%")])
def test_the_headline_has_the_estimate_of_time(tmp_path, budget):
    write_clean(tmp_path)
    asked = ("pvf", "clean.py:make", *budget, "--dry-run", "--quiet")
    done = in_process(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.sub(r"\s+", " ", done.stdout)
    assert re.search(r"trials? would run, in at most about [\d.,]+ (s|min|h|days) with \d+ jobs?", shown), shown
    assert "the time estimate does not include" in shown
    assert ("the campaign decides how many" in shown) is (budget[0] == "--rel")
    assert json.loads(in_process(*asked, "--json", cwd=tmp_path).stdout)["seconds"] > 0


@pytest.mark.slow
def test_a_store_with_a_pilot_shows_the_expected_end(tmp_path):
    write_clean(tmp_path)
    asked = ("pvf", "clean.py:make", "--ci", "4%", "--store", "s.sqlite")
    ran = in_process(*asked, "--plain", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    number, seconds = r"[\d,]+", r"[\d.]+ (?:s|min)"
    range_of_time = rf"in about {seconds} \({seconds} to {seconds}, measured on {number} trials\)"
    assert re.search(
        rf"the end is expected after {number} trials \({number} to {number}\), {range_of_time}", ran.stderr
    )

    done = json.loads(in_process(*asked, "--dry-run", "--quiet", "--json", cwd=tmp_path).stdout)
    assert done["expected_trials"] == [done["stored"]] * 3
    assert "about 0 trials would run" in in_process(*asked, "--dry-run", "--quiet", cwd=tmp_path).stdout

    asked = ("pvf", "clean.py:make", "--ci", "2%", "--store", "s.sqlite", "--dry-run", "--quiet")
    finer = json.loads(in_process(*asked, "--json", cwd=tmp_path).stdout)
    low, middle, high = finer["expected_trials"]
    assert done["stored"] < low <= middle <= high
    assert 0 < finer["expected_seconds"][0] <= finer["expected_seconds"][2] < finer["seconds"]
    shown = re.sub(r"\s+", " ", in_process(*asked, cwd=tmp_path).stdout)
    assert re.search(rf"about {number} trials would run, {range_of_time}, with \d+ jobs?", shown), shown
