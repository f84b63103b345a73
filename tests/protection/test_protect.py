"""Protected models: outputs and verdicts of clean and faulty calls, in both modes, and every rung of the ladder."""

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.protection.duplication import Duplication
from unsilent.protection.profile import load_profile, make_profile
from unsilent.protection.protect import ProtectedModel, protect
from unsilent.protection.recorded_pass import record_pass
from unsilent.protection.recovery_ladder import CorruptedAnswer

RULES = ["dr-dna", "ranger", "clip-act", "quantiles", "symptom", "abft", "nonfinite", "dr-dna+abft"]


def small():
    """A convolutional classifier."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ).eval()


def inputs(samples, seed=0):
    return torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


class NoTensor(nn.Module):
    """Returns text."""

    def forward(self, x):
        return {"text": "none"}


CALIBRATION = [inputs(100, seed) for seed in range(6)]


class Transient:
    """Corrupts the output of a layer in its first runs."""

    def __init__(self, layer, runs=1, value=1e6):
        self.left, self.value = runs, value
        self.hook = layer.register_forward_hook(self, prepend=True)

    def __call__(self, module, args, output):
        if self.left:
            self.left -= 1
            output = output.clone()
            output[1].view(-1)[2] = self.value
            return output
        return None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["end", "early"])
def test_clean_answers_are_those_of_the_model_and_seldom_flagged(rule, mode):
    model = small()
    with protect(model, CALIBRATION, rule, mode=mode) as guarded, torch.no_grad():
        flagged = 0
        for seed in range(10, 16):
            batch = inputs(100, seed)
            assert torch.equal(guarded(batch), model(batch))
            flagged += guarded.verdict.flagged.sum()
        assert flagged <= 24  # 6 expected; 4 % never passed by chance
        assert len(guarded.verdicts) <= 6
    assert not model._forward_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["end", "early"])
@pytest.mark.parametrize("value", [1e6, torch.nan])
def test_a_corrupted_sample_is_flagged_with_its_layer(rule, mode, value):
    if rule == "nonfinite" and value == 1e6:
        pytest.skip("finite")
    model = small()
    guarded = protect(model, CALIBRATION, rule, mode=mode)
    fault = Transient(model[0], value=value)
    with torch.no_grad():
        guarded(inputs(4, 99))
    fault.hook.remove()
    verdict = guarded.verdict
    assert verdict.flagged[1]
    assert verdict.layer == "0"
    assert (verdict.action, verdict.recovered) == ("", False)
    assert list(guarded.verdicts) == [verdict]


def test_both_modes_have_the_same_margins():
    model = small()
    profile = make_profile(model, CALIBRATION)
    with torch.no_grad():
        for seed in range(3):
            found = []
            for mode in ("end", "early"):
                with ProtectedModel(model, profile, mode) as guarded:
                    guarded(inputs(8, seed))
                    found.append(guarded.verdict.margins)
            np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("recovery", [("layer",), ("rerun",), ("layer", "rerun")])
def test_a_transient_fault_is_undone(recovery):
    model, batch = small(), inputs(4, 99)
    mode = "early" if "layer" in recovery else "end"
    with protect(model, CALIBRATION, mode=mode, recovery=recovery) as guarded, torch.no_grad():
        clean = model(batch)
        fault = Transient(model[0])
        assert torch.equal(guarded(batch), clean)
        fault.hook.remove()
    verdict = guarded.verdict
    assert (verdict.action, verdict.recovered) == (recovery[0], True)
    assert verdict.flagged.tolist() == [False, True, False, False]  # the fault is in the second sample alone
    assert (verdict.flagged == (verdict.margins > verdict.threshold)).all()


def test_corrupted_weights_are_repaired_bit_for_bit():
    model, batch = small(), inputs(4, 99)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with protect(model, CALIBRATION, recovery=("rerun", "repair")) as guarded, torch.no_grad():
        clean = model(batch)
        model[0].weight.data[3, 0, 1, 1] = 1e8
        assert torch.equal(guarded(batch), clean)
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("repair", True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_are_restored_from_a_golden_copy_where_parity_cannot():
    model, batch = small(), inputs(4, 99)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with protect(model, CALIBRATION, recovery=("repair", "golden")) as guarded, torch.no_grad():
        clean = model(batch)
        model[0].weight.data[0] = 1e8
        model[5].weight.data[0] = 1e8  # a second block of the same group
        assert torch.equal(guarded(batch), clean)
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("golden", True)
    assert guarded.golden_bytes == sum(value.numel() * value.element_size() for value in before.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_bad_blocks_of_a_group_are_not_repaired_and_the_answer_is_withheld():
    model = small()
    with protect(model, CALIBRATION, recovery=("repair", "abstain")) as guarded, torch.no_grad():
        model[0].weight.data[0] = 1e8
        model[5].weight.data[0] = 1e8
        after = [bytes(p.detach().numpy().tobytes()) for p in model.parameters()]
        with pytest.raises(CorruptedAnswer, match="the answer is withheld"):
            guarded(inputs(4, 99))
        assert [bytes(p.detach().numpy().tobytes()) for p in model.parameters()] == after
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("abstain", False)


@pytest.mark.parametrize("elsewhere", ["cpu", "function"])
def test_the_answer_of_another_device_is_taken(elsewhere):
    model, batch, twin = small(), inputs(4, 99), small()
    run = twin if elsewhere == "function" else "cpu"
    with protect(model, CALIBRATION, recovery="elsewhere", elsewhere=run) as guarded, torch.no_grad():
        clean = model(batch)
        model[0].weight.data[0] = 1e8
        assert torch.equal(guarded(batch), clean)
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("elsewhere", True)


class Decoder(nn.Module):
    """Its ``generate`` gives two numbers in the place of ten."""

    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x):
        return self.body(x)

    def generate(self, x):
        return torch.stack([self(x).amax(1), self(x + 1).amax(1)], 1)


@pytest.mark.parametrize("elsewhere", ["cpu", "model", "function"])
def test_after_generate_the_copy_generates(elsewhere):
    model, batch, twin = Decoder().eval(), inputs(4, 99), Decoder().eval()
    run = {"cpu": "cpu", "model": twin, "function": lambda x: twin.generate(x)}[elsewhere]
    made = {"run": lambda model, batch: model.generate(batch), "recovery": "elsewhere", "elsewhere": run}
    with torch.no_grad(), protect(model, CALIBRATION, **made) as guarded:
        clean = model.generate(batch)
        model.body[0].weight.data[0] = 1e8
        assert torch.equal(guarded.generate(batch), clean)
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("elsewhere", True)


def test_the_memory_of_checksums_counts_summed_weights(tmp_path):
    model = small()
    profile = make_profile(model, CALIBRATION, "abft")
    convolution, linear, largest = 2 * 9 + 2, 2 * 128 + 2, 2  # weights and biases with their magnitudes; one limit each
    assert profile.detector.nbytes == 4 * (convolution + linear) + 8 * largest
    profile.save(tmp_path / "p")
    assert load_profile(tmp_path / "p", model).detector.nbytes == profile.detector.nbytes


def test_duplication_takes_layers_in_the_order_of_their_scores():
    model, batch = small(), inputs(4, 99)  # parameters: 80 of the convolution, 16 of the norm, 1290 of the linear layer
    cases = [
        (Duplication(share=0.05), {"1"}),  # 69 parameters
        (Duplication(share=0.1), {"0", "1"}),
        (Duplication(share=0.06, scores={"0": 0.9, "1": 0.1}), {"0"}),  # 83 parameters
        (Duplication(share=0.1, scores={"5": 0.9, "0": 0.5, "1": 0.1}), {"0", "1"}),  # the linear layer does not fit
        (Duplication(layers="0|5"), {"0", "5"}),
    ]
    for detector, expected in cases:
        detector.calibrate(model)
        found = set()
        for name in ("0", "1", "5"):
            fault = Transient(model[int(name)])
            found |= {name} if detector.margins(record_pass(model, batch=batch)).any() else set()
            fault.hook.remove()
        assert found == expected, detector.name
    with pytest.raises(UsageError, match=r"share is 0.01, but the smallest layer has 0.012 of the parameters"):
        Duplication(share=0.01).calibrate(model)


@pytest.mark.parametrize("mode", ["end", "early"])
def test_detectors_of_weights_work_with_rules(mode):
    model, batch = small(), CALIBRATION[0][:4]
    detector = "dr-dna+weight-integrity:slices=2+golden-test+duplication"
    with protect(model, CALIBRATION, detector, mode=mode, recovery="repair") as guarded, torch.no_grad():
        clean = model(batch)
        assert torch.equal(guarded(batch), clean)
        assert not guarded.verdict.flagged.any()
        model[0].weight.data.view(torch.int32).view(-1)[3] ^= 1
        assert torch.equal(guarded(batch), clean)
    assert guarded.verdict.flagged.all()
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("repair", True)


def test_values_out_of_range_become_zero():
    model, batch = small(), CALIBRATION[0][:4]
    with protect(model, CALIBRATION, "ranger", recovery=("zero",)) as guarded, torch.no_grad():
        fault = Transient(model[0], runs=10, value=1e6)
        output = guarded(batch)
        fault.hook.remove()
        changed = model[0](batch)
        changed[1].view(-1)[2] = 0
        torch.testing.assert_close(output, model[1:](changed))
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("zero", True)


def test_outputs_are_limited_to_the_range_of_clean_samples():
    model, batch = small(), inputs(4, 99)
    with protect(model, CALIBRATION, "ranger", recovery=("clamp",)) as guarded, torch.no_grad():
        fault = Transient(model[0], runs=10, value=torch.nan)
        output = guarded(batch)
        fault.hook.remove()
        assert output.isfinite().all()
        assert guarded.verdict.action == "clamp"
        clean = model(batch)
        assert torch.equal(output[[0, 2, 3]], clean[[0, 2, 3]])


def test_what_cannot_be_recovered_is_marked():
    model = small()
    with protect(model, CALIBRATION, recovery=("rerun",), mode="early") as guarded, torch.no_grad():
        fault = Transient(model[0], runs=10)
        assert guarded(inputs(4)).shape == (4, 10)
        fault.hook.remove()
    assert (guarded.verdict.action, guarded.verdict.recovered) == ("rerun", False)


@pytest.mark.parametrize("rule", RULES)
def test_a_profile_is_the_same_after_a_file(rule, tmp_path):
    model = small()
    profile = make_profile(model, CALIBRATION, rule)
    profile.save(tmp_path / "p.safetensors")
    again = load_profile(tmp_path / "p.safetensors", model)
    assert (again.detector.name, again.rate, again.threshold) == (rule, 0.01, profile.threshold)
    with torch.no_grad(), ProtectedModel(model, again) as guarded, ProtectedModel(model, profile) as other:
        batch = inputs(8, 5)
        assert guarded(batch) is not None
        assert other(batch) is not None
        np.testing.assert_array_equal(guarded.verdict.margins, other.verdict.margins)


def test_what_does_not_fit_is_refused(tmp_path):
    model = small()
    profile = make_profile(model, CALIBRATION)
    with pytest.raises(UsageError, match="weights in float32, this one has float64"):
        ProtectedModel(small().double(), profile)
    other = small()
    other[0].weight.data[0] += 1
    with pytest.raises(UsageError, match="model with other weights"):
        ProtectedModel(other, profile)
    with pytest.raises(UsageError, match="unknown mode 'late'"):
        ProtectedModel(model, profile, "late")
    with pytest.raises(UsageError, match="unknown recovery 'pray'"):
        ProtectedModel(model, profile, "end", ("pray",))
    with pytest.raises(UsageError, match="needs mode 'early'"):
        ProtectedModel(model, profile, "end", ("layer",))
    with pytest.raises(
        UsageError, match=r"600 clean samples in 6 batches; a rate of false alarms of 0.0001 needs 9,999 .* about 24,99"
    ):
        make_profile(model, CALIBRATION, rate=1e-4)
    with pytest.raises(UsageError, match="unknown layer 'head'"):
        make_profile(model, CALIBRATION, layers=("head",))
    with pytest.raises(UsageError, match="layer 0 gives values that are not finite"):
        make_profile(model, [*CALIBRATION, torch.full((2, 1, 8, 8), torch.inf)])
    with pytest.raises(UsageError, match="can read no layer of the model"):
        make_profile(nn.Identity(), [torch.zeros(200, dtype=torch.int64)] * 3)
    with pytest.raises(UsageError, match="returned dict without any tensor"):
        make_profile(NoTensor(), CALIBRATION)
    with pytest.raises(UsageError, match=r"is compiled \(OptimizedModule\)"):
        make_profile(torch.compile(model, backend="eager"), CALIBRATION)
    with pytest.raises(UsageError, match="unknown detector 'dr-who'.*did you mean"):
        make_profile(model, CALIBRATION, "dr-who")
    for no_batches in (None, "model.profile", CALIBRATION[0]):
        with pytest.raises(UsageError, match=r"expected a list of batches of clean inputs, or a profile"):
            protect(model, no_batches)
    with pytest.raises(UsageError, match="unknown layer 'head'"):
        protect(model, CALIBRATION, "weight-integrity", layers="head")
    with pytest.raises(UsageError, match="is of type function; expected a torch.nn.Module"):
        protect(lambda x: x, CALIBRATION)
    for wrong in (["dr-dna"], None):
        with pytest.raises(UsageError, match="detector is of type .*; expected a text"):
            protect(model, CALIBRATION, wrong)
    with pytest.raises(UsageError, match="bins is -3; expected a number from 1"):
        protect(model, CALIBRATION, "dr-dna:bins=-3")
    for rate in (0, float("nan")):
        with pytest.raises(UsageError, match="expected a share of samples between 0 and 1"):
            protect(model, CALIBRATION, rate=rate)
    with pytest.raises(UsageError, match="recovery is of type NoneType"):
        protect(model, CALIBRATION, recovery=None)
    with pytest.raises(UsageError, match=r"module '1' \(BatchNorm2d\) is in training mode; call model.eval\(\) first"):
        protect(small().train(), CALIBRATION)
    with pytest.raises(UsageError, match="device 'cuda9'"):
        ProtectedModel(model, profile, recovery="elsewhere", elsewhere="cuda9")
    with pytest.raises(UsageError, match="needs somewhere to run"):
        ProtectedModel(model, profile, recovery="elsewhere")
    with pytest.raises(
        UsageError, match=r"elsewhere is of type int; expected a function .*, or a device like 'cuda:1'"
    ):
        ProtectedModel(model, profile, recovery="elsewhere", elsewhere=3)
    for unused in (3, small()):
        with pytest.raises(UsageError, match=r"elsewhere is given, but recovery is \('rerun',\); .*add it, or leave"):
            ProtectedModel(model, profile, recovery="rerun", elsewhere=unused)
    with pytest.raises(UsageError, match="knows nothing of decoding"):
        ProtectedModel(model, profile).generate()
    with pytest.raises(UsageError, match="need ranges of layers"):
        protect(model, CALIBRATION, "weight-integrity", recovery="clamp")
    (tmp_path / "x").write_bytes(b"no profile")
    with pytest.raises(UsageError, match="is not an activation profile"):
        load_profile(tmp_path / "x", model)


@pytest.mark.parametrize(
    "detector", ["dr-dna", "weight-integrity", "golden-test", "duplication", "dr-dna+weight-integrity"]
)
def test_clean_batches_that_are_not_clean_are_refused(detector):
    model = small()
    spoilt = inputs(100)
    spoilt[7, 0, 2, 3] = torch.nan
    with pytest.raises(UsageError, match="clean batch 2 has NaN"):
        make_profile(model, [inputs(100), spoilt, *CALIBRATION], detector)
    with pytest.raises(UsageError, match=r"1 batch of 600 clean samples; expected 2 or more, .* several batches"):
        make_profile(model, [inputs(600)], detector)
    with pytest.raises(
        UsageError, match=r"50 clean samples in 1 batch; a rate of false alarms of 0.01 needs 99 .* about 249"
    ):
        make_profile(model, [inputs(50)], detector)
    labels = torch.zeros(100, dtype=torch.int64)
    with pytest.raises(
        UsageError,
        match=r"raised TypeError for a clean batch of float32\[\d+, 1, 8, 8\], int64\[\d+\] .*without labels",
    ):
        make_profile(model, [(batch, labels) for batch in CALIBRATION], detector)
    with pytest.raises(UsageError, match=r"raised RuntimeError for a clean batch of float32\[\d+, 2, 8, 8\]") as caught:
        make_profile(model, [torch.zeros(100, 2, 8, 8)] * 6, detector)
    assert "\n" not in str(caught.value)


def test_errors_of_the_model_in_service_stay_its_own():
    model = small()
    with protect(model, CALIBRATION, "golden-test") as guarded, torch.no_grad():
        guarded(inputs(2))
        model[5] = nn.Linear(3, 4)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            guarded(inputs(2))


def test_a_model_that_is_protected_already_can_be_copied():
    model, batch = small(), inputs(4, 99)
    with protect(model, CALIBRATION) as first, torch.no_grad():
        with protect(model, CALIBRATION, "duplication", recovery="elsewhere", elsewhere="cpu") as second:
            clean = model(batch)
            fault = Transient(model[0])
            assert torch.equal(second(batch), clean)
            assert second.verdict.flagged.any()
            fault.hook.remove()
        assert torch.equal(first(batch), clean)
        assert not first.verdict.flagged.any()


def test_attributes_are_those_of_the_model():
    model = small()
    guarded = unsilent.protection.protect.protect(model, CALIBRATION)
    assert guarded.state_dict().keys() == model.state_dict().keys()
    assert not guarded.training
