"""Lines on stderr stay lines where several ranks print at once."""

from __future__ import annotations

import io

from unsilent.launch.standard_error import StandardError


def test_a_line_is_one_write(monkeypatch):
    """Two ranks share a terminal; between two writes the line of the other rank may come."""
    writes = []

    class Unbuffered(io.StringIO):
        def write(self, text):
            writes.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Unbuffered())
    StandardError().print_line("one line")
    assert writes == ["one line\n"]
