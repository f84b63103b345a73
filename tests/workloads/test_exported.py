"""Programs of torch.export as workloads: the same sites as the model they were made of, and one line for what does not fit."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

from conftest import in_process
from exactness.faults import Trial, draw
from exactness.harness import Comparison, Reference, checked, compare_each
from unsilent.basics.errors import UsageError
from unsilent.engine import make_engine
from unsilent.engine.device_placement import place
from unsilent.outcomes.tensors import leaves
from unsilent.sites.targets import default_components
from unsilent.workloads import Workload, load

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Holds a constant of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.offset = torch.linspace(-1, 1, 8)

    def forward(self, x):
        return self.drop(self.linear(x).relu() + self.offset)


class Net(nn.Module):
    """Tied weights, buffers of both kinds, constants, one module that is called twice, another that is not used."""

    def __init__(self):
        super().__init__()
        self.emb, self.conv, self.norm = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare = nn.Linear(2, 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(8), persistent=False)
        self.free = nn.Parameter(torch.randn(8))

    def forward(self, ids):
        y = self.norm(self.conv(self.emb(ids).transpose(1, 2))).mean(2)
        for block in (*self.blocks, self.blocks[0]):
            y = block(y)
        return self.head(y * self.scale * self.hidden + self.free + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))


class Several(nn.Module):
    """Nested inputs, one that may be left out, an output that is a dict; a type and a device are written into it."""

    def __init__(self):
        super().__init__()
        self.one, self.lstm = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x, pair, scale=None, *, gain):
        y = self.one(x + pair["a"][0]) * gain + torch.arange(4)
        y, _ = self.lstm(y[:, None] if scale is None else y[:, None] * scale)
        return {"extra": torch.arange(3), "logits": y[:, 0].float()}


class Branches(nn.Module):
    """Chooses by what it computes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x).relu(), (x,))


class Regions(nn.Module):
    """Parts under other settings, which export puts into graphs of their own, and a loop."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        with torch.no_grad():
            y = self.one(x) + torch.arange(4)
            with torch.autocast("cpu", enabled=False):
                y = self.two(y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.three(y)
            with torch.autocast("cpu", enabled=False):
                z = self.two(z.float())
        return while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, self.four(v).tanh()), (torch.tensor(0), z + y))[1]


class Attention(nn.Module):
    """A transformer block."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        return self.out(self.layer(x)[:, -1])


def made(kind):
    torch.manual_seed(3)
    return kind().eval()


def tokens(n=4):
    return torch.randint(0, 11, (n, 6), generator=torch.Generator().manual_seed(n))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pair(n=5):
    return {"x": numbers(n, 3), "pair": {"a": [numbers(n, 3)]}, "gain": numbers(n, 1)}


PAIR = pair()
BATCH = Dim("n", min=2, max=64)
PROGRAMS = {
    "net": (Net, (tokens(),), {}, None, [tokens(), tokens().flip(0)]),
    "free": (Net, (tokens(),), {}, {"ids": {0: BATCH}}, [tokens(4), tokens(7)]),
    "several": (Several, (PAIR["x"], PAIR["pair"], None), {"gain": PAIR["gain"]}, None, [PAIR]),
    "branches": (Branches, (numbers(3, 4),), {}, None, [numbers(3, 4), -numbers(3, 4)]),
    "regions": (Regions, (numbers(3, 4),), {}, None, [numbers(3, 4), -numbers(3, 4)]),
    "attention": (Attention, (numbers(3, 6, 16),), {}, None, [numbers(3, 6, 16)]),
}


