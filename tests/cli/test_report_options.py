"""``unsilent report --help`` without a store: what an option means for the stores of each kind."""

from __future__ import annotations

from unsilent.cli.report import option_classes, options_of_every_kind
from unsilent.options import options_of
from unsilent.studies.campaign_kinds import KINDS


def test_the_default_for_stores_of_each_kind_is_shown():
    shown = options_of_every_kind(KINDS)
    for kind in KINDS:
        for name, field in options_of(*option_classes(kind)).items():
            assert field.default_text in shown[name].default_text, (kind.name, name)
