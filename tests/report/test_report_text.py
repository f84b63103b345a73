"""Digits, limits and names as a reader sees them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.interval import Interval
from unsilent.report.text import (
    break_name,
    count_text,
    duration_text,
    escape_unprintable,
    estimate_text,
    listed,
    lower_bound_text,
    number_text,
    percent_text,
    share_of_estimate_text,
    share_with_limits_text,
    short,
    shorten_distinct,
    signed,
    upper_bound_text,
)


def interval(estimate, low, high):
    return Interval(estimate, low, high, 0.95, 100, "")


@pytest.mark.parametrize(
    ("estimate", "low", "high", "text"),
    [
        (0.0031, 0.0018, 0.0046, ("0.31", "0.18", "0.46")),
        (0.009, 0.004, 0.014, ("0.9", "0.4", "1.4")),
        (0.31234, 0.30111, 0.32345, ("31.2", "30.1", "32.4")),
        (0.5, 0.1, 0.9, ("50", "10", "90")),
        (0.0, 0.0, 0.0038268, ("< 0.39", "0", "0.39")),
        (0.0, 0.0, 0.0076244, ("< 0.77", "0", "0.77")),
        (0.000004, 0.0000001, 0.0038, ("0.0004", "0.00001", "0.38")),
        (1.0, 0.991, 1.0, ("100.0", "99.1", "100.0")),
        (None, 0.0, 1.0, ("no trial", "0", "100")),
        (1e-9, 1e-10, 2.23e-9, ("1.0e-7", "1e-8", "2.3e-7")),
        (0.3, 0.3, 0.3, ("30", "30", "30")),
        (0.25, 0.0063, 0.8059, ("25", "0.6", "81")),  # 1 of 4
        (1 / 3, 0.0084, 0.9058, ("33", "0.8", "91")),
        (0.000413, 0.0000712, 0.0431, ("0.041", "0.007", "4.4")),
    ],
)
def test_shown(estimate, low, high, text):
    found = estimate_text(interval(estimate, low, high))
    assert (found.estimate, found.low, found.high) == text


def test_shown_scales_to_large_numbers():
    found = estimate_text(interval(12345.6, 9876.5, 15432.1), scale=1.0)
    assert (found.estimate, found.low, found.high) == ("12,300", "9,800", "15,500")


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_limits_are_rounded_outwards(a, b, c):
    low, estimate, high = sorted((a, b, c))
    found = estimate_text(interval(estimate, low, high))
    if low == high:  # exact, told to four digits
        assert float(found.low.replace(",", "")) == pytest.approx(100 * low, rel=1e-3)
        return
    # The text is made from twelve digits.
    assert float(found.low.replace(",", "")) <= 100 * low * (1 + 1e-11)
    assert float(found.high.replace(",", "")) >= 100 * high * (1 - 1e-11)
    if estimate > 0:
        assert float(found.estimate) > 0


@given(st.floats(-1e9, 1e9) | st.floats(1e-12, 1) | st.integers(0, 10**7).map(float), st.sampled_from([1.0, 100.0]))
def test_a_bound_is_rounded_away_from_the_promise(value, scale):
    exact, slack = value * scale, 1e-11 * abs(value * scale)  # the text is made from twelve digits
    upper, lower = (float(text(value, scale).replace(",", "")) for text in (upper_bound_text, lower_bound_text))
    assert lower - slack <= exact <= upper + slack
    assert upper - lower <= 0.1 * abs(exact) + slack


def test_bounds_have_two_digits():
    percent = {0.0139: "1.4", 0.02: "2.0", 0.916: "92", 1.0: "100", 0.0: "0", 0.00010001: "0.011"}
    assert {value: upper_bound_text(value, 100) for value in percent} == percent
    assert [lower_bound_text(v) for v in (91.6, 1.99, 12345, 0.3)] == ["91", "1.9", "12,000", "0.30"]
    assert upper_bound_text(math.inf) == "inf"


@pytest.mark.parametrize(
    ("estimate", "low", "high", "said"),
    [
        (0.376, 0.3451, 0.4049, "37.6 % [34.5, 40.5]"),
        (0.0, 0.0, 0.00382, "0 % [0, 0.39]"),
        (0.25, 0.25, 0.25, "25 %"),
        (None, 0.0, 1.0, "no trial"),
    ],
)
def test_shares_have_their_limits_outwards(estimate, low, high, said):
    assert share_with_limits_text(interval(estimate, low, high)) == said


@given(st.floats(1e-9, 1), st.floats(0, 1), st.floats(0, 1))
def test_rounding_changes_an_estimate_by_a_fortieth_at_most(estimate, below, above):
    low, high = estimate * below, estimate + (1 - estimate) * above
    if low < high:
        told = float(estimate_text(interval(estimate, low, high)).estimate)
        assert told == pytest.approx(100 * estimate, rel=0.0251)
        assert float(signed(interval(-estimate, -high, -low)).estimate) == pytest.approx(-100 * estimate, rel=0.0251)
        assert float(share_of_estimate_text(1.0, estimate, low, high)) == pytest.approx(100 * estimate, rel=0.0251)


def test_no_digits_beyond_the_interval():
    """At most two digits of the half-width, for any width."""
    for power in range(-4, 0):
        for lead in (1.0, 2.0, 3.6, 7.0, 9.9):
            half = lead * 10.0**power
            text = estimate_text(interval(0.5, 0.5 - half / 2, 0.5 + half / 2)).estimate
            decimals = len(text.partition(".")[2])
            assert decimals == 0 or 10.0**-decimals >= 100 * half / 2 / 36, (half, text)


def test_clean_shows_what_would_act():
    assert escape_unprintable("a\nb\x1b[31m\u202e\u200b\ud800") == "a\\x0ab\\x1b[31m\\u202e\\u200b\\ud800"
    assert escape_unprintable("überlänge.层") == "überlänge.层"


def test_short_keeps_both_ends():
    assert short("abcdefghij", 5) == "ab…ij"
    assert short("abc", 5) == "abc"


def test_distinct_drops_what_all_share():
    names = [f"encoder.layers.{i}.attention.weight" for i in range(3)]
    assert shorten_distinct(names, 20) == ["…0…", "…1…", "…2…"]
    assert shorten_distinct(names, 80) == names
    assert len(set(shorten_distinct([f"{'x' * 50}.{i}.y" for i in range(12)], 12))) == 12
    assert shorten_distinct(["a" * 30, "a" * 30], 10) == [short("a" * 30, 10)] * 2
    assert shorten_distinct([], 5) == []


def test_small_texts():
    plural = [count_text(n, noun) for n, noun in ((1, "query"), (2, "query"), (2, "series"), (0, "delay"))]
    assert plural == ["1 query", "2 queries", "2 series", "0 delays"]
    assert [count_text(1, "batch"), count_text(2, "batch"), count_text(2048, "sample")] == [
        "1 batch",
        "2 batches",
        "2,048 samples",
    ]
    assert listed("abcd", limit=2) == "a, b and 2 more"
    assert (percent_text(1 / 3), percent_text(None)) == ("33 %", "–")
    assert [duration_text(s) for s in (1.234, 300, 7200)] == ["1.23 s", "5 min", "2 h"]
    assert [number_text(v) for v in (6880000.0, 0.01284, 0.0, 1e-9)] == ["6,880,000", "0.0128", "0", "1e-09"]
    assert math.isclose(float(number_text(123.4)), 123)


def test_folded_breaks_where_names_part():
    assert break_name("layers.10.self_attention", 12) == ["layers.10.", "self_", "attention"]
    assert break_name("stem.conv/v1", 10) == ["stem.", "conv/v1"]
    assert break_name("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert break_name("", 10) == [""]


@given(st.text(max_size=60), st.integers(1, 30))
def test_folded_loses_nothing(name, width):
    lines = break_name(name, width)
    assert "".join(lines) == name
    assert max(map(len, lines)) <= width


def test_part_keeps_the_digits_of_the_whole():
    assert share_of_estimate_text(0.25, 0.02, 0.01, 0.03) == "0.5"
    assert share_of_estimate_text(0.0, 0.02, 0.01, 0.03) == "0"
    assert share_of_estimate_text(1e-6, 0.5, 0.4, 0.6) == "0.00005"