def export(path, model, args, kwargs=None, shapes=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model, args, kwargs or {}, dynamic_shapes=shapes), path)
    return str(path)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Folder of the programs, each in a folder of its own with its inputs."""
    folder = tmp_path_factory.mktemp("programs")
    for name, (kind, args, kwargs, shapes, batches) in PROGRAMS.items():
        (folder / name).mkdir()
        export(folder / name / "model.pt2", made(kind), args, kwargs, shapes)
        torch.save(batches, folder / name / "inputs.pt")
    return folder


def opened(programs, name, **more):
    return load(str(programs / name / "model.pt2"), **more)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_parameters_and_answers_of_its_model(programs, name, capfd):
    kind, args, kwargs, _, _ = PROGRAMS[name]
    model, workload = made(kind), opened(programs, name)
    program = workload.model()
    assert not any(m.training for m in program.modules())
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(n for n, _ in program.named_parameters(remove_duplicate=False)) == sorted(names)
    for key, value in model.state_dict().items():
        assert torch.equal(program.state_dict()[key], value)
    with torch.no_grad():
        mine, theirs = program(*args, **kwargs), model(*args, **kwargs)
    mine, theirs = (v["logits"] if isinstance(v, dict) else v for v in (mine, theirs))
    torch.testing.assert_close(mine, theirs)
    assert json.loads(json.dumps(workload.info)) == workload.info
    assert capfd.readouterr() == ("", "")


def test_everything_that_the_program_stores_is_a_site(programs):
    engine = make_engine(opened(programs, "net"))
    model = made(Net)
    original = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
    assert original <= set(engine.parameters.sites)
    lifted = set(engine.parameters.sites) - original
    assert {"blocks.0.offset", "blocks.1.offset"} < lifted
    assert len(lifted) == 3, "the literal tensor is a site, and nothing else"
    assert default_components(engine.model).keys() == default_components(model).keys()


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        return self.inner(x)


def test_components_are_those_of_the_model_inside_a_wrapper(tmp_path):
    torch.save(numbers(3, 6, 16), tmp_path / "inputs.pt")
    workload = load(export(tmp_path / "model.pt2", made(Wrapped), (numbers(3, 6, 16),)))
    assert list(default_components(workload.model())) == ["inner.layer", "inner.out"]


def test_operations_go_by_the_modules_they_came_from(programs):
    def names(workload):
        return {r.site for r in make_engine(workload).select_regions(["op:*"])}

    mine, theirs = names(opened(programs, "net")), names(Workload(made(Net), [tokens(), tokens().flip(0)]))
    modules = ("op:emb#", "op:conv#", "op:norm#", "op:blocks.", "op:head#")
    assert {s for s in theirs if s.startswith(modules)} == {s for s in mine if s.startswith(modules)}
    assert "op:blocks.0.linear#addmm.1/fwd/out" in mine


def test_parts_under_other_settings_are_no_parts_of_their_own(programs):
    sites = {r.site for r in make_engine(opened(programs, "regions")).select_regions(["op:*"])}
    assert {"op:one#addmm.0/fwd/out", "op:two#addmm.0/fwd/out"} <= sites
    # Autocast that is on, and a loop, stay what they are; what runs in them is seen all the same.
    assert {"op:submod_1.three#addmm.0/fwd/out", "op:while_loop_body_graph_0#addmm.1/fwd/out"} <= sites


def test_tied_weights_are_one_weight_also_in_a_copy(programs):
    workload = opened(programs, "free")
    engine = make_engine(workload, dtype="float64")
    program = engine.model
    assert program is not workload.model()
    assert program.head.weight is program.emb.weight
    assert next(program.parameters()).dtype == torch.float64
    assert "head.weight" not in engine.parameters.sites
    ids = tokens()
    before = program(ids)
    with torch.no_grad():
        program.emb.weight.zero_()
    assert (program(ids) != before).all(), "the head does not use the weight that is corrupted"
    assert opened(programs, "free").model()(ids).abs().sum() > 0


def test_devices_in_the_code_follow_the_program(programs):
    workload = opened(programs, "several")
    program, batch = workload.model(), workload.batches()[0]
    moved = copy.deepcopy(program).to("meta")(**place(batch, "meta", None))
    assert {leaf.device.type for leaf in leaves(moved)} == {"meta"}
    assert {leaf.device.type for leaf in leaves(program(**batch))} == {"cpu"}
    regions = opened(programs, "regions")
    with pytest.raises(RuntimeError, match="unsupported autocast device_type 'meta'"):
        copy.deepcopy(regions.model()).to("meta")(**place(regions.batches()[0], "meta", None))


def test_a_type_that_is_written_into_the_code_is_told(programs):
    with pytest.raises(
        UsageError, match=r"cannot run in bfloat16, because float32 is hard-coded in it \(zeros\); leave --dtype"
    ):
        make_engine(opened(programs, "several"), dtype="bfloat16")


def test_a_program_that_raises_prints_nothing(programs, capfd):
    program = opened(programs, "net").model()
    with pytest.raises(IndexError):
        program(torch.full((4, 6), 99))
    assert capfd.readouterr() == ("", "")


FORMS = {
    "tensor": (tokens(), 1),
    "dict": ({"ids": tokens()}, 1),
    "list of tensors": ([tokens(), tokens()], 2),
    "tuple of tensors": ((tokens(), tokens()), 2),
    "list of tuples": ([(tokens(),)], 1),
    "list of dicts": ([{"ids": tokens()}] * 3, 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_inputs(programs, tmp_path, form):
    saved, count = FORMS[form]
    torch.save(saved, tmp_path / "in.pt")
    batches = opened(programs, "net", data=str(tmp_path / "in.pt")).batches()
    assert len(batches) == count
    assert all(list(b) == ["ids"] and torch.equal(b["ids"], tokens()) for b in batches)


@pytest.mark.parametrize(
    "saved",
    [
        PAIR,
        [PAIR],
        {**PAIR, "scale": None},
        [(PAIR["x"], PAIR["pair"], PAIR["gain"])],
        [(PAIR["x"], PAIR["pair"], None, PAIR["gain"])],
    ],
)  # fmt: skip
def test_what_is_fixed_may_be_left_out(programs, tmp_path, saved):
    torch.save(saved, tmp_path / "in.pt")
    (batch,) = opened(programs, "several", data=str(tmp_path / "in.pt")).batches()
    assert list(batch) == ["x", "pair", "scale", "gain"]
    assert batch["scale"] is None
    assert torch.equal(batch["gain"], PAIR["gain"])


def test_safetensors_are_inputs_by_name(programs, tmp_path):
    from safetensors.torch import save_file

    save_file({"ids": tokens()}, tmp_path / "in.safetensors")
    (batch,) = opened(programs, "net", data=str(tmp_path / "in.safetensors")).batches()
    assert torch.equal(batch["ids"], tokens())


HOW = r"expected a tensor or a dict of inputs by name \(one batch\), or a list of batches"


@pytest.mark.parametrize(
    ("name", "saved", "said"),
    [
        ("net", tokens(5), r"in.pt, batch 0: 'ids' is int64 \[5, 6\], the program takes int64 \[4, 6\]; .*dynamic_shapes"),
        ("net", [tokens(), tokens()[:, :3]], r"batch 1: 'ids' is int64 \[4, 3\], the program takes int64 \[4, 6\]"),
        ("net", tokens().float(), r"'ids' is float32 \[4, 6\], the program takes int64 \[4, 6\]; give inputs of that dtype$"),
        ("net", tokens()[0], r"'ids' is int64 \[6\], the program takes int64 \[4, 6\]"),
        ("free", tokens(65), r"'ids' is int64 \[65, 6\], the program takes int64 \[2 to 64, 6\]"),
        ("free", tokens()[:, :5], r"'ids' is int64 \[4, 5\], the program takes int64 \[2 to 64, 6\]"),
        ("net", [], r"in.pt holds no batch; " + HOW),
        ("net", "text", r"'ids' is str, the program takes int64 \[4, 6\]; " + HOW),
        ("net", [[1, 2]], r"batch 0: the number of inputs is 2, expected 1; the program takes ids; " + HOW),
        ("net", {"id": tokens()}, r"has 'id', which the program does not take; the program takes ids; " + HOW),
        ("net", {}, r"batch 0 has no 'ids'; the program takes ids; " + HOW),
        ("net", torch.full((4, 6), 99), r"cannot run on batch 0 of its inputs: index out of range"),
        ("several", numbers(5, 3), r"batch 0: the number of inputs is 1, expected 3; .*" + HOW),
        ("several", {**PAIR, "pair": numbers(5, 3)}, r"'pair' is not nested as at export; expected TreeSpec"),
        ("several", {**PAIR, "pair": {"b": [numbers(5, 3)]}}, r"'pair' is not nested as at export"),
        ("several", {**PAIR, "scale": 2.0}, r"'scale' is 2.0, but the program was exported with the constant None; give"),
        ("several", {**PAIR, "scale": numbers(1)}, r"'scale' is .*tensor.*, but the program was exported with the constant None"),
        ("several", {**PAIR, "pair": {"a": [numbers(5, 4)]}}, r"'pair' is float32 \[5, 4\], the program takes float32 \[5, 3\]"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_one_line(programs, tmp_path, name, saved, said, capfd):
    torch.save(saved, tmp_path / "in.pt")
    with pytest.raises(UsageError, match=said) as caught:
        opened(programs, name, data=str(tmp_path / "in.pt"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


class Evil:
    def __reduce__(self):
        return open, ("was-run", "w")


def test_inputs_are_data(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save([tokens(), Evil()], "in.pt")
    Path("text.pt").write_text("these are no tensors")
    with pytest.raises(UsageError, match=r"in.pt is damaged or holds more than tensors; it is not loaded"):
        opened(programs, "net", data="in.pt")
    with pytest.raises(UsageError, match=r"text.pt is (damaged|not a valid inputs file)"):
        opened(programs, "net", data="text.pt")
    with pytest.raises(UsageError, match=r"cannot read gone.pt: No such file"):
        opened(programs, "net", data="gone.pt")
    shutil.copy(programs / "net" / "model.pt2", "alone.pt2")
    with pytest.raises(
        UsageError, match=rf"'alone.pt2' needs inputs: save them with torch.save as inputs.pt in its folder.*{HOW}"
    ):
        load("alone.pt2")
    assert not Path("was-run").exists()


def truncated(path, program):
    path.write_bytes(program.read_bytes()[:-3000])


def without_a_part(path, program):
    path.write_bytes(program.read_bytes().replace(b'"graph_module"', b'"graph_nodule"'))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path, program: path.write_text("no program"), "is not an exported program that torch 2"),
        (lambda path, program: path.touch(), "is not an exported program"),
        (lambda path, program: torch.save({"a": torch.ones(1)}, path), "is not an exported program"),
        (truncated, "is not an exported program"),
        (without_a_part, "is not an exported program"),
        (lambda path, program: None, "cannot read .*bad.pt2: No such file"),
        (lambda path, program: path.mkdir(), "cannot read .*bad.pt2: Is a directory"),
    ],
)
def test_files_that_are_no_programs(programs, tmp_path, make, said, capfd):
    make(tmp_path / "bad.pt2", programs / "net" / "model.pt2")
    with pytest.raises(UsageError, match=said) as caught:
        load(str(tmp_path / "bad.pt2"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_options_it_does_not_have(programs):
    with pytest.raises(UsageError, match="unknown option"):
        opened(programs, "net", options={"batch": "2"})
    with pytest.raises(UsageError, match="leave weights= out"):
        opened(programs, "net", weights="w.pt")


class Training(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.what = nn.Linear(4, 4), kind

    def forward(self, x):
        return self.what(self.linear(x))


def test_a_program_in_training_mode_is_refused(tmp_path):
    torch.save(numbers(5, 4), tmp_path / "inputs.pt")
    with pytest.raises(UsageError, match=r"was exported in training mode \(dropout is on\); export model.eval\(\)"):
        load(export(tmp_path / "dropout.pt2", Training(nn.Dropout(0.5)).train(), (numbers(5, 4),)))
    load(export(tmp_path / "off.pt2", Training(nn.Dropout(0.0)).train(), (numbers(5, 4),)))
    norm = load(export(tmp_path / "norm.pt2", Training(nn.BatchNorm1d(4)).train(), (numbers(5, 4),)))
    with pytest.raises(UsageError, match="changes its own parameters or buffers"):
        make_engine(norm)


class Gives(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.linear, self.rule = nn.Linear(3, 3), rule

    def forward(self, x):
        return self.rule(self.linear(x))


@pytest.mark.parametrize(
    ("rule", "judge"),
    [
        (lambda y: y, "Top1()"),
        (lambda y: {"other": y.sum(1), "logits": y}, "Top1()"),
        (lambda y: (y > 0).long(), "ExactSequence()"),
        (lambda y: y[:, :1], "Tolerance(rtol=0.001, atol=1e-05)"),
        (lambda y: y.sum(1), "Tolerance(rtol=0.001, atol=1e-05)"),
        (lambda y: y[:, None] * y[:, :, None], "Tolerance(rtol=0.001, atol=1e-05)"),
    ],
)
def test_the_judge_follows_from_the_output(tmp_path, rule, judge):
    torch.save(numbers(5, 3), tmp_path / "inputs.pt")
    workload = load(export(tmp_path / "model.pt2", Gives(rule).eval(), (numbers(5, 3),)))
    assert repr(workload.judge) == judge
    make_engine(workload)


def mixed(comparison: Comparison) -> list[Trial]:
    regions = {kind: comparison.regions(kind) for kind in ("param", "op", "input")}
    return [t for kind, found in regions.items() if found for t in draw(found, 10, 20)]


@pytest.fixture(scope="module")
def compared(programs):
    return compare_each({n: Reference(str(programs / n / "model.pt2")) for n in PROGRAMS}, mixed, 20)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_fast_engine_gives_the_bits_of_the_plain_one(compared, name):
    found = checked(compared[name])
    assert found.trials >= 20
    assert (found.engine, found.unrecorded) == ("CachedEngine", ())
    assert found.changed >= found.trials / 3


@pytest.fixture
def here(programs, tmp_path, monkeypatch):
    shutil.copytree(programs / "free", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.claim
def test_from_the_command_line_to_replay(here):
    ask = ("pvf", "model.pt2", "--trials", 6, "--store", "s.sqlite", "--json", "--quiet")
    done = in_process(*ask)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert {r["target"] for r in told["results"] if r["level"] == "component"} >= {"emb", "conv", "blocks", "other"}
    unasked = in_process("replay", "s.sqlite", "emb/x1/3")
    assert unasked.returncode == 2
    assert "used only if the command names them too; add --workload model.pt2" in unasked.stderr
    again = in_process("replay", "s.sqlite", "emb/x1/3", "--workload", "model.pt2")
    assert again.returncode == 0, again.stderr
    assert "ended as stored" in again.stdout
    Path("moved").mkdir()
    for name in ("model.pt2", "inputs.pt"):
        shutil.copy(name, "moved")
    moved = in_process("pvf", "moved/model.pt2", *ask[2:])
    assert moved.returncode == 0, moved.stderr
    # One byte of its own beside what a reader looks at: another file, so another campaign.
    Path("model.pt2").write_bytes(Path("model.pt2").read_bytes() + b"\x00")
    other = in_process(*ask)
    assert other.returncode == 2, other.stderr
    assert "holds another campaign (code changed)" in other.stderr


@pytest.mark.claim
def test_another_judge(here):
    done = in_process(
        "pvf", "model.pt2", "--trials", 2, "--judge", "topk:k=3", "--at", "op:blocks.*", "--json", "--quiet"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["spec"]["judge"] == "topk:k=3"


def test_what_is_wrong_is_one_line_of_the_command(here):
    torch.save(tokens(70), "many.pt")
    for words, said in (
        (("model.pt2", "--data", "many.pt"), "the program takes int64 [2 to 64, 6]"),
        (("model.pt2", "--judge", "next-token"), "does not fit an output of shape"),
    ):
        done = in_process("pvf", *words, "--quiet")
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_the_list_of_workloads_names_programs():
    assert "FILE.pt2" in in_process("workloads").stdout
