"""Synthetic reports say what an incident shows, in words of one family."""

from __future__ import annotations

import inspect
import json
import math
import re
import string

import numpy as np
import pytest

from triage import made_triage as made
from unsilent.triage.bundle import Bundle
from unsilent.triage.farm import reports
from unsilent.triage.farm.near_duplicates import group_of, masked
from unsilent.triage.farm.planned import FAMILIES
from unsilent.triage.farm.reports import REPORT_FAMILIES, TEMPLATES, report_of, report_text, symptoms_of
from unsilent.triage.parts import TIMELINE_FILE

SMALL_WORDS = {"on", "one", "all", "for", "by", "other", "not", "nothing"}
OF_SYMPTOMS = {"nan", "rank", "slow"}
"""Of what an incident shows: a value, a rank that is unlike others, seconds of steps."""


def words(texts):
    plain = (re.sub(r"\{\w+\}", " ", text) for text in texts)
    return {word for text in plain for word in re.findall(r"[a-z]+", text.lower())}


def of_family(family):
    return words(text for texts in TEMPLATES[family].values() for text in texts)


def many(bundle, family, count=400):
    symptoms = symptoms_of(bundle)
    return [report_text(symptoms, np.random.default_rng([7, n]), family) for n in range(count)]


def test_no_word_of_a_family_is_in_another():
    first, second = map(of_family, REPORT_FAMILIES)
    assert not first & second
    assert len(first) > 40 < len(second)
    assert set(TEMPLATES["terse"]) == set(TEMPLATES["wordy"])


@pytest.mark.parametrize("family", REPORT_FAMILIES)
def test_no_template_has_words_of_causes(family):
    causes = words([*FAMILIES, *(kind for kinds in FAMILIES.values() for kind in kinds)])
    assert not of_family(family) & causes - SMALL_WORDS - OF_SYMPTOMS


def test_a_report_is_written_without_what_is_planned():
    assert [*inspect.signature(report_of).parameters] == ["bundle", "rng", "family"]
    assert "planned" not in inspect.getsource(reports)


def test_symptoms_are_those_of_the_incident(tmp_path):
    assert not symptoms_of(Bundle(made.folder(tmp_path / "quiet"))).seen
    assert not symptoms_of(Bundle(made.folder(tmp_path / "usual", 2, {1: made.spoiled(1, made.STEP, 0, 2.1)}))).seen
    rose = symptoms_of(Bundle(made.folder(tmp_path / "rose", 2, {1: made.spoiled(1, made.STEP, 2, 20.0)})))
    assert [*rose.seen] == ["loss"]
    assert rose.seen["loss"] == pytest.approx(20, rel=0.1)
    assert rose.ranks[0] == 1
    nan = Bundle(
        made.folder(tmp_path / "nan", 2, {0: made.spoiled(0, made.STEP, 2, math.nan)}, alarms={0: (made.alarm(),)})
    )
    assert {*symptoms_of(nan).seen} == {"nonfinite", "alarm"}
    slow = made.folder(tmp_path / "slow")
    seconds = [[[0.1]] * 8, [[0.2]] * 8]
    times = {"schema": 1, "parts": ["forward"], "ranks": [0, 1], "steps": [*range(84, 92)], "seconds": seconds}
    (slow / TIMELINE_FILE).write_text(json.dumps(times))
    assert symptoms_of(Bundle(slow)).seen == {"slow": pytest.approx(2)}
    path = made.folder(tmp_path / "silent", 2, world_size=3)
    assert {*symptoms_of(Bundle(path)).seen} == {"silent"}


@pytest.mark.parametrize("family", REPORT_FAMILIES)
def test_reports_have_several_styles_and_are_the_same_for_the_same_numbers(tmp_path, family):
    bundle = Bundle(made.folder(tmp_path, 4, {2: made.spoiled(2, made.STEP, 0, math.nan)}))
    texts = many(bundle, family)
    assert texts[:3] == [report_of(bundle, np.random.default_rng([7, n]), family) for n in range(3)]
    hypotheses = TEMPLATES[family]["hypothesis"]
    empty = sum(not text for text in texts)
    supposed = sum(any(one in text for one in hypotheses) for text in texts)
    place = re.compile(r"(?:rank|worker) (\d)")
    named = [int(match[1]) for text in texts if (match := place.search(text))]
    wrong = sum(rank != 2 for rank in named)
    assert 0.15 < (empty + supposed + wrong) / len(texts) < 0.32
    assert min(empty, supposed, wrong) > 0
    assert named.count(2) > wrong
    assert len({*texts}) > 20


@pytest.mark.parametrize("family", REPORT_FAMILIES)
def test_words_of_reports_are_those_of_templates_but_for_typing_errors(tmp_path, family):
    bundle = Bundle(made.folder(tmp_path, 2, {1: made.spoiled(1, made.STEP, 1, 1e5)}))
    letters = {"".join(sorted(word)) for word in of_family(family) | {"fc", "weight", "bias", "e"}}
    told = words(text.translate(str.maketrans("", "", string.digits)) for text in many(bundle, family, 100))
    assert {"".join(sorted(word)) for word in told} <= letters


def test_a_quiet_incident_is_said_to_be_odd_and_no_more(tmp_path):
    texts = many(Bundle(made.folder(tmp_path)), "terse", 100)
    assert any("the run looks odd" in text for text in texts)
    assert not any(word in text for text in texts for word in ("nan", "jumped", "spiked", "alarm", "slow", "output"))


def test_near_duplicates_differ_in_numbers_and_names_alone(tmp_path):
    def spoiled(name, rank, step, column=0, value=1e5, report="step 90: grad norm spiked in fc.weight on rank 1"):
        return group_of(
            report, Bundle(made.folder(tmp_path / name, 2, {rank: made.spoiled(rank, step, column, value)}))
        )

    first = spoiled("first", 1, 90)
    assert spoiled("moved", 0, 91, 1, 2e5, "step 91: grad norm spiked in fc.bias on rank 0") == first
    assert spoiled("nan", 1, 90, value=math.nan).split("-")[0] == first.split("-")[0]
    assert spoiled("nan2", 1, 90, value=math.nan).split("-")[1] != first.split("-")[1]
    assert spoiled("words", 1, 90, report="loss blew up").split("-")[1] == first.split("-")[1]
    assert spoiled("words2", 1, 90, report="loss blew up") != first
    bundle = Bundle(made.folder(tmp_path / "masked"))
    assert masked("Loss 1.5e+03x at Step 90 in body.0.fc, fc.weight\n", bundle) == "loss #x at step # in #, #"
