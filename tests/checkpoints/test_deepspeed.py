"""Folders of DeepSpeed with ZeRO, laid out as version 0.19.8 does: parameters are found in all ranks' partitions."""

from __future__ import annotations

import enum
import math
import os
import sys
import types
import zipfile

import pytest
import torch

from checkpoint_checks import (
    DTYPES,
    assert_cut_files_are_refused,
    assert_damage_raises_usage_errors,
    assert_one_word_differs,
    bits_of,
    content,
    flipped,
    refused,
    words,
)
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.comparing import SAME, compare

SHAPES = [{"a.weight": (7, 5), "b.weight": (3, 7)}, {"a.bias": (7,), "scale": (), "b.bias": (3,)}]
NAMES = [name for group in SHAPES for name in group]
STATES = ("fp32", "exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    """Classes that its files name."""
    config, scaler = types.ModuleType("deepspeed.config"), types.ModuleType("deepspeed.scaler")

    class Stage(enum.IntEnum):
        optimizer_states = 1
        gradients = 2
        weights = 3

    class LossScaler:
        def __init__(self):
            self.cur_scale = 2.0

    for module, kind in ((config, Stage), (scaler, LossScaler)):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    return types.SimpleNamespace(Stage=Stage, LossScaler=LossScaler)


def values(dtype="float32"):
    """State -> parameter -> values."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    return {s: {n: (50 * torch.randn(shape)).to(kind) for g in SHAPES for n, shape in g.items()} for s in STATES}


def filled(vector, unit):
    """A vector with zeros behind it, to a multiple of a length."""
    return torch.cat([vector, torch.zeros(-len(vector) % unit).to(vector.dtype)])


def partitions_2(state, ranks, fill):
    """[rank][group] as stages 1 and 2 divide a state."""
    result = [[] for _ in range(ranks)]
    for group in SHAPES:
        parts = [filled(state[name].reshape(-1), fill) for name in group]
        for rank, part in enumerate(filled(torch.cat(parts), 2 * ranks).chunk(ranks)):
            result[rank].append(part.clone())
    return result


def partitions_3(state, ranks):
    """[rank][group] as stage 3 divides a state."""
    parts = [[filled(state[name].reshape(-1), ranks).chunk(ranks) for name in group] for group in SHAPES]
    return [[torch.cat([part[rank] for part in group]) for group in parts] for rank in range(ranks)]


def save(folder, kinds, stage=2, ranks=2, dtype="float32", elastic=False, bf16=False, fill=1):
    """Write a folder; ``fill``: every parameter is filled to a multiple of it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = values(dtype)
    divided = {
        key: partitions_3(state[key], ranks) if stage == 3 else partitions_2(state[key], ranks, fill) for key in STATES
    }
    for name, content_of_file in model_files(state["fp32"], stage, ranks):
        torch.save(content_of_file, folder / name)
    for rank in range(ranks):
        parts = {key: divided[key][rank] for key in STATES}
        zero = {"loss_scaler": kinds.LossScaler(), "zero_stage": kinds.Stage(stage)}
        if stage == 3:
            zero |= {
                "partition_count": ranks,
                "optimizer_state_dict": numbered(parts),
                "fp32_flat_groups": parts["fp32"],
            }
        else:
            behind = [
                fill_behind(group, g, divided["fp32"], fill) if rank == ranks - 1 else 0
                for g, group in enumerate(SHAPES)
            ]
            lean = {key: [part[: len(part) - behind[g]] for g, part in enumerate(parts[key])] for key in STATES}
            zero |= {
                "partition_count": [ranks] * len(SHAPES),
                "base_optimizer_state": list(numbered(lean)["state"].values()) if elastic else numbered(parts),
                "single_partition_of_fp32_groups": lean["fp32"],
                "param_alignment_paddings": [
                    [-math.prod(shape) % fill for shape in group.values()] for group in SHAPES
                ],
            }
        name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": zero, "ds_version": "0.19.8"}, folder / name)
    return folder


def fill_behind(group, g, masters, fill):
    """Elements of fill at the end of the last partition of a group."""
    return sum(part[g].numel() for part in masters) - sum(
        -(-math.prod(shape) // fill) * fill for shape in group.values()
    )


def numbered(parts):
    """The state of an optimizer with one flat parameter per group."""
    groups = {g: {"step": torch.tensor(3.0)} | {key: parts[key][g] for key in STATES[1:]} for g in range(len(SHAPES))}
    return {"state": groups, "param_groups": [{"lr": 0.01, "params": [0]}, {"lr": 0.02, "params": [1]}]}


def model_files(weights, stage, ranks):
    model = {
        "module": {name: tensor.bfloat16() for name, tensor in weights.items()} | {"mean": torch.arange(3.0)},
        "buffer_names": ["mean"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES],
        "lr_scheduler": {"last_epoch": 4},
        "global_steps": 12,
    }
    if stage < 3:
        return [("mp_rank_00_model_states.pt", model)]
    empty = {name: torch.zeros(0) for name in (*NAMES, "frozen")} | {"mean": torch.arange(3.0)}
    model |= {"module": empty, "frozen_param_shapes": {"frozen": torch.Size((3, 3))}}
    frozen = filled(torch.arange(9.0), ranks).chunk(ranks)
    return [
        (
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            model | {"frozen_param_fragments": {"frozen": part.clone()}},
        )
        for rank, part in enumerate(frozen)
    ]


def joined(folder, state, ranks, stage, fill=1):
    """The parameters of a state, put together from what torch.load reads."""
    files = sorted(folder.glob("*optim_states.pt"))
    zero = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    result = {}
    for g, group in enumerate(SHAPES):
        if stage == 3:
            parts = [
                z["fp32_flat_groups"][g] if state == "fp32" else z["optimizer_state_dict"]["state"][g][state]
                for z in zero
            ]
            begin = 0
            for name, shape in group.items():
                part = math.ceil(math.prod(shape) / ranks)
                whole = torch.cat([each[begin : begin + part] for each in parts])
                result[name] = whole[: math.prod(shape)].reshape(shape)
                begin += part
        else:
            master = [z["single_partition_of_fp32_groups"][g] for z in zero]
            base = [z["base_optimizer_state"] for z in zero]
            whole = torch.cat(master if state == "fp32" else [b["state"][g][state] for b in base])
            begin = 0
            for name, shape in group.items():
                result[name] = whole[begin : begin + math.prod(shape)].reshape(shape)
                begin += math.ceil(math.prod(shape) / fill) * fill
    return result


LAYOUTS = [
    {"stage": 2},
    {"stage": 1, "ranks": 3, "bf16": True},
    {"stage": 1, "ranks": 1},
    {"stage": 2, "ranks": 3, "elastic": True},
    {"stage": 2, "fill": 4},
    {"stage": 3},
    {"stage": 3, "ranks": 3, "bf16": True},
]


class TestReading:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_parameters_of_all_states(self, tmp_path, deepspeed, layout):
        folder = save(tmp_path / "step", deepspeed, **layout)
        state = values()
        with Checkpoint(folder) as checkpoint:
            for key in STATES:
                for name in NAMES:
                    tensor = checkpoint.tensor(f"optimizer/{name}/{key}")
                    assert tensor.shape == state[key][name].shape
                    assert b"".join(checkpoint.content(tensor)) == words(state[key][name]).tobytes(), tensor.name
            assert not any("flat" in t or "single_partition" in t for t in checkpoint.tensors)
            assert checkpoint.tensor("scheduler/last_epoch").value == 4
            assert checkpoint.tensor("optimizer/rank_0/loss_scaler/cur_scale").value == 2.0
        if layout["stage"] < 3:
            assert content(folder, "model/a.weight") == words(state["fp32"]["a.weight"].bfloat16()).tobytes()
        else:
            assert content(folder, "model/frozen") == words(torch.arange(9.0)).tobytes()

    @pytest.mark.parametrize("by_name", [False, True])
    def test_a_stage_is_read_as_every_python_writes_it(self, tmp_path, deepspeed, monkeypatch, by_name):
        def reduce(stage, _):
            return (getattr, (type(stage), stage.name)) if by_name else (type(stage), (int(stage),))

        monkeypatch.setattr(deepspeed.Stage, "__reduce_ex__", reduce)
        folder = save(tmp_path / "step", deepspeed, stage=3)
        assert content(folder, "optimizer/a.weight/fp32") == words(values()["fp32"]["a.weight"]).tobytes()

    def test_names_are_those_of_torch_save(self, tmp_path, deepspeed):
        folder = save(tmp_path / "step", deepspeed)
        state = values()
        moments = {i: {key: state[key][name] for key in STATES[1:]} for i, name in enumerate(NAMES)}
        optimizer = {"state": moments, "param_groups": [{"params": list(range(len(NAMES)))}]}
        torch.save({"model": state["fp32"], "optimizer": optimizer}, tmp_path / "file.pt")
        with Checkpoint(folder) as zero, Checkpoint(tmp_path / "file.pt") as plain:
            assert set(plain.tensors) <= set(zero.tensors)

    def test_the_folder_above(self, tmp_path, deepspeed):
        save(tmp_path / "run/step12", deepspeed)
        (tmp_path / "run/latest").write_text("step12\n")
        (tmp_path / "run/zero_to_fp32.py").write_text("")
        assert content(tmp_path / "run", "optimizer/a.weight/fp32") == words(values()["fp32"]["a.weight"]).tobytes()
        with flipped(tmp_path / "run", "optimizer/a.weight/fp32", 20, 3, "fixed"):
            new = joined(tmp_path / "run/step12", "fp32", 2, 2)["a.weight"]
            assert_one_word_differs(new, values()["fp32"]["a.weight"], 20, 3)

    def test_groups_of_many_parameters(self, tmp_path, deepspeed, monkeypatch):
        monkeypatch.setattr(sys.modules[__name__], "SHAPES", [{f"p{i}": (3,) for i in range(100)}])
        folder = save(tmp_path / "step", deepspeed, fill=4)
        assert content(folder, "optimizer/p77/fp32") == words(values()["fp32"]["p77"]).tobytes()

    def test_without_zero(self, tmp_path):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        (tmp_path / "step").mkdir()
        state = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "step/mp_rank_00_model_states.pt")
        assert (
            content(tmp_path / "step", "optimizer/weight/exp_avg")
            == words(optimizer.state[model.weight]["exp_avg"]).tobytes()
        )

    def test_experts_and_layers_of_a_pipeline_have_the_names_of_the_whole_model(self, tmp_path):
        experts = "0.moe.deepspeed_moe.experts.deepspeed_experts"
        whole = {"0.gate": torch.ones(2), f"{experts}.0.w": torch.zeros(3), f"{experts}.1.w": torch.ones(3)}
        (tmp_path / "experts").mkdir()
        torch.save({"module": {"0.gate": whole["0.gate"]}}, tmp_path / "experts/mp_rank_00_model_states.pt")
        for expert in range(2):
            name, file = f"{experts}.{expert}.w", f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"
            torch.save({name: whole[name]}, tmp_path / "experts" / file)
        torch.save(whole, tmp_path / "whole.pt")
        layers = {"0.weight": torch.ones(2), "11.weight": torch.zeros(3), "11.norm.weight": torch.ones(4)}
        (tmp_path / "layers").mkdir()
        torch.save({"module": None}, tmp_path / "layers/mp_rank_00_model_states.pt")
        torch.save({"weight": layers["0.weight"]}, tmp_path / "layers/layer_00-model_states.pt")
        parts = {name.removeprefix("11."): tensor for name, tensor in layers.items() if name.startswith("11.")}
        torch.save(parts, tmp_path / "layers/layer_11-model_states.pt")
        torch.save(layers, tmp_path / "layers.pt")
        for folder, file in (("experts", "whole.pt"), ("layers", "layers.pt")):
            with Checkpoint(tmp_path / folder) as one, Checkpoint(tmp_path / file) as other:
                assert sorted(one.tensors) == sorted(other.tensors)
                assert {d.status for d in compare(one, other)} == {SAME}

    def test_layers_of_several_model_parallel_ranks_are_listed_by_file(self, tmp_path):
        for rank in range(2):
            torch.save({"weight": torch.ones(2)}, tmp_path / f"layer_00-model_{rank:02d}-model_states.pt")
        with Checkpoint(tmp_path) as checkpoint:
            files = [f"layer_00-model_{rank:02d}-model_states" for rank in range(2)]
            assert list(checkpoint.tensors) == [f"model/{file}.weight" for file in files]

    @pytest.mark.parametrize("why", ["lengths", "model parallel", "experts", "counts"])
    def test_what_is_not_divided_for_certain_is_listed_as_it_is(self, tmp_path, deepspeed, why):
        folder = save(tmp_path / "step", deepspeed)
        files = sorted(folder.glob("*optim_states.pt"))
        if why == "lengths":
            model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
            model["param_shapes"][0]["a.weight"] = torch.Size((70, 5))
            torch.save(model, folder / "mp_rank_00_model_states.pt")
        elif why == "counts":
            for file in files:
                state = torch.load(file, weights_only=False)
                state["optimizer_state_dict"]["partition_count"] = [2, 1]
                torch.save(state, file)
        else:
            new = {
                "model parallel": files[0].name.replace("mp_rank_00", "mp_rank_01"),
                "experts": "expp_rank_0_mp_rank_00_optim_states.pt",
            }[why]
            (folder / new).write_bytes(files[0].read_bytes())
        with Checkpoint(folder) as checkpoint:
            assert "optimizer/a.weight/fp32" not in checkpoint.tensors
            flat = [t for t in checkpoint.tensors.values() if "single_partition_of_fp32_groups/0" in t.name]
            assert len(flat) >= 2
            assert all(t.shape == (28,) and not t.reason_not_editable for t in flat)


class TestEditing:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_bit_changes_one_element(self, tmp_path, deepspeed, dtype):
        folder = save(tmp_path / "step", deepspeed, dtype=dtype)
        old = {key: joined(folder, key, 2, 2) for key in STATES}
        for (element, bit), checksums in zip(
            zip((0, 30, 34), bits_of(dtype), strict=True), ("stale", "fixed", "fixed"), strict=True
        ):
            with flipped(folder, "optimizer/a.weight/exp_avg", element, bit, checksums):
                new = {key: joined(folder, key, 2, 2) for key in STATES}
                assert_one_word_differs(new["exp_avg"]["a.weight"], old["exp_avg"]["a.weight"], element, bit)
                same = [(k, n) for k in STATES for n in NAMES if (k, n) != ("exp_avg", "a.weight")]
                assert all((words(new[key][name]) == words(old[key][name])).all() for key, name in same)
                bad = [zipfile.ZipFile(file).testzip() for file in folder.iterdir()]
                assert any(bad) == (checksums == "stale")

    @pytest.mark.parametrize("layout", [each for each in LAYOUTS if not each.get("elastic")], ids=str)
    def test_first_and_last_elements_in_every_layout(self, tmp_path, deepspeed, layout):
        folder = save(tmp_path / "step", deepspeed, **layout)
        how = (layout.get("ranks", 2), layout["stage"], layout.get("fill", 1))
        for key, name in (("fp32", "b.weight"), ("exp_avg_sq", "b.bias"), ("fp32", "scale")):
            old = values()[key][name]
            for element in {0, old.numel() - 1}:
                with flipped(folder, f"optimizer/{name}/{key}", element, 30, "fixed"):
                    assert_one_word_differs(joined(folder, key, *how)[name], old, element, 30)


class TestHostile:
    def test_missing_ranks(self, tmp_path, deepspeed):
        folder = save(tmp_path / "step", deepspeed)
        (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        refused(folder, "of 1 ranks, but was saved by 2; copy all files")
        (folder / "mp_rank_00_model_states.pt").unlink()
        refused(folder, "mp_rank_00_model_states.pt")

    @pytest.mark.parametrize("tag", ["../other", "/etc", "", "absent", "a\0b", "x" * 500, "x" * 5000])
    def test_a_latest_file_of_another_program(self, tmp_path, deepspeed, tag):
        save(tmp_path / "other", deepspeed)
        (tmp_path / "run").mkdir()
        (tmp_path / "run/latest").write_text(tag)
        refused(tmp_path / "run", "no folder of a known checkpoint format")

    def test_shapes_that_are_none(self, tmp_path, deepspeed):
        for shapes in ([{"a": (-1, 2)}], [{"a": "text"}], [{"a": (2**62, 2)}]):
            folder = save(tmp_path / "step", deepspeed)
            model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
            torch.save(model | {"param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")
            refused(folder, "param_shapes cannot be read")

    def test_nothing_is_unpickled(self, tmp_path, deepspeed):
        class Bomb:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/executed",)

        folder = save(tmp_path / "step", deepspeed)
        torch.save({"optimizer_state_dict": Bomb(), "module": Bomb()}, folder / "mp_rank_00_model_states.pt")
        with Checkpoint(folder) as checkpoint:
            assert "optimizer/rank_0/clip" not in checkpoint.tensors
        assert not (tmp_path / "executed").exists()

    @pytest.mark.parametrize("stage", [2, 3])
    def test_cut_off_anywhere_or_flipped(self, tmp_path, deepspeed, stage):
        folder = save(tmp_path / "step", deepspeed, stage=stage)
        for file in sorted(folder.iterdir()):
            assert_cut_files_are_refused(file, folder, 20)
            assert_damage_raises_usage_errors(file, folder, 40)
