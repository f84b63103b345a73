"""Parts that an installed package registers: the module of docs/howto/own-parts.md, and a study, found by their entry points."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch

import unsilent
from conftest import TINY, in_process, inline_campaigns
from contracts.pi import PiSpec
from unsilent.basics.errors import UsageError
from unsilent.basics.nested import tensors_in
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.formats.known import FORMATS, all_formats
from unsilent.detectors.rules import format_rule, make_rule, recorded_text
from unsilent.monitor.settings import MonitorSettings
from unsilent.outcomes import judge
from unsilent.protection.detector import make_detector
from unsilent.protection.profile import load_profile, make_profile
from unsilent.studies.campaign_kinds import installed_kinds, load_installed_kind
from unsilent.testing import DetectorContract, FormatContract, JudgeContract, KindContract, RuleContract
from unsilent.testing.detectors import clean_batches, small_model

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own-parts.md"
STUDY = (
    "from dataclasses import replace\nfrom contracts.pi import PI\nTOY = replace(PI, name='toy', application_id=7)\n"
)
ENTRY_POINTS = """
[unsilent.rules]
jump = my_parts:Jump
robust-z = no_such_module:Rule
misnamed = my_parts:Jump
gone = no_such_module:Rule
[unsilent.detectors]
output-range = my_parts:OutputRange
no-detector = my_parts:Moved
[unsilent.judges]
moved = my_parts:Moved
no-judge = my_parts:RAW
[unsilent.formats]
raw = my_parts:RAW
broken = no_such_module:FORMAT
[unsilent.kinds]
toy = my_study:TOY
"""


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """A folder on the path of imports, as pip fills it."""
    folder = tmp_path_factory.mktemp("site")
    (module,) = re.findall(r'```python title="my_parts.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    (folder / "my_parts.py").write_text(textwrap.dedent("    " + module.lstrip()))
    (folder / "my_study.py").write_text(STUDY)
    info = folder / "my_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
        for name in ("my_parts", "my_study"):
            sys.modules.pop(name, None)


class TestInstalledRule(RuleContract):
    def make_rule(self):
        return make_rule("jump:factor=4")


class TestInstalledDetector(DetectorContract):
    def make_detector(self):
        return make_detector("output-range")


class TestInstalledJudge(JudgeContract):
    def make_judge(self):
        return judge("moved:limit=0.5")

    def make_outputs(self):
        golden = torch.zeros(3, 2)
        return golden, golden + torch.tensor([[0.0], [0.4], [0.6]]), None


class TestInstalledFormat(FormatContract):
    def make_format(self):
        return next(one for one in all_formats() if one not in FORMATS)

    def write_checkpoint(self, folder):
        values = np.linspace(-1, 1, 24, dtype="f4")
        path = folder / "weights.raw"
        path.write_bytes(b"RAW1" + (24).to_bytes(4, "little") + values.tobytes())
        return path, {"model/weight": values}


class TestInstalledKind(KindContract):
    def make_kind(self):
        return load_installed_kind(installed_kinds()["toy"])

    def make_spec(self):
        return PiSpec(points=20)


def test_contracts_notice_parts_that_are_wrong(tmp_path):
    class Forgetful(type(make_rule("jump"))):
        def initial_state(self, series):
            return np.full(len(series), 1e-3)  # a constant series jumps in its first step

    class Blind(type(make_detector("output-range"))):
        def margins(self, recorded):
            return np.zeros((1, recorded.samples))

    class Content(type(judge("moved"))):
        def __call__(self, golden, faulty, batch):
            return torch.zeros(len(golden), dtype=torch.bool)

    def shifted(files):
        (tensor,) = good.tensors(files)
        return [replace(tensor, blocks=(replace(tensor.blocks[0], offset=4),))]

    rule, detector, verdict, form = (
        TestInstalledRule(),
        TestInstalledDetector(),
        TestInstalledJudge(),
        TestInstalledFormat(),
    )
    good = form.make_format()
    rule.make_rule, detector.make_detector, verdict.make_judge = Forgetful, Blind, Content
    form.make_format = lambda: good._replace(tensors=shifted)
    for broken in (
        lambda: rule.test_a_constant_series_never_raises_an_alarm(1.0),
        detector.test_a_corrupted_weight_is_seen_while_it_is_in_place,
        verdict.test_an_incorrect_output_is_found_with_a_severity,
        lambda: form.test_its_tensors_have_the_values_that_were_saved(tmp_path),
    ):
        with pytest.raises(AssertionError):
            broken()


def test_contracts_notice_a_wrong_dtype(tmp_path):
    form = TestInstalledFormat()
    good = form.make_format()
    form.make_format = lambda: good._replace(
        tensors=lambda files: [replace(tensor, dtype="int32") for tensor in good.tensors(files)]
    )
    with pytest.raises(AssertionError, match="model/weight was saved as float32, but is listed as int32"):
        form.test_its_tensors_have_the_values_that_were_saved(tmp_path)


def test_contracts_notice_margins_and_verdicts_that_depend_on_other_samples():
    class Centred(type(make_detector("output-range"))):
        def margins(self, recorded):
            margins = super().margins(recorded)
            return margins - margins.mean()

    class Highest(type(make_detector("output-range"))):
        def margins(self, recorded):
            return np.maximum.accumulate(super().margins(recorded), 1)

    class Whole(type(judge("moved"))):
        def __call__(self, golden, faulty, batch):
            incorrect, severity = super().__call__(golden, faulty, batch)
            return incorrect | incorrect.any(), severity + 1

    class Relative(type(judge("moved"))):
        def __call__(self, golden, faulty, batch):
            incorrect, severity = super().__call__(golden, faulty, batch)
            return incorrect, severity / severity.max().clamp(1e-9)

    detector, verdict = TestInstalledDetector(), TestInstalledJudge()
    for detector.make_detector in (Centred, Highest):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            detector.test_the_margins_of_a_sample_do_not_depend_on_other_samples()
    for verdict.make_judge in (Whole, Relative):
        with pytest.raises(AssertionError, match="are not equal|Not equal to tolerance"):
            verdict.test_the_verdict_on_a_sample_does_not_depend_on_other_samples()
    golden = torch.zeros(4, 2)
    for wrap in (lambda one: (one, None), lambda one: {"logits": one, "loss": torch.zeros(())}, list):
        verdict.make_judge = lambda: lambda *outputs: Whole(0.5)(*(first_tensor(one) for one in outputs[:2]), None)
        verdict.make_outputs = lambda wrap=wrap: (wrap(golden), wrap(golden + 1), None)  # all samples are incorrect
        with pytest.raises(AssertionError, match="are not equal"):
            verdict.test_the_verdict_on_a_sample_does_not_depend_on_other_samples()


def first_tensor(output):
    """The tensor of an output, or the samples of a list as one tensor."""
    return torch.stack(output) if isinstance(output, list) else next(tensors_in(output))


def test_contracts_notice_a_detector_that_changes_the_model():
    class Training(type(make_detector("output-range"))):
        def calibrate(self, model, batches, run=None):
            super().calibrate(model, batches)
            model.act.train()

    class Rounding(type(make_detector("output-range"))):
        def calibrate(self, model, batches, run=None):
            super().calibrate(model, batches)
            model.head.bias.data.mul_(0.5)

    detector = TestInstalledDetector()
    for detector.make_detector, said in (
        (Training, r"training mode: \['act'\]"),
        (Rounding, r"model: \['head.bias'\]"),
    ):
        with pytest.raises(AssertionError, match=said):
            detector.test_calibrating_leaves_the_model_as_it_was()


def test_contracts_say_which_threshold_a_rule_does_not_check():
    class Lenient(type(make_rule("jump"))):
        def __post_init__(self):
            pass

    class Vague(type(make_rule("jump"))):
        def __post_init__(self):
            if self.factor != 3:
                raise UsageError("no")

    rule = TestInstalledRule()
    for rule.make_rule, said in (
        (Lenient, "rule 'jump' with factor=-1 is made without an error; check factor in __post_init__.*thresholds"),
        (Vague, "rule 'jump' with factor=-1 is refused with 'no'; check factor in __post_init__"),
    ):
        with pytest.raises(AssertionError, match=said):
            rule.test_thresholds_that_make_no_sense_are_named()


def test_a_rule_is_recorded_as_its_text_or_its_repr():
    rule = make_rule("jump:factor=4")
    assert (format_rule(rule), recorded_text(rule)) == ("jump:factor=4.0", "jump:factor=4.0")
    assert MonitorSettings(rule=[rule, "nonfinite"]).rule_names == ("jump", "nonfinite")

    class Other(type(rule)):
        pass

    assert recorded_text(Other(factor=2.0)) == f"{Other.__qualname__}(factor=2.0)"


def monitored(tmp_path, rule):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    events = tmp_path / "events.jsonl"
    with unsilent.Monitor(model, optimizer, rule=rule, sampling="fixed:1", events=events) as monitor:
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.ones(4, 3)).sum() * (1e6 if step == 3 else 1)).backward()
            optimizer.step()
    (record,) = tmp_path.glob("incidents/*/incident.json")
    assert [alarm.step for alarm in monitor.alarms] == [3]
    return json.loads(events.read_text().splitlines()[0])["settings"]["rule"], record.read_text()


def test_a_live_rule_is_applied_and_recorded(tmp_path):
    rules, incident = monitored(tmp_path, make_rule("jump:factor=4"))
    assert rules == ["jump:factor=4.0"]
    assert "jump:factor=4.0" in incident


def test_a_live_rule_without_a_text_is_recorded_by_its_repr(tmp_path):
    class Mine(type(make_rule("jump"))):
        name = "mine"

        def __repr__(self):
            return "Mine()\n"

    rules, incident = monitored(tmp_path, Mine())
    assert rules == ["Mine()\\x0a"]
    assert "Mine()" in incident


def test_a_live_rule_without_a_repr_is_recorded_by_its_name(tmp_path):
    class Mine(type(make_rule("jump"))):
        name = "mine"
        __repr__ = object.__repr__

    assert monitored(tmp_path, [Mine()])[0] == ["mine"]


def test_a_profile_names_an_installed_detector(tmp_path):
    model = small_model()
    made = make_profile(model, clean_batches(15), "output-range+weight-integrity", rate=0.05)
    made.save(tmp_path / "a.profile")
    again = load_profile(tmp_path / "a.profile", model)
    assert (again.detector.name, again.threshold) == (made.detector.name, made.threshold)
    assert again.parts[0].largest == made.parts[0].largest


def test_a_detector_that_no_name_stands_for_is_not_stored(tmp_path):
    class Own(type(make_detector("output-range"))):
        name = "own"

    made = make_profile(small_model(), clean_batches(15), Own(), rate=0.05)
    with pytest.raises(UsageError, match="own cannot be stored: no name stands for Own"):
        made.save(tmp_path / "a.profile")
    with pytest.raises(UsageError, match="is the class Own; expected an object"):
        make_detector(Own)
    with pytest.raises(UsageError, match="layers is given, but own is an object"):
        make_detector(Own(), ["block.*"])


def test_a_campaign_is_judged_by_an_installed_judge(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    with inline_campaigns():
        result = unsilent.pvf("tiny.py:make", judge="moved:limit=0.5", trials=2)
    assert result.judge == "Moved(limit=0.5)"


def test_a_checkpoint_of_an_installed_format_is_opened(tmp_path):
    path, values = TestInstalledFormat().write_checkpoint(tmp_path)
    with Checkpoint(path) as checkpoint:
        assert (checkpoint.format, list(checkpoint.tensors)) == ("raw weights", list(values))
    (tmp_path / "none").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="expected one of .*raw weights; the checkpoint format broken") as caught:
        Checkpoint(tmp_path / "none")
    assert "of package my-parts cannot be imported: ModuleNotFoundError" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_rule("jumps"), "unknown rule 'jumps'; did you mean 'jump'"),
        (lambda: make_detector("output-rang"), "unknown detector 'output-rang'; did you mean 'output-range'"),
        (lambda: judge("move"), "unknown judge 'move'; did you mean 'moved'"),
        (
            lambda: make_rule("gone"),
            "the rule gone (no_such_module:Rule) of package my-parts cannot be imported: Module",
        ),
        (lambda: make_rule("misnamed"), "misnamed of unsilent.rules in package my-parts is the class Jump"),
        (lambda: make_detector("no-detector"), "detector is of type Moved; expected"),
        (
            lambda: judge("no-judge"),
            "of unsilent.judges in package my-parts is a Format (my_parts:RAW); expected a class",
        ),
    ],
)
def test_what_is_not_there_or_broken_is_one_line(make, said):
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_name_of_this_package_cannot_be_taken():
    assert make_rule("robust-z").__class__.__module__ == "unsilent.detectors.robust_z"


def test_lists_name_installed_parts_and_what_is_broken():
    listed = {(one["name"], one["kind"]): one for one in json.loads(in_process("detectors", "--json").stdout)}
    assert listed["jump", "rule"]["description"] == "Value against the largest one so far (package my-parts)"
    assert listed["jump", "rule"]["parameters"] == {"factor": 3.0}
    assert "package my-parts" in listed["output-range", "inference"]["description"]
    assert "cannot be imported" in listed["gone", "rule"]["description"]
    assert "jump" in in_process("detectors").stdout


@pytest.mark.slow
def test_nothing_is_looked_up_or_imported_without_need():
    """A name of this package is made without a look at what is installed."""
    script = (
        "import sys, torch, unsilent\n"
        "from unsilent.detectors.rules import make_rule\n"
        "from unsilent.outcomes import judge\n"
        "import importlib.metadata as m\n"
        "m.entry_points = None\n"
        "make_rule('robust-z'), judge('top1')\n"
        "assert 'unsilent.testing' not in sys.modules and 'pytest' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert {entry.name for entry in entry_points(group="unsilent.formats")} >= {"raw", "broken"}
