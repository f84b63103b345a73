"""Windows against a brute force that walks over every output."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from unsilent.basics.errors import UsageError
from unsilent.faults.hardware.output_window import OutputWindow

UNLIKELY = 1e-4


def possible(dependents, axis, window):
    """Probability of every reach, as a dict of sets of indices: all groups, cycles and units tried in turn."""
    channels = dependents.shape[axis]
    others = [range(n) for i, n in enumerate(dependents.shape) if i != axis]
    place = {index: number for number, index in enumerate(itertools.product(*others))}
    outputs = [index for index in np.ndindex(dependents.shape) if dependents[index]]
    where = {i: (i[axis], place[i[:axis] + i[axis + 1 :]]) for i in outputs}
    wide, long = window.channels or channels, window.positions or len(place)
    groups = []
    for c, p in itertools.product(range(0, channels, wide), range(0, len(place), long)):
        inside = {i for i, (ci, pi) in where.items() if c <= ci < c + wide and p <= pi < p + long}
        if inside:
            groups.append((c, p, inside))
    found = Counter()
    for c, p, inside in groups:
        moments = range(p, max(where[i][1] for i in inside) + 1) if window.tail else [p]
        for moment in moments:
            left = {i for i in inside if where[i][1] >= moment}
            units = range(c, max(where[i][0] for i in left) + 1) if window.onward else [c]
            for unit in units:
                seen = frozenset(i for i in left if where[i][0] >= unit)
                found[seen] += 1 / len(groups) / len(moments) / len(units)
    return found


def indices(flat, shape):
    return frozenset(tuple(map(int, np.unravel_index(f, shape))) for f in flat)


sizes = st.none() | st.integers(1, 5)
windows = st.builds(OutputWindow, sizes, sizes, st.booleans(), st.booleans())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), windows, st.data())
def test_a_reach_is_one_of_those_there_are(shape, window, data):
    cells = data.draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    dependents = np.array(cells).reshape(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    found = window.draw_affected_outputs(dependents, axis, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(found.tolist()))
    if not dependents.any():
        assert found.size == 0
        return
    assert indices(found, shape) in possible(dependents, axis % len(shape), window)


BORDER = np.pad(
    np.ones((1, 3, 4, 3), dtype=np.bool_), ((0, 0), (0, 1), (1, 0), (1, 1))
)  # a kernel element at a padded edge
RAGGED = np.random.default_rng(3).random((2, 5, 6)) < 0.4


@pytest.mark.parametrize("dependents", [BORDER, RAGGED], ids=["border", "ragged"])
@pytest.mark.parametrize(
    "window",
    [OutputWindow(2, 1), OutputWindow(1, 4), OutputWindow(2, 4, tail=True), OutputWindow(3, None, tail=True),
     OutputWindow(3, 2, onward=True),
     OutputWindow(2, 5, tail=True, onward=True), OutputWindow()],
    ids=lambda w: w.text,
)  # fmt: skip
@pytest.mark.slow
def test_how_likely_each_reach_is(dependents, window):
    expected = possible(dependents, 1, window)
    rng, n = np.random.default_rng(1), 2000
    counts = Counter(indices(window.draw_affected_outputs(dependents, 1, rng), dependents.shape) for _ in range(n))
    assert set(counts) <= set(expected)
    if len(expected) > 1:
        pairs = [(counts[k], n * p) for k, p in expected.items()]
        rare = [p for p in pairs if p[1] <= 5]
        often = [p for p in pairs if p[1] > 5] + ([tuple(map(sum, zip(*rare, strict=True)))] if rare else [])
        assert stats.chisquare(*zip(*often, strict=True)).pvalue > UNLIKELY


def test_published_windows_in_a_full_convolution():
    """16 channels at one position, and 16 consecutive positions of one channel."""
    shape = (1, 64, 8, 8)
    everything = np.ones(shape, dtype=np.bool_)
    _, c, h, w = np.unravel_index(
        OutputWindow(16, 1).draw_affected_outputs(everything, 1, np.random.default_rng(0)), shape
    )
    assert len(set(zip(h.tolist(), w.tolist(), strict=True))) == 1
    assert c[0] % 16 == 0
    assert c.tolist() == list(range(c[0], c[0] + 16))
    _, c, h, w = np.unravel_index(
        OutputWindow(1, 16).draw_affected_outputs(everything, 1, np.random.default_rng(0)), shape
    )
    place = h * 8 + w
    assert len(set(c.tolist())) == 1
    assert place[0] % 16 == 0
    assert place.tolist() == list(range(place[0], place[0] + 16))


def test_a_scalar_output():
    assert OutputWindow(1, 1).draw_affected_outputs(np.array(True), 0, np.random.default_rng(0)).tolist() == [0]


@pytest.mark.parametrize("field", ["channels", "positions"])
def test_what_cannot_be(field):
    with pytest.raises(UsageError, match=f"{field}=0 of a window; expected 1 or more"):
        OutputWindow(**{field: 0})


def test_in_words():
    assert OutputWindow(16, 1).text == "16 channels x 1 position"
    assert OutputWindow(1, None, tail=True).text == "1 channel x all positions from the fault on"
    assert OutputWindow(None, 2, onward=True).text == "all channels onward x 2 positions"
