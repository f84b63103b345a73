"""What the bytecode of a loop says about it."""

from __future__ import annotations

import dis
import textwrap
from types import CodeType

import pytest

from unsilent.guard.loop_code import is_plain_loop, names_taken_over
from unsilent.guard.loop_state import variables_of_function


@pytest.mark.parametrize("lines", [1, 100, 10_000])  # of one, two and three bytes of distance
def test_a_plain_loop_is_recognized_however_long_its_body_is(lines):
    code = compile("for x in loader:\n" + "    update(x)\n" * lines, "train.py", "exec")
    (begin,) = (one.offset for one in dis.get_instructions(code) if one.opname == "GET_ITER")
    assert is_plain_loop(code, begin)


def test_a_plain_loop_over_what_a_call_returns_is_recognized_however_long_its_body_is():
    code = compile("for x in iterate(loader):\n" + "    update(x)\n" * 100, "train.py", "exec")
    begin = next(one.offset for one in dis.get_instructions(code) if one.opname.startswith("CALL"))
    assert is_plain_loop(code, begin, "CALL")


def names_at_batch(text):
    """What an iteration takes over in a program, or in its function ``main``."""
    code = compile(textwrap.dedent(text), "train.py", "exec")
    inner = (one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == "main")
    code = next(inner, code)
    (offset,) = (one.offset for one in dis.get_instructions(code) if one.opname == "FOR_ITER")
    return names_taken_over(code, offset)


LOCAL = """
    def main():
        save = lambda state: state.step
        step = 0
        for batch in loader:
            opt.step()
            {}
        return save(step)
    """
SCRIPT = """
    def write(state):
        for key in state.step: print(key.step)
    step = 0
    for batch in loader:
        write(opt.step())
        {}
    """
GLOBAL = """
    step = 0
    def main():
        for batch in loader:
            opt.step()
            {}
    """


@pytest.mark.parametrize(
    ("program", "end", "is_taken_over"),
    [
        (LOCAL, "step = sched.last_epoch", False),
        (LOCAL, "step += 1", True),
        (LOCAL, "print(step)", True),
        (SCRIPT, "step = sched.last_epoch", False),
        (SCRIPT, "step += 1", True),
        (SCRIPT, "print(step)", True),
        (GLOBAL, "sched.step()", False),
        (GLOBAL, "print(step)", True),
        (GLOBAL, "global step; step += 1", True),
        (GLOBAL, "global step; step = sched.last_epoch", True),  # that another function reads it cannot be ruled out
    ],
)
def test_a_variable_with_the_name_of_an_attribute_is_taken_over_only_if_it_is_read(program, end, is_taken_over):
    assert ("step" in names_at_batch(program.format(end))) == is_taken_over


@pytest.mark.parametrize("name", ["log", "class"])
def test_a_variable_that_a_function_or_a_class_reads_may_be_read_wherever_the_program_runs(name):
    defined = {"log": "def log():\n    print(step)\n", "class": "class Log:\n    first = step\n"}[name]
    assert "step" in names_at_batch(defined + "for batch in loader:\n    opt.update()\n    step = 2\n")


def test_reachable_variables_are_those_that_code_names_not_attributes():
    namespace = {"opt": 1, "step": 2, "save": 3}
    exec("def main():\n    opt.step()\n    return lambda: save(opt.step)", namespace)
    assert variables_of_function(namespace["main"]).keys() == {"opt", "save"}
