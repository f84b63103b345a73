"""Validated tables of the TOML file that describes an accelerator.

Every table of facts has a key ``evidence``: one grade for all its facts, or a table with one grade for each. No number about
hardware has a default. A key that is left out means that the value is unknown, or that the hardware does not have the feature
(``tail``, ``onward``, ``tile``). A file describes flip-flops (``array``, ``dtypes``, ``groups``, ``other``), memories, or both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.sizes import parse_bytes
from unsilent.faults.blocks import parse_tile as read_tile
from unsilent.faults.codecs import codec
from unsilent.faults.fault_texts import FILE_AND_NAME, split_from, split_lasts, weighted_parts
from unsilent.faults.hardware.memories import MOST_CODE_WORD, PROTECTIONS, Code, flips_bits, make_code
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.models import fault_model
from unsilent.faults.naming import kind_of
from unsilent.faults.patterns import Rate

GRADES: Mapping[str, str] = {
    "read": "read in a named source",
    "measured": "measured or computed",
    "derived": "derived from other facts, as the remark explains",
    "recalled": "recalled from memory, not looked up",
    "assumed": "a guess, to be replaced",
}
Kind = Literal["input", "weight", "input register", "weight register", "output", "local control", "global control"]
Stage = Literal["input", "weight", "accumulator", "output"]

HELD_KINDS = ("param", "op", "input", "kv")
"""Kinds of sites that a memory can hold during inference."""
ADD_UP = 1e-6  # largest difference of the sum of shares from 1
_LARGEST = 10**9


def _refusing(check: Any) -> AfterValidator:
    """Turn a check that raises ``UsageError`` into a pydantic validator."""

    def validate(value: Any) -> Any:
        try:
            check(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


def _float_dtype(name: str) -> None:
    if codec(name).kind != "float":
        raise UsageError(f"{name!r} needs a scale, which a description does not have; expected a floating-point dtype")


def _bytes(text: str) -> None:
    if parse_bytes(text) < 1:
        raise UsageError(f"{text!r} is no number of bytes of 1 or more")


def _protection(name: str) -> None:
    if name not in PROTECTIONS:
        raise unknown_name_error("protection", name[:60], PROTECTIONS)


def _held(address: str) -> None:
    if kind_of(address) not in HELD_KINDS or not address.isprintable():
        raise UsageError(
            f"{address[:60]!r} is in no memory during inference; expected {', '.join(HELD_KINDS)}, like param:*"
        )


def _event(text: str) -> None:
    timed = split_lasts(text)[1] != 1 or split_from(text)[1] is not None
    if FILE_AND_NAME.fullmatch(text) or len(weighted_parts(text)) > 1 or timed:
        raise UsageError(
            f"{text[:60]!r}: a pattern is one built-in fault model, without lasts and from; describe the parts of a mixture as "
            "patterns with shares"
        )
    if isinstance(fault_model(text).pattern, Rate):
        raise UsageError(
            f"{text!r} draws how much it corrupts, maybe nothing; give what one event corrupts, like burst:length=2"
        )


def _one_line(text: str) -> None:
    if not text.isprintable():
        raise UsageError("expected printable text in one line")


def _cycles(value: int | str) -> None:
    if value != "all" and not (isinstance(value, int) and 1 <= value <= _LARGEST):
        raise UsageError(f"expected a number of cycles from 1 to {_LARGEST}, or all")


def _grades(evidence: str | dict[str, str]) -> None:
    for fact, grade in evidence.items() if isinstance(evidence, dict) else [("", evidence)]:
        if grade not in GRADES:
            raise unknown_name_error(f"grade of {fact[:60]!r}" if fact else "grade", grade[:60], GRADES)


Text = Annotated[str, Field(max_length=1000), _refusing(_one_line)]
Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[\w. -]+$")]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[int, Field(ge=1, le=_LARGEST)]
Cycles = Annotated[int | str, _refusing(_cycles)]
Evidence = Annotated[str | dict[str, str], _refusing(_grades)]
Dtype = Annotated[str, _refusing(_float_dtype)]


class DescriptionTable(BaseModel):
    """Base of the tables; ``facts`` names the fields that need an evidence grade."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    facts: ClassVar[tuple[str, ...]] = ()
    evidence: Evidence | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, record: Any) -> Any:
        if not isinstance(record, dict):
            return record
        keys = [k for k in cls.model_fields if k != "evidence" or cls.facts]
        if strange := [k for k in record if k not in keys]:
            raise ValueError(str(unknown_name_error("key", str(strange[0])[:60], keys)))
        return record

    @model_validator(mode="after")
    def _all_graded(self) -> DescriptionTable:
        stated_facts = [fact for fact in self.facts if getattr(self, fact) is not None]
        graded = self.evidence
        if not isinstance(graded, dict):
            graded = dict.fromkeys(stated_facts if graded else (), "")
        if missing := [fact for fact in stated_facts if fact not in graded]:
            raise ValueError(f"evidence for {missing[0]} is missing; expected one of {', '.join(GRADES)}")
        if strange := [fact for fact in graded if fact not in stated_facts]:
            raise ValueError(
                f"evidence is given for {strange[0]!r}, which has no value; expected {', '.join(stated_facts) or 'none'}"
            )
        return self

    def evidence_grade(self, fact: str) -> str:
        """The evidence grade of one fact."""
        return self.evidence[fact] if isinstance(self.evidence, dict) else str(self.evidence)

    @property
    def evidence_summary(self) -> str:
        """The evidence grades of all facts in short words: ``read``, or ``share derived, activeness assumed``."""
        if not isinstance(self.evidence, dict):
            return str(self.evidence)
        grades = set(self.evidence.values())
        return grades.pop() if len(grades) == 1 else ", ".join(f"{k} {v}" for k, v in self.evidence.items())


