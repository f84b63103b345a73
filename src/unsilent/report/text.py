"""Numbers, estimates and names as text.

Digits follow the rounding rule of the Particle Data Group (one or two digits of the uncertainty), limits
are rounded outwards, so a table never claims more than the interval supports. An estimate has enough digits
that rounding changes it by at most `MOST_OFF`, however wide its interval is: one of four is 25 %,
not 20 %. Names come from outside (state dicts, user files): control and bidirectional characters are shown as
escapes; renderers escape HTML and terminal markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from textwrap import wrap
from typing import Protocol

from unsilent.basics.interval import Interval
from unsilent.basics.printable import escape_unprintable as escape_unprintable

NO_TRIAL = "no trial"
_JOINT = "\xa0"
"""No-break space."""
MOST_OFF = 0.025
"""Largest relative change of an estimate by rounding."""
_PLACES = 6
"""Most decimals; numbers that need more are written as a power of ten."""


class EstimateWithLimits(Protocol):
    """The interface of objects with an estimate and its limits.

    The estimate is None if nothing was tried.
    """

    @property
    def estimate(self) -> float | None: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


@dataclass(frozen=True, slots=True)
class EstimateText:
    """The text of an estimate and of its limits, which are rounded outwards.

    ``exact``: the value is exact, so it has no limits.
    """

    estimate: str
    low: str
    high: str
    exact: bool = field(default=False, repr=False)

    @property
    def limits(self) -> str:
        """The limits as ``[low, high]``, or ``exact``."""
        return "exact" if self.exact else f"[{self.low}, {self.high}]"

    @property
    def limits_in_sentence(self) -> str:
        """The limits with a space before them, to follow the number; empty for an exact value."""
        return "" if self.exact else f" {self.limits}"

    @property
    def in_sentence(self) -> str:
        """The estimate and its limits, as used in a sentence."""
        return f"{self.estimate}{self.limits_in_sentence}"


def estimate_text(value: EstimateWithLimits, scale: float = 100.0) -> EstimateText:
    """The text of an estimate times ``scale`` (100: percent), with the digits that its interval supports.

    >>> estimate_text(Interval(0.0031, 0.0018, 0.0046, 0.95, 1, ""))
    EstimateText(estimate='0.31', low='0.18', high='0.46')
    >>> estimate_text(Interval(0.0, 0.0, 0.003827, 0.95, 1, "")).estimate
    '< 0.39'
    """
    estimate, bottom, top = value.estimate, value.low * scale, value.high * scale
    if estimate == value.low == value.high:  # not an estimate
        exact = f"{top:.4g}"
        return EstimateText(exact, exact, exact, exact=True)
    # An upper limit alone is shown with two digits.
    places = _places((top - bottom) / 2) if estimate != 0 or top <= 0 else _two_digits(top)
    estimate_places = _places_needed(estimate * scale, places) if estimate else places
    # If the estimate has more digits, a limit has them too, but at most two significant digits.
    ends = [max(places, min(estimate_places, _two_digits(limit))) for limit in (bottom, top)]
    lower, upper = _text(bottom, ends[0], ROUND_FLOOR), _text(top, ends[1], ROUND_CEILING)
    if estimate is None:
        return EstimateText(NO_TRIAL, lower, upper)
    if estimate == 0 and top > 0:
        return EstimateText(f"< {upper}", lower, upper)
    return EstimateText(_text(estimate * scale, estimate_places, ROUND_HALF_EVEN), lower, upper)


def rate_text(rate: EstimateWithLimits) -> EstimateText:
    """The text of a rate, like `estimate_text` without a scale."""
    return estimate_text(rate, scale=1.0)


def share_with_limits_text(share: EstimateWithLimits) -> str:
    """A share in percent with its limits, such as ``3.8 % [2.5, 5.6]``; ``25 %`` if it is exact."""
    if share.estimate is None:
        return NO_TRIAL
    text = estimate_text(share)
    return f"{text.estimate if share.estimate else 0} %{text.limits_in_sentence}"


def upper_bound_text(value: float, scale: float = 1.0) -> str:
    """``value`` times ``scale`` (100: percent), rounded up to two digits, for use after "at most".

    >>> upper_bound_text(0.01387, 100)
    '1.4'
    """
    return _text(value * scale, _two_digits(value * scale), ROUND_CEILING)


def lower_bound_text(value: float, scale: float = 1.0) -> str:
    """``value`` times ``scale`` (100: percent), rounded down to two digits, for use after "at least".

    >>> lower_bound_text(0.916, 100)
    '91'
    """
    return _text(value * scale, _two_digits(value * scale), ROUND_FLOOR)


def interval_text(interval: Interval, scale: float = 1.0, most: float = math.inf) -> str:
    """An interval as text, such as ``1.2 [1.0, 1.5]``.

    An upper limit at ``most``, the greatest possible value, is shown as ``–``.
    """
    if interval.high >= most * (1 - 1e-9):
        if interval.estimate == 0:
            return "0 [0, –]"
        # The digits are chosen as if the upper limit had the same distance as the lower one.
        text = estimate_text(replace(interval, high=2 * (interval.estimate or 0.0) - interval.low), scale)
        return f"{text.estimate} [{text.low}, –]"
    text = estimate_text(interval, scale)
    if interval.estimate == 0 and not text.exact:
        return f"0 {text.limits}"  # a spread of 0, not a count of 0 events
    return text.in_sentence


def signed(difference: EstimateWithLimits, scale: float = 100.0) -> EstimateText:
    """The text of a difference times ``scale`` (100: percentage points), with a sign at each number.

    >>> signed(Interval(-0.0031, -0.0046, -0.0018, 0.95, 1, ""))
    EstimateText(estimate='-0.31', low='-0.46', high='-0.18')
    """
    estimate, low, high = difference.estimate, difference.low, difference.high
    if estimate == low == high:  # not an estimate
        exact = _sign(f"{scale * estimate:.4g}")
        return EstimateText(exact, exact, exact, exact=True)
    places = _places((high - low) * scale / 2)
    value = NO_TRIAL if estimate is None else _sign(_rounded_text(estimate * scale, places))
    lower, upper = _text(low * scale, places, ROUND_FLOOR), _text(high * scale, places, ROUND_CEILING)
    return EstimateText(value, _sign(lower), _sign(upper))


def difference_text(gap: EstimateWithLimits, unit: str = "") -> str:
    """A difference of shares in percentage points, such as ``+0.31 [-0.2, +0.9]``.

    ``unit``: the text after the number.
    """
    difference = signed(gap)
    return f"{difference.estimate}{unit}{difference.limits_in_sentence}"


def ratio_text(ratio: EstimateWithLimits) -> EstimateText:
    """The text of a ratio and its limits, with two digits each.

    ``–`` if it has no value, ``inf`` for an infinite limit.

    >>> ratio_text(Interval(0.5, 0.2449, math.inf, 0.95, 1, ""))
    EstimateText(estimate='0.50', low='0.24', high='inf')
    """
    estimate, low, high = ratio.estimate, ratio.low, ratio.high
    if estimate is not None and math.isclose(low, high, rel_tol=1e-12):  # not an estimate
        exact = f"{estimate:.4g}"
        return EstimateText(exact, exact, exact, exact=True)

    value = "–" if estimate is None else _text(estimate, _two_digits(estimate), ROUND_HALF_EVEN)
    return EstimateText(value, lower_bound_text(low), upper_bound_text(high))


def p_value_text(p: float | None) -> str:
    """A p value, rounded up to two digits; ``–`` for None."""
    if p is None:
        return "–"
    if p < 1e-4:
        return "<0.0001"
    return upper_bound_text(p) if p < 1 else "1"


def percent_text(value: float | None) -> str:
    """A share in percent, without decimals; ``–`` for None."""
    return "–" if value is None else f"{100 * value:.0f} %"


def share_of_estimate_text(row_share: float, estimate: float, low: float, high: float) -> str:
    """A share of an estimate in percent, with the digits that the interval of the estimate supports."""
    value = estimate * row_share * 100.0
    if low == high:  # not an estimate
        return f"{value:.4g}"
    return "0" if value < 1e-12 else _rounded_text(value, _places((high - low) * 100.0 / 2))


def duration_text(value: float) -> str:
    """A duration with three digits and a unit, such as ``15.2 ms`` or ``5 min``."""
    for unit, size, least in (("h", 3600, 7200), ("min", 60, 120), ("s", 1, 1), ("ms", 1e-3, 1e-3), ("µs", 1e-6, 1e-6)):
        if abs(value) >= least:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def time_text(seconds: float) -> str:
    """A time in seconds since 1970 as text, such as ``2024-02-29 12:00:00 UTC``."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def number_text(value: float) -> str:
    """A number with three digits, such as ``6,880,000`` or ``0.0128``.

    Very small and very large numbers are written with a power of ten.
    """
    if value == 0 or not 1e-4 <= abs(value) < 1e12:
        return f"{value:.3g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"


