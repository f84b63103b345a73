"""``unsilent report --help`` without a store: what an option means for the stores of each kind."""

from __future__ import annotations

from unsilent.cli.report import option_classes, options_of_every_kind
from unsilent.options import options_of
from unsilent.studies.campaign_kinds import KINDS
from unsilent.studies.pvf.kind import PVF


def test_the_default_for_stores_of_each_kind_is_shown():
    shown = options_of_every_kind(KINDS)
    for kind in KINDS:
        for name, field in options_of(*option_classes(kind)).items():
            assert field.default_text in shown[name].default_text, (kind.name, name)


def test_an_interval_has_one_name():
    """The name that ``--interval`` takes begins the method of every row that it makes."""
    from unsilent.statistics import Stratum, bounded_mean, stratified

    default = options_of(PVF.analysis_options)["interval"].default
    whole, shares = [0.0, 1.0, 0.0], [0.0, 0.25, 1.0]
    both = [Stratum.of(whole, 0.5), Stratum.of(shares, 0.5)]
    for interval in (bounded_mean(whole), bounded_mean(shares), stratified(both), stratified([both[0], both[0]])):
        assert interval.method.lower().startswith(default)
