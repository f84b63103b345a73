"""What the bytecode of a loop says about it."""

from __future__ import annotations

import dis

import pytest

from unsilent.monitor.loop_code import is_plain_loop


@pytest.mark.parametrize("lines", [1, 100, 10_000])  # of one, two and three bytes of distance
def test_a_plain_loop_is_recognized_however_long_its_body_is(lines):
    code = compile("for x in loader:\n" + "    update(x)\n" * lines, "train.py", "exec")
    (begin,) = (one.offset for one in dis.get_instructions(code) if one.opname == "GET_ITER")
    assert is_plain_loop(code, begin)


def test_a_plain_loop_over_what_a_call_returns_is_recognized_however_long_its_body_is():
    code = compile("for x in iterate(loader):\n" + "    update(x)\n" * 100, "train.py", "exec")
    begin = next(one.offset for one in dis.get_instructions(code) if one.opname.startswith("CALL"))
    assert is_plain_loop(code, begin, "CALL")
