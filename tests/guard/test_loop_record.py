"""What two records of a loop's variables tell apart."""

import array
from dataclasses import dataclass

import pytest
import torch

from unsilent.guard.loop_record import name_of, record_loop
from unsilent.guard.loop_state import find_objects, variables_of_function


class Base:
    __slots__ = ("__private", "mean")

    def __init__(self):
        self.mean = 0.0
        self.__private = 0

    def add(self):
        self.mean += 1.0

    def add_private(self):
        self.__private += 1


class Derived(Base):
    """With attributes of its own besides those in slots."""

    def __init__(self):
        super().__init__()
        self.own = 0


@dataclass(slots=True)
class Values:
    count: int = 0
    unset: int = 0

    def add(self):
        self.count += 1


def counting():
    counting.n += 1


counting.n = 0


def increase(values):
    values[0] += 1


CHANGES = {
    "slots": (Base(), Base.add, "x.mean"),
    "slots of a base class": (Derived(), Base.add, "x.mean"),
    "a private attribute": (Derived(), Base.add_private, "x._Base__private"),
    "a dataclass": (Values(), Values.add, "x.count"),
    "a method": (Values().add, lambda add: add(), "x: count, x: self.count"),
    "a function": (counting, lambda count: count(), "x: counting.n"),
    "an array": (array.array("l", [0]), increase, "x"),
    "bytes": (bytearray(4), increase, "x"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_number_is_seen_to_change_in(kind):
    value, change, name = CHANGES[kind]
    before = record_loop({"x": value})
    assert before.changed(record_loop({"x": value})) == []
    change(value)
    assert ", ".join(name_of(path) for path in before.changed(record_loop({"x": value}))) == name


def test_slots_without_a_value_are_no_error():
    values = Values()
    del values.unset
    before = record_loop({"x": values})
    values.unset = 1
    assert [name_of(path) for path in before.changed(record_loop({"x": values}))] == ["x.unset"]


def test_a_generator_in_slots_and_at_a_function_is_found():
    values = Values(torch.Generator())

    def draw():
        return torch.rand(1, generator=draw.generator)

    draw.generator = torch.Generator()
    found = find_objects({"values": values, "draw": draw}, lambda value: isinstance(value, torch.Generator))
    assert found == {"values.count": values.count, "draw: draw.generator": draw.generator}
    assert variables_of_function(values.add)["count"] is values.count
