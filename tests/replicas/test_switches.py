"""Switches as text, their environment, and the seeds that follow from them."""

from __future__ import annotations

import pytest

from unsilent.basics.errors import UsageError
from unsilent.replicas import SWITCHES, VARIANTS, Replica, Switches


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_is_read_back(name):
    found = Switches.parse(name)
    assert Switches.parse(str(found)) == found
    assert name in found
    assert "nothing" not in found


def test_order_does_not_matter_and_variants_are_sets():
    assert Switches.parse("within+init+order") == Switches.parse("order+within+init")
    assert Switches.parse("algo+impl") == VARIANTS["algo+impl"] == Switches.parse("within+dropout+augment+order+init")
    assert str(VARIANTS["control"]) == "control"
    assert Switches.parse("CONTROL") == Switches()


def test_values():
    assert str(Switches.parse("threads")) == "threads=2"
    assert Switches.parse("race=4").threads == 4
    assert Switches.parse("isa=avx2+mkl").environment == (("ATEN_CPU_CAPABILITY", "avx2"), ("MKL_CBWR", "COMPATIBLE"))
    assert not Switches.parse("onednn=off+threads=3").varies_between_replicas
    assert Switches.parse("onednn+within").varies_between_replicas


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dropuot", "did you mean 'dropout'"),
        ("", "unknown switch"),
        ("threads=1", "from 2 to"),
        ("threads=two", "from 2 to"),
        ("isa=avx3", "did you mean 'avx2'"),
        ("init=3", "takes no value"),
        ("init+init", "is set twice"),
        ("race+threads=4", "both set the number of threads"),
    ],
)
def test_bad_switches_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        Switches.parse(text)


def test_seeds_are_fresh_where_switched_on_and_shared_between_variants():
    control, algo, impl, both = (Replica(VARIANTS[n], 3).seeds(7) for n in ("control", "algo", "impl", "algo+impl"))
    assert control == {"init": 7, "order": 7, "augment": 7, "dropout": 7, "within": None}
    assert {name for name in control if algo[name] != control[name]} == {"init", "order", "augment", "dropout"}
    assert {name for name in control if impl[name] != control[name]} == {"within"}
    assert {name for name in control if both[name] != algo[name]} == {"within"}
    one, other = Replica(VARIANTS["algo"], 4).seeds(7), Replica(VARIANTS["algo"], 3).seeds(8)
    assert len({one["init"], other["init"], algo["init"]}) == 3
