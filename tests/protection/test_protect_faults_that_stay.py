"""Protected models whose fault stays, or whose call is not the one that was calibrated: no alarm is lost."""

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.protection.profile import load_profile, make_profile
from unsilent.protection.protect import ProtectedModel, protect


def linear(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)).eval()


def inputs(samples, seed=0):
    return torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))


CALIBRATION = [inputs(50, seed) for seed in range(10)]


def flip(tensor, row, column, bit=30):
    """Flip one bit of a float32 matrix in place."""
    with torch.no_grad():
        tensor.view(torch.int32)[row, column] ^= 1 << bit


def calls(guarded, count, batch):
    """Whether each call is flagged, its action, whether it counts as recovered, and the answers."""
    verdicts, answers = [], []
    with torch.no_grad():
        for _ in range(count):
            answers.append(guarded(batch))
            verdict = guarded.verdict
            verdicts.append((bool(verdict.flagged.any()), verdict.action, verdict.recovered))
    return verdicts, answers


def test_a_fault_that_one_slice_shows_is_not_recovered_by_the_next_slice():
    model, batch = linear(4096), inputs(4)
    with protect(model, CALIBRATION, "weight-integrity:slices=8", recovery="rerun") as guarded:
        flip(model[0].weight, 100, 3)
        verdicts, _ = calls(guarded, 24, batch)
    shown = [number for number, verdict in enumerate(verdicts) if verdict[0]]
    assert shown == [shown[0], shown[0] + 8, shown[0] + 16]  # each slice has its turn
    assert {verdicts[number] for number in shown} == {(True, "rerun", False)}


def test_a_fault_that_one_slice_shows_is_repaired():
    model, batch = linear(4096), inputs(4)
    with protect(model, CALIBRATION, "weight-integrity:slices=8", recovery=("rerun", "repair")) as guarded:
        right = model(batch)
        flip(model[0].weight, 100, 3)
        verdicts, answers = calls(guarded, 9, batch)
    shown = next(number for number, verdict in enumerate(verdicts) if verdict[0])
    assert verdicts[shown] == (True, "repair", True)
    assert all(torch.equal(answer, right) for answer in answers[shown:])
    assert not any(verdict[0] for verdict in verdicts[shown + 1 :])


@pytest.mark.parametrize(("recovery", "ending"), [("rerun", ("rerun", False)), (("rerun", "repair"), ("repair", True))])
def test_a_golden_test_is_run_again_after_its_alarm(recovery, ending):
    model, batch = linear(), inputs(4)
    with protect(model, CALIBRATION, "golden-test:every=3", recovery=recovery) as guarded:
        flip(model[0].weight, 10, 3)
        verdicts, _ = calls(guarded, 7, batch)
    shown = [number for number, verdict in enumerate(verdicts) if verdict[0]]
    assert verdicts[shown[0]] == (True, *ending)
    if not ending[1]:
        assert shown == list(range(shown[0], 7, 3))


