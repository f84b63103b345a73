"""What every rule must do, whatever it compares: the contract that is shipped. A new rule joins by its row in `RULES`."""

from __future__ import annotations

import json

import pytest

from unsilent.detectors.rules import (
    PRESETS,
    RULES,
    format_rule,
    make_rule,
    rule_class,
    rule_thresholds,
    rules_of_preset,
)
from unsilent.testing import RuleContract

IGNORES_NONFINITE = ("megatron-large",)
"""Documented so."""
OTHER_THRESHOLDS = {
    "robust-z": "robust-z:threshold=9,warm_up=30",
    "asd-v1": "asd-v1:upper_alarm=2e6,learns_alarms=false",
    "asd-v2": "asd-v2:jump_warning=3,c_min_steps=50",
    "asd-v3": "asd-v3:decay=0.9",
    "asd-combined": "asd-combined:grad_sample_interval=10,keeps_uncounted=no",
    "megatron-large": "megatron-large:factor=20",
    "loss-spike": "loss-spike:window=20",
    "update-rms": "update-rms:deviations=6",
}


class TestRules(RuleContract):
    @pytest.fixture(autouse=True, params=RULES)
    def _name(self, request):
        self.name = request.param
        self.ignores_nonfinite = self.name in IGNORES_NONFINITE

    def make_rule(self):
        """With every parameter judged, so that no rule depends on the place of a series."""
        return make_rule(self.name + (":grad_sample_interval=1" if self.name == "asd-combined" else ""))


@pytest.mark.parametrize("name", RULES)
def test_text_and_json_make_the_same_rule(name):
    assert format_rule(make_rule(name)) == name
    assert rule_class(name).name == name
    rule = make_rule(OTHER_THRESHOLDS.get(name, name))
    assert make_rule(format_rule(rule)) == rule
    assert type(rule)(**json.loads(json.dumps(rule_thresholds(rule)))) == rule
    assert (rule != make_rule(name)) if name in OTHER_THRESHOLDS else not rule_thresholds(rule)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_in_a_preset(name):
    assert any(one.name == name for one in rules_of_preset("all"))
    assert all(make_rule(text) for texts in PRESETS.values() for text in texts)