class MultiplierArray(DescriptionTable):
    """Sizes of the array of multipliers; see `presets.ArraySizes`."""

    facts: ClassVar[tuple[str, ...]] = (
        "outputs", "reduction", "weight_hold", "input_hold", "fastest", "tail", "onward", "tile",
    )  # fmt: skip
    outputs: Number
    reduction: Number
    weight_hold: Cycles
    input_hold: Cycles
    fastest: Literal["channels", "positions"]
    tail: bool | None = None
    onward: bool | None = None
    tile: Annotated[str, _refusing(read_tile)] | None = None

    def hold_cycles(self, name: str) -> int | None:
        """The number of cycles that a cell of the description gives as text; None for ``all``."""
        value = getattr(self, name)
        return None if value == "all" else int(value)

    @property
    def tile_sizes(self) -> tuple[int, int] | None:
        """Rows and columns of the output tile; None if the array has no tile."""
        result = None if self.tile is None else read_tile(self.tile)
        return None if result is None else (result.rows, result.columns)


class StageDtypes(DescriptionTable):
    """The dtype of the values in each stage."""

    facts: ClassVar[tuple[str, ...]] = ("input", "weight", "accumulator", "output")
    input: Dtype
    weight: Dtype
    accumulator: Dtype
    output: Dtype


class CustomFault(DescriptionTable):
    """A fault model that is defined in the description; ``part`` is its part of the group's weight (None: equal parts)."""

    operand: Literal["first", "second", "third", "out"]
    model: Annotated[str, _refusing(fault_model)]
    name: Name | None = None
    channels: Number | None = None
    positions: Number | None = None
    tail: bool = False
    onward: bool = False
    part: Annotated[float, Field(gt=0, le=1e9)] | None = None
    intent: Text = ""

    @property
    def window(self) -> OutputWindow | None:
        """The window of outputs that see the fault; None if the description gives none."""
        if (self.channels, self.positions, self.tail, self.onward) == (None, None, False, False):
            return None
        return OutputWindow(self.channels, self.positions, self.tail, self.onward)

    @model_validator(mode="after")
    def _no_window_on_outputs(self) -> CustomFault:
        if self.operand == "out" and self.window is not None:
            raise ValueError(
                "a fault in an output affects only this output; leave out channels, positions, tail, onward"
            )
        return self


class FlipFlopGroup(DescriptionTable):
    """A group of flip-flops, either of a known kind or with its own fault models."""

    facts: ClassVar[tuple[str, ...]] = ("share", "activeness", "unmasked")
    share: Share
    activeness: Share
    unmasked: Share | None = None
    kind: Kind | None = None
    faults: Annotated[list[CustomFault], Field(min_length=1, max_length=100)] | None = None
    stage: Stage | None = None
    remark: Text = ""

    @model_validator(mode="after")
    def _one_way(self) -> FlipFlopGroup:
        if (self.kind is None) == (self.faults is None):
            raise ValueError("expected either kind or faults, not both")
        if self.faults and len({f.part is None for f in self.faults}) > 1:
            raise ValueError("part is given for only some faults of a group; give part for all of them or for none")
        return self


class ErrorPattern(DescriptionTable):
    """Corruption of a memory's bits by one event; ``share`` is its share of all events of the memory."""

    facts: ClassVar[tuple[str, ...]] = ("share",)
    model: Annotated[str, _refusing(_event)]
    share: Annotated[float, Field(gt=0, le=1)]


