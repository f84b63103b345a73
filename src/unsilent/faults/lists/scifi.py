"""The weight fault lists of SCI-FI (Gavarini, Ruospo, Sanchez, ETS 2023; github.com/GabrieleGavarini/SCI-FI).

Read in ``FaultGenerators/FaultListGenerator.py``, ``WeightFaultInjector.py`` and ``FaultInjectionManager.py`` at 886193e
(2023-09) and 5fe2130: CSV with the header ``Injection,Layer,TensorIndex,Bit``; ``Layer`` is a module, whose ``weight`` is
corrupted; ``TensorIndex`` is a flat C-order position, until 842f4c1 (2023-04) coordinates in brackets; ``Bit`` counts from the
least significant bit. The fault model is called stuck-at, but the lists contain no value; SCI-FI then flips the bit.

Neuron lists of SCI-FI are refused, because they do not contain the new value: SCI-FI scales it by the range of the output while
the model runs.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

from unsilent.basics.printable import short_repr
from unsilent.basics.sizes import parse_whole_number
from unsilent.faults.lists.entries import ColumnNames, FaultListEntry, ListedCorruption, WrongEntry, errors_at

HEADER = ("Injection", "Layer", "TensorIndex", "Bit")
_COLUMNS = ColumnNames("Layer", ("TensorIndex",), "Bit")


@dataclass(frozen=True)
class SciFi:
    """A weight fault list of SCI-FI in CSV."""

    def entries(self, content: bytes, name: str) -> Iterator[FaultListEntry]:
        """One entry for each row."""
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise WrongEntry("it is not text; expected a CSV with the header " + ",".join(HEADER)) from None
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            with errors_at("line 1"):
                _check_header(tuple(cell.strip() for cell in next(reader, [])))
            for row in reader:
                if row:
                    place = f"line {reader.line_num}"
                    with errors_at(place):
                        corruption = _corrupt(row)
                    yield FaultListEntry(place, (corruption,))
        except csv.Error as error:
            with errors_at(f"line {reader.line_num}"):
                raise WrongEntry(f"cannot be read as CSV ({error})") from None


def _check_header(result: tuple[str, ...]) -> None:
    if "FeatureMapIndex" in result:
        raise WrongEntry(
            "this list of neuron faults does not contain the faulty values, because SCI-FI computes them during "
            "the run; give a list of weight faults"
        )
    if result != HEADER:
        raise WrongEntry(f"found the header {short_repr(','.join(result), 60)}; expected {','.join(HEADER)}")


def _corrupt(row: list[str]) -> ListedCorruption:
    if len(row) != len(HEADER):
        raise WrongEntry(f"has {len(row)} columns; expected {len(HEADER)}: {', '.join(HEADER)}")
    number, layer, position, bit = row
    if parse_whole_number(number) is None:
        raise WrongEntry(f"found {short_repr(number)}; expected a whole number", HEADER[0])
    index = _index(position)
    if index is None:
        raise WrongEntry(f"found {short_repr(position)}; expected a position like 17, or (0, 1, 2, 2)", HEADER[2])
    flipped = parse_whole_number(bit)
    if flipped is None:
        raise WrongEntry(f"found {short_repr(bit)}; expected the number of a bit, 0 or more", HEADER[3])
    return ListedCorruption(layer.strip(), index, "xor", flipped, _COLUMNS)


def _index(text: str) -> int | tuple[int, ...] | None:
    """Parse ``17`` or ``(0, 1, 2, 2)``; None for any other text."""
    text = text.strip()
    if not (text.startswith("(") and text.endswith(")")):
        return parse_whole_number(text)
    parts = [parse_whole_number(part) for part in text[1:-1].rstrip().removesuffix(",").split(",")]
    return tuple(part for part in parts if part is not None) if None not in parts else None
