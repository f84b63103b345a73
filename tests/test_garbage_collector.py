"""The garbage collector of a test process leaves out what was collected before the first test."""

from __future__ import annotations

import gc


def test_what_was_collected_is_not_searched_again():
    assert gc.isenabled()
    collected = {id(value) for value in gc.get_objects()}
    assert id(globals()) not in collected, "something has called gc.unfreeze()"