class Scaled(nn.Module):
    """Multiplies its input by a second one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, scale=None):
        return self.head(torch.relu(self.body(x if scale is None else x * scale)))


@pytest.mark.parametrize("mode", ["end", "early"])
@pytest.mark.parametrize("detector", ["dr-dna", "ranger+weight-integrity"])
def test_a_call_of_which_no_layer_is_read_is_refused(detector, mode):
    with protect(Scaled().eval(), CALIBRATION, detector, mode=mode) as guarded, torch.no_grad():
        with pytest.raises(UsageError, match=r"read none of its \d layers .* 16 samples"):
            guarded(torch.full((16,), 1e20))
        with pytest.raises(UsageError, match=r"read none of its \d layers .* 16 samples"):
            guarded(scale=torch.ones(16), x=inputs(8) * 1e6)
        guarded(x=inputs(8) * 1e6, scale=torch.ones(16))
        assert guarded.verdict.flagged.all()
        assert guarded(inputs(0)).shape == (0, 4)


def test_a_closed_guard_answers_no_longer():
    with protect(linear(), CALIBRATION) as guarded:
        guarded(inputs(2))
    with pytest.raises(UsageError, match=r"the guard is closed"):
        guarded(inputs(2))


def test_a_model_compiled_later_is_refused():
    model = linear()
    with protect(model, CALIBRATION) as guarded:
        model.compile(backend="eager")
        with pytest.raises(UsageError, match="the model is compiled"):
            guarded(inputs(2))


@pytest.mark.parametrize("replacement", ["parameter", "module", "type", "removed"])
def test_weights_that_checksums_were_not_taken_of_are_refused(replacement):
    model = linear()
    with protect(model, CALIBRATION, "weight-integrity", recovery="repair") as guarded, torch.no_grad():
        guarded(inputs(2))
        if replacement == "parameter":
            model[0].weight = nn.Parameter(model[0].weight.clone())
        elif replacement == "module":
            model[0] = nn.Linear(16, 64)
        elif replacement == "type":
            model.double()
        else:
            model[0].bias = None
        with pytest.raises(UsageError, match=r"^0\.(weight|bias) was replaced, .*; protect the model again$"):
            guarded(inputs(2))


def test_weights_replaced_before_a_profile_is_used_are_refused():
    model = linear()
    profile = make_profile(model, CALIBRATION, "weight-integrity")
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    with pytest.raises(UsageError, match=r"2\.weight was replaced"):
        ProtectedModel(model, profile)(inputs(2))


RUNS = {
    "softmax": (lambda model, batch: model(batch).softmax(-1), CALIBRATION, "gives another answer to the stored input"),
    "named": (
        lambda model, batch: model(batch["x"]),
        [{"x": batch} for batch in CALIBRATION],
        "raised TypeError: .*unexpected keyword argument",
    ),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("detector", ["golden-test", "dr-dna+golden-test:every=3"])
def test_a_stored_golden_test_needs_the_run_that_it_was_made_with(name, detector, tmp_path):
    run, batches, message = RUNS[name]
    model, file = linear(), tmp_path / "golden.profile"
    make_profile(model, batches, detector, run=run).save(file)
    with pytest.raises(
        UsageError, match=rf"golden.profile: golden-test.*: the model {message}.*; give load_profile the run="
    ):
        load_profile(file, model)
    with ProtectedModel(model, load_profile(file, model, run)) as guarded, torch.no_grad():
        guarded(CALIBRATION[0])
        assert not guarded.verdict.flagged.any()
        flip(model[0].weight, 10, 3)
        guarded(CALIBRATION[0][:4])
        assert guarded.verdict.flagged.any()


class Buffered(nn.Module):
    """Changes a buffer in each call."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.kind = nn.Linear(16, 64), nn.Linear(64, 4), kind
        self.register_buffer("memory", torch.zeros(64, 16) if kind == "cache" else torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        if self.kind == "cache":
            self.memory[: len(x)] = x
        elif self.kind == "counter":
            self.memory += 1
        else:
            self.memory = self.memory + 1
        return self.head(torch.relu(self.body(x)))


@pytest.mark.parametrize("kind", ["cache", "counter", "replaced"])
@pytest.mark.parametrize("detector", ["weight-integrity", "weight-integrity:slices=64", "dr-dna+weight-integrity"])
def test_buffers_that_change_in_clean_calls_are_refused(kind, detector):
    with pytest.raises(UsageError, match="^memory changed while the model answered clean batches"):
        protect(Buffered(kind).eval(), CALIBRATION, detector)
    assert protect(Buffered(kind).eval(), CALIBRATION, "dr-dna")(inputs(2)).shape == (2, 4)


class Decoder(nn.Module):
    """Adds a token in each pass; its state is that of the pass before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(20, 32), nn.Linear(32, 32), nn.Linear(32, 20)

    def forward(self, ids, state=None):
        new = self.embedding(ids).mean(1) if state is None else (state + self.embedding(ids[:, -1])) / 2
        new = torch.relu(self.body(new)) + new
        return self.head(new), new

    def generate(self, ids, tokens=5):
        state = None
        for _ in range(tokens):
            scores, state = self(ids, state)
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
        return ids


def prompts(seed):
    return torch.randint(0, 20, (50, 6), generator=torch.Generator().manual_seed(seed))


def test_more_passes_than_in_calibration_are_warned_of(tmp_path):
    model, file = Decoder().eval(), tmp_path / "decoder.profile"
    batches = [prompts(seed) for seed in range(10)]
    profile = make_profile(model, batches, run=lambda model, ids: model.generate(ids))
    assert profile.passes == 5
    profile.save(file)
    with ProtectedModel(model, load_profile(file, model)) as guarded, torch.no_grad():
        guarded.generate(prompts(20), tokens=5)  # a warning would be an error here
        with pytest.warns(
            UserWarning, match=r"6 forward passes, but no call of the calibration had more than 5"
        ) as caught:
            answer = guarded.generate(prompts(20), tokens=6)
        assert caught[0].filename == __file__
        assert torch.equal(answer, model.generate(prompts(20), tokens=6))
    with protect(model, batches, "weight-integrity", run=lambda model, ids: model.generate(ids)) as guarded:
        guarded.generate(prompts(20), tokens=6)  # its margin does not grow with passes