class Memory(DescriptionTable):
    """A memory of the accelerator: its size, contents, error rate and protection.

    Attributes:
        size: Size in bytes, as text.
        fit_per_mbit: Number of events of all patterns in 1e9 hours per 2**20 bits of data, before any protection.
        bandwidth: Bandwidth in bytes per second, as text.
        reload: Seconds after which the content is written again (reload or scrub); None: the content is loaded for one use.
        protection: Name of the error-correcting code.
        code_word: Number of data bits in one word of the code.
        holds: Sites that the memory holds, written like the values of ``--at``.
        latency: Latency of one access, in any unit.
        energy: Energy for one byte, in any unit.
    """

    facts: ClassVar[tuple[str, ...]] = (
        "size", "fit_per_mbit", "bandwidth", "reload", "protection", "code_word", "latency", "energy",
    )  # fmt: skip
    size: Annotated[str, _refusing(_bytes)]
    fit_per_mbit: Annotated[float, Field(ge=0, le=1e12)]
    bandwidth: Annotated[str, _refusing(_bytes)]
    reload: Annotated[float, Field(gt=0, le=1e12)] | None = None
    protection: Annotated[str, _refusing(_protection)] | None = None
    code_word: Annotated[int, Field(ge=8, le=MOST_CODE_WORD)] | None = None
    holds: Annotated[list[Annotated[str, _refusing(_held)]], Field(max_length=100)]
    patterns: Annotated[dict[Name, ErrorPattern], Field(min_length=1, max_length=20)]
    latency: Annotated[float, Field(ge=0)] | None = None
    energy: Annotated[float, Field(ge=0)] | None = None
    remark: Text = ""

    @model_validator(mode="after")
    def _fits_together(self) -> Memory:
        whole = sum(pattern.share for pattern in self.patterns.values())
        if abs(whole - 1) > ADD_UP:
            raise ValueError(f"the shares of its patterns add up to {whole:.8g}; expected 1")
        if (self.protection in (None, "none")) != (self.code_word is None):
            raise ValueError(
                f"protection is {self.protection or 'none'!r} and code_word is {self.code_word}; "
                "give both, or neither for a memory without protection"
            )
        for name, pattern in self.patterns.items() if self.code_word else ():
            if not flips_bits(fault_model(pattern.model)):
                raise ValueError(
                    f"pattern {name} is {pattern.model!r}, but what a code does depends on which bits flip; "
                    "use bitflip, burst or multibit in a memory with protection"
                )
        try:
            _ = self.code
        except UsageError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def size_bytes(self) -> int:
        """Size of the memory in bytes."""
        return parse_bytes(self.size)

    @property
    def bytes_per_second(self) -> int:
        """Bandwidth of the memory in bytes per second."""
        return parse_bytes(self.bandwidth)

    @property
    def fit_per_bit(self) -> float:
        """Events per 1e9 hours and bit of data."""
        return self.fit_per_mbit / 2**20

    @property
    def code(self) -> Code | None:
        """The error-correcting code of the memory; None without protection."""
        return None if self.code_word is None else make_code(str(self.protection), self.code_word)


class AcceleratorDescription(DescriptionTable):
    """A whole description file.

    ``groups`` is empty and ``array`` is None if no flip-flops are described.
    """

    facts: ClassVar[tuple[str, ...]] = ("raw_fit", "other")
    name: Name
    description: Text
    sources: Annotated[list[Text], Field(max_length=100)]
    raw_fit: Annotated[float, Field(gt=0)] | None = None
    other: Share | None = None
    array: MultiplierArray | None = None
    dtypes: StageDtypes | None = None
    groups: Annotated[dict[Name, FlipFlopGroup], Field(max_length=100)] = {}
    memories: Annotated[dict[Name, Memory], Field(max_length=32)] = {}
    remark: Text = ""

    @model_validator(mode="after")
    def _adds_up(self) -> AcceleratorDescription:
        described = {name: bool(getattr(self, name)) for name in ("array", "dtypes", "groups")}
        described["other"] = self.other is not None
        if not any(described.values()):
            if not self.memories:
                raise ValueError(
                    "nothing is described; give flip-flops (array, dtypes, groups, other), memories, or both"
                )
            return self
        if not all(described.values()) or self.other is None:
            missing = next(name for name in described if not described[name])
            raise ValueError(
                f"{missing} is missing; give array, dtypes, groups and other to describe flip-flops, or none of them"
            )
        whole = sum(g.share for g in self.groups.values()) + self.other
        if abs(whole - 1) > ADD_UP:
            raise ValueError(f"the shares of all groups plus other add up to {whole:.8g}; expected 1")
        if not any(g.share * g.activeness for g in self.groups.values()):
            raise ValueError(
                "share * activeness is 0 for every group; expected a product above 0 for at least one group"
            )
        return self