def count_text(number: int, noun: str) -> str:
    """A number with its noun, such as ``1 batch``, ``2,048 samples`` or ``3 queries``."""
    if number == 1 or noun.endswith("series"):
        return f"{number:,} {noun}"
    if noun.endswith("ry"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def flips_text(flips: int | None) -> str:
    """A number of flips, such as ``4 flips``; None means that the fault model sets it."""
    if flips is None:
        return "number of flips set by the fault model"
    return count_text(flips, "flip")


def flips_number_text(flips: int | None) -> str:
    """A number of flips without a noun; ``–`` for None."""
    return "–" if flips is None else f"{flips:,}"


def short(name: str, width: int) -> str:
    """``name`` cut in the middle to at most ``width`` characters.

    The ends of parameter names distinguish them.
    """
    if len(name) <= width:
        return name
    head = (width - 1) // 2
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def break_name(name: str, width: int) -> list[str]:
    """``name`` broken into lines of at most ``width`` characters.

    Breaks come after a dot or space if possible, else after another sign, else anywhere.

    >>> break_name("layers.10.self_attention", 12)
    ['layers.10.', 'self_', 'attention']
    """
    lines = []
    while len(name) > width:
        ends = [max(name.rfind(sign, 0, width) for sign in signs) + 1 for signs in (". ", "/:-_|")]
        cut = next((end for end in ends if end > width // 4), width)
        lines.append(name[:cut])
        name = name[cut:]
    return [*lines, name]


def wrapped(text: str, width: int) -> list[str]:
    """``text`` broken at spaces into lines of at most ``width`` characters.

    A longer word is broken by `break_name`.

    Text in brackets stays on one line if possible, as do a number and its percent sign.

    >>> wrapped("of encoder.layers.10.weight alone", 16)
    ['of', 'encoder.layers.', '10.weight', 'alone']
    >>> wrapped("0.31 [0.18, 0.46]", 12)
    ['0.31', '[0.18, 0.46]']
    >>> wrapped("a probability of 4.7 %", 20)
    ['a probability of', '4.7 %']
    """

    def joined(result: re.Match[str]) -> str:
        return result[0].replace(" ", _JOINT) if len(result[0]) <= width else result[0]

    lines = wrap(re.sub(r"\[[^][]*\]|\d %", joined, text), width, break_long_words=False, break_on_hyphens=False)
    return [part.replace(_JOINT, " ") for line in lines for part in break_name(line, width)]


def shorten_distinct(names: Sequence[str], width: int) -> list[str]:
    """Names cut to ``width`` characters that remain distinct.

    Dotted parts that all names share are dropped first.
    """
    if len(names) < 2 or max(map(len, names)) <= width:
        return [short(name, width) for name in names]
    parts = [name.split(".") for name in names]
    most = min(map(len, parts)) - 1
    head = next((i for i in range(most) if len({p[i] for p in parts}) > 1), most)
    tail = next((i for i in range(most - head) if len({p[-1 - i] for p in parts}) > 1), most - head)
    distinct_parts = (".".join(p[head : len(p) - tail]) for p in parts)
    return [short(("…" if head else "") + name + ("…" if tail else ""), width) for name in distinct_parts]


def listed(names: Iterable[str], limit: int = 8) -> str:
    """A list of names in one text, such as ``a, b, c and 4 more``."""
    every = list(names)
    rest = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + rest


def _sign(number: str) -> str:
    """A number as text, with ``+`` if it is positive."""
    return number if number.startswith("-") or number == "0" else f"+{number}"


def _places(half_width: float) -> int:
    """The number of decimals that keep one or two digits of the half-width.

    Negative numbers stand for tens and hundreds.
    """
    if half_width <= 0 or not math.isfinite(half_width):
        return _PLACES
    power = math.floor(math.log10(half_width))
    leading = round(half_width / 10.0**power * 100)
    return 1 - power if leading < 355 else -power


def _two_digits(value: float) -> int:
    """The number of decimals that keep two digits of a number."""
    return 1 - math.floor(math.log10(abs(value))) if 0 < abs(value) < math.inf else 0


def _places_needed(value: float, places: int) -> int:
    """The number of decimals, at least ``places``, whose rounding error is at most `MOST_OFF` of the value."""
    return next(p for p in range(places, places + 400) if abs(round(value, p) - value) <= MOST_OFF * abs(value))


def _rounded_text(value: float, places: int) -> str:
    return _text(value, _places_needed(value, places), ROUND_HALF_EVEN)


def _text(value: float, places: int, rounding: str) -> str:
    """``value`` with ``places`` decimals, or more if it would be rounded to 0.

    A tiny number is written as a power of ten.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    first_place = -math.floor(math.log10(abs(value)))
    places = max(places, first_place)
    # Twelve digits drop binary noise, which rounding outwards would turn into a whole unit.
    exact = Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-places), rounding=rounding)
    if first_place > _PLACES:
        return f"{exact:e}"
    return f"{exact:,f}"
