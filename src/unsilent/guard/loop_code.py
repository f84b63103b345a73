"""Analysis of a loop's bytecode: the variables that carry values between iterations, and the source of batches.

Bytecode is the same for scripts, notebooks and functions. If the analysis does not understand the code, all variables count as
carried over.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator
from functools import lru_cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_OPTIMIZED
from types import CodeType
from typing import NamedTuple

_ENDS = ("RETURN_", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD", "JUMP_BACKWARD")
"""Prefixes of the names of instructions after which the next instruction is not executed."""
_KINDS = ("FAST", "NAME", "GLOBAL", "DEREF")
"""Kinds of variables."""
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})
"""Instructions that name a global variable; a name that a class body stores is an attribute of the class."""
_QUIET = (
    "LOAD_",
    "STORE_",
    "UNPACK_",
    "JUMP_",
    "RESUME",
    "NOP",
    "POP_TOP",
    "COPY",
    "SWAP",
    "PRECALL",
    "PUSH_NULL",
    "EXTENDED_ARG",
)
_LOUD = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_BUILD_CLASS", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE")
"""Prefixes of the names of instructions that run none of the program's code, and exceptions from them."""


class _Step(NamedTuple):
    """A bytecode instruction: the variables that it reads and writes, and the numbers of possible next instructions."""

    name: str
    offset: int
    reads: frozenset[str]
    writes: frozenset[str]
    following: tuple[int, ...]


@lru_cache(maxsize=256)
def names_taken_over(code: CodeType, offset: int) -> frozenset[str]:
    """Variables that may be read before they are written, after the instruction at ``offset`` gave a batch.

    Variables that functions share (global variables and closures) may be read wherever code of the program may run.
    """
    steps = _steps(code)
    number = _number_at(code, offset)
    if number + 1 >= len(steps):
        return frozenset((*code.co_varnames, *code.co_names, *code.co_cellvars, *code.co_freevars))
    needed: list[frozenset[str]] = [frozenset()] * len(steps)
    has_changed = True
    while has_changed:
        has_changed = False
        for n in range(len(steps) - 1, -1, -1):
            step = steps[n]
            after = frozenset[str]().union(*(needed[m] for m in step.following))
            now = step.reads | (after - step.writes)
            if now != needed[n]:
                needed[n], has_changed = now, True
    return needed[number + 1]


def is_plain_loop(code: CodeType, offset: int, begins_with: str = "GET_ITER") -> bool:
    """Whether a ``for`` statement directly iterates over the object made at ``offset``.

    It is false in a generator or coroutine, whose caller may count. ``begins_with``: ``GET_ITER`` if the iterator itself is made
    there, ``CALL`` if the object to iterate over is made there.
    """
    if code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return False
    # If the body is long, the argument of the first instruction needs an instruction of its own.
    following = (step.name for step in _steps(code)[_number_at(code, offset) :] if step.name != "EXTENDED_ARG")
    names = list(itertools.islice(following, 3))
    if begins_with == "CALL":
        return names[0].startswith("CALL") and names[1:3] == ["GET_ITER", "FOR_ITER"]
    return names[:2] == ["GET_ITER", "FOR_ITER"]


def _number_at(code: CodeType, offset: int) -> int:
    """The number of the instruction at an offset, or before it."""
    return max((n for n, step in enumerate(_steps(code)) if step.offset <= offset), default=0)


@lru_cache(maxsize=256)
def global_names(code: CodeType) -> frozenset[str]:
    """Global variables that the code and its nested functions use, without attribute names."""
    named_here = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _GLOBAL}
    return frozenset(named_here) | _globals_of_functions(code)


def _globals_of_functions(code: CodeType) -> frozenset[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset[str]().union(*map(global_names, nested))


@lru_cache(maxsize=256)
def _steps(code: CodeType) -> list[_Step]:
    instructions = list(dis.get_instructions(code))
    number_at = {instruction.offset: n for n, instruction in enumerate(instructions)}
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    handlers = [(entry.start, entry.end, number_at.get(entry.target)) for entry in entries]
    is_function = code.co_flags & CO_OPTIMIZED  # another function may read a global variable that it writes
    shared = global_names(code) if is_function else _globals_of_functions(code)
    shared |= {*code.co_cellvars, *code.co_freevars}
    result = []
    for n, instruction in enumerate(instructions):
        following = set() if instruction.opname.startswith(_ENDS) else {n + 1}
        target = instruction.argval if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs else None
        if target in number_at:
            following.add(number_at[target])
        following |= {to for start, end, to in handlers if to is not None and start <= instruction.offset < end}
        reads, writes = _accesses(instruction)
        if not instruction.opname.startswith(_QUIET) or instruction.opname.startswith(_LOUD):
            reads |= shared
        valid = tuple(m for m in following if m < len(instructions))
        result.append(_Step(instruction.opname, instruction.offset, reads, writes, valid))
    return result


def _accesses(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that an instruction reads and those that it writes."""
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    reads, writes = set[str](), set[str]()
    for access, name in zip(_access_kinds(instruction.opname), names, strict=False):
        if access == "LOAD" and name not in writes:
            reads.add(name)
        elif access in ("STORE", "DELETE"):
            writes.add(name)
    return frozenset(reads), frozenset(writes)


def _access_kinds(opname: str) -> Iterator[str]:
    """Yield ``LOAD``, ``STORE`` or ``DELETE`` for each variable that an instruction accesses."""
    words = opname.split("_")
    for before, kind in itertools.pairwise(words):
        if kind in _KINDS and before in ("LOAD", "STORE", "DELETE"):
            yield before
