"""Settings from arguments, a TOML file and the variables of ASD: their meaning in each generation, clamps, precedence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.errors import UsageError
from unsilent.launch.asd_variables import ENABLE, PAIR_DEFAULTS, SIGMA, UPPER, VARIABLES, read_pair
from unsilent.launch.switches import resolve_settings
from unsilent.monitor.settings import MonitorSettings

CONFIG, MS_CONFIG = "NPU_ASD_CONFIG", "MS_NPU_ASD_CONFIG"


def changed(settings):
    """Fields that differ from the defaults."""
    default = vars(MonitorSettings())
    return {name: value for name, value in vars(settings).items() if value != default[name]}


MEANINGS = [
    # arguments, variables, settings that follow
    ({}, {}, {}),
    ({}, {ENABLE: "1"}, {"preset": "asd-v3"}),
    ({}, {ENABLE: "2"}, {"preset": "asd-v3", "on_alarm": "stop"}),
    ({}, {ENABLE: "3"}, {"preset": "asd-v3", "on_alarm": "stop", "log_normal": True}),
    ({"preset": "asd-v1"}, {ENABLE: "1"}, {"preset": "asd-v1", "on_alarm": "stop"}),
    ({"preset": "asd-v2"}, {ENABLE: "1"}, {"preset": "asd-v2"}),
    ({"preset": "asd-v2"}, {ENABLE: "2"}, {"preset": "asd-v2", "on_alarm": "stop"}),
    (
        {},
        {ENABLE: "1", UPPER: "500,40", SIGMA: "300,20"},
        {
            "preset": "asd-v2",
            "rule": ("asd-v2:upper_alarm=500,upper_warning=40,jump_alarm=300,jump_warning=20",),
        },
    ),
    ({}, {ENABLE: "1", UPPER: "1000000,10000", SIGMA: "100000,5000"}, {"preset": "asd-v2"}),
    ({}, {ENABLE: "1", UPPER: "500,40"}, {"preset": "asd-v3", "rule": ("asd-v3:alarm_ratio=500,warning_ratio=40",)}),
    ({"preset": "asd-v1"}, {UPPER: "9,4"}, {"preset": "asd-v1", "rule": ("asd-v1:upper_alarm=9,upper_warning=4",)}),
    ({}, {CONFIG: "enable:true"}, {"preset": "asd-combined"}),
    ({}, {MS_CONFIG: "enable:true"}, {"preset": "asd-combined", "rule": ("asd-combined:grad_sample_interval=10",)}),
    (
        {},
        {CONFIG: "enable:true, strikes_num:5, upper_thresh2:50, cooldown:7,strikes_window:60,grad_sample_interval:1"},
        {
            "preset": "asd-combined",
            "rule": (
                "asd-combined:grad_sample_interval=1,upper_thresh2=50,cooldown=7,strikes_num=5,strikes_window=60",
            ),
        },
    ),
    ({}, {CONFIG: "enable:false", ENABLE: "1"}, {"preset": "asd-v3"}),
]


@pytest.mark.parametrize(("arguments", "variables", "expected"), MEANINGS)
def test_variables_mean_what_their_generation_documents(arguments, variables, expected):
    resolved = resolve_settings(arguments, None, variables | {"PATH": "/bin"})
    assert changed(resolved.settings) == expected
    if CONFIG not in variables or ENABLE not in variables:
        assert resolved.notes == ()
    assert resolved.uses_asd_variables == bool(variables)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "foo:3",
            "there is no key foo:3; known: enable, grad_sample_interval, upper_thresh1, upper_thresh2, cooldown",
        ),
        ("upper_thresh1=3", "there is no key upper_thresh1=3; known"),
        (
            "upper_thresh1:10",
            "upper_thresh1:10 is not greater than upper_thresh2:100, so the defaults of both are used",
        ),
        ("cooldown:0", "cannot use cooldown:0, so the defaults are used instead"),
    ],
)
def test_what_a_configuration_cannot_mean_is_explained(text, said):
    (note,) = resolve_settings({}, None, {CONFIG: f"enable:true,{text}"}).notes
    assert note.startswith(f"{CONFIG}: {said}")


@pytest.mark.parametrize("variables", [{ENABLE: "0"}, {CONFIG: "enable:false"}, {CONFIG: "cooldown:9"}])
def test_a_variable_switches_off_unless_a_preset_or_rule_is_given(variables):
    off = resolve_settings({"events": None}, None, variables)
    assert off.settings is None
    (note,) = off.notes
    assert "switches the detection off" in note
    for arguments in (
        {"preset": "asd-v2"},
        {"preset": "asd-combined"},
        {"rule": ("nonfinite",)},
        {"preset": "robust-z"},
    ):
        resolved = resolve_settings(arguments, None, variables)
        assert resolved.settings.preset == arguments.get("preset", "robust-z")
        (note,) = resolved.notes
        assert note.startswith((ENABLE, CONFIG))


NOTED = [
    # arguments, variables, the variable that is named, what follows
    ({}, {ENABLE: "yes"}, ENABLE, {}),
    ({}, {ENABLE: "4"}, ENABLE, {}),
    ({"preset": "asd-v1"}, {ENABLE: "2"}, ENABLE, {"preset": "asd-v1"}),
    ({}, {ENABLE: "1", UPPER: "1e6,1e4"}, UPPER, {"preset": "asd-v3"}),
    ({}, {ENABLE: "1", UPPER: "10"}, UPPER, {"preset": "asd-v3"}),
    ({}, {ENABLE: "1", UPPER: "10,20"}, UPPER, {"preset": "asd-v3"}),
    ({}, {ENABLE: "1", SIGMA: "2,1"}, SIGMA, {"preset": "asd-v2"}),
    ({}, {ENABLE: "1", UPPER: "9,1"}, UPPER, {"preset": "asd-v3", "rule": ("asd-v3:alarm_ratio=9,warning_ratio=3",)}),
    ({}, {UPPER: "10,5"}, UPPER, {}),
    ({"preset": "asd-v3"}, {SIGMA: "10,5"}, SIGMA, {"preset": "asd-v3"}),
    ({"preset": "megatron"}, {ENABLE: "1"}, ENABLE, {"preset": "megatron"}),
    ({"preset": "asd-v2"}, {CONFIG: "enable:true"}, CONFIG, {"preset": "asd-v2"}),
    ({}, {CONFIG: "enable:true", ENABLE: "2"}, ENABLE, {"preset": "asd-combined"}),
    ({}, {CONFIG: "enable:true", MS_CONFIG: "enable:true"}, MS_CONFIG, {"preset": "asd-combined"}),
    ({}, {CONFIG: "enable:true,cooldown:-1,color:red"}, CONFIG, {"preset": "asd-combined"}),
    ({}, {CONFIG: "enable:true,upper_thresh1:5"}, CONFIG, {"preset": "asd-combined"}),
    ({}, {CONFIG: "enable:true,with_checksum:true"}, CONFIG, {"preset": "asd-combined"}),
    ({"on_alarm": "log"}, {ENABLE: "2"}, ENABLE, {"preset": "asd-v3"}),
    ({"rule": ("asd-v3",)}, {ENABLE: "1", UPPER: "9,4"}, UPPER, {"preset": "asd-v3", "rule": ("asd-v3",)}),
]


@pytest.mark.parametrize("text", ["enable:True", "garbage", "strikes_num:4"])
def test_a_configuration_that_does_not_say_enable_says_so(text):
    resolved = resolve_settings({}, None, {CONFIG: text})
    assert resolved.settings is None
    (note,) = resolved.notes
    assert note.startswith(f"{CONFIG}={text}, without enable:true, switches the detection off")


@pytest.mark.parametrize(("arguments", "variables", "named", "expected"), NOTED)
def test_what_is_malformed_overruled_or_ignored_is_noted_once(arguments, variables, named, expected):
    resolved = resolve_settings(arguments, None, variables)
    assert changed(resolved.settings) == expected
    (note,) = resolved.notes
    assert note.startswith(named)


def test_arguments_come_before_the_file_and_the_file_before_variables(tmp_path):
    file = tmp_path / "monitor.toml"
    file.write_text('on-alarm = "log"\nbudget = 1.5\n[rule.robust-z]\nthreshold = 12\n[rule.nonfinite]\n')
    resolved = resolve_settings({"budget": 0.25}, file, {ENABLE: "2"})
    assert changed(resolved.settings) == {
        "preset": "asd-v3", "budget": 0.25, "rule": ("robust-z:threshold=12", "nonfinite"),
    }  # fmt: skip
    assert resolved.notes == (f"{ENABLE} asks for on-alarm stop; log was given instead, and is used",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = 3", "rule is 3; expected"),
        ("[rule]\nrobust-z = 3", "expected texts"),
        ("treshold = 3", "unknown key"),
        ("budget = 'x'", "expected a number"),
        ("mode = 'fast'", "unknown --mode 'fast'"),
    ],
)
def test_a_file_that_cannot_be_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "monitor.toml").write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        resolve_settings({}, tmp_path / "monitor.toml", {})
    assert "\n" not in str(raised.value)


@given(st.integers(), st.integers())
def test_thresholds_are_raised_to_three_and_ordered(first, second):
    default = PAIR_DEFAULTS[UPPER]
    pair, problem = read_pair(f"{first}, {second}", default)
    fits = abs(first) < 2**63 and abs(second) < 2**63
    expected = (max(first, 3), max(second, 3))
    if not fits or expected[0] <= expected[1]:
        assert (pair, bool(problem)) == (default, True)
    else:
        assert pair == expected
        assert bool(problem) == (pair != (first, second))


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=30) | st.sampled_from("0123")))
def test_no_variable_raises_an_error(variables):
    for preset in (None, "asd-v1", "asd-v2", "asd-v3", "asd-combined", "robust-z"):
        resolved = resolve_settings({"preset": preset} if preset else {}, None, variables)
        assert len(resolved.notes) <= len(variables) + 1
