"""Steps between two readings, against a loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unsilent.monitor.signals.row import SignalValues
from unsilent.monitor.step_judge import Waits

ROWS = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.sets(st.sampled_from("abc"))), max_size=30
)


@given(rows=ROWS)
def test_the_longest_wait_is_that_of_a_loop(rows):
    waits, longest = Waits(), 0
    last, last_compared = [-1, -1, -1], {}
    for step, (seen, compared) in enumerate(rows):
        waits.add(step, SignalValues(np.zeros(3), np.array(seen), (), tuple(compared), np.zeros(0, np.int64)))
        for number in range(3):
            if seen[number]:
                longest, last[number] = max(longest, step - last[number]), step
        for name in compared:
            longest, last_compared[name] = max(longest, step - last_compared.get(name, step)), step
    assert waits.longest == longest
