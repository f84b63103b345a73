"""Folders of Orbax, with the metadata that version 0.12.8 writes: listed, neither read nor edited."""

from __future__ import annotations

import json

import pytest

from checkpoint_checks import assert_damage_raises_usage_errors, content, flipped, refused
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint


def entry(keys, kind="jax.Array", **about):
    return str(keys), {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": False, **about},
    }


ENTRIES = dict(
    (
        entry(("lr",), "scalar"),
        entry(("params", "fc", "kernel"), write_shape=[3, 4]),
        entry(("opt_state", "0", "mu", "fc", "kernel"), write_shape=[3, 4]),
        entry(("opt_state", "1"), "None"),
        entry(("step",), "np.ndarray"),
    )
)


def write(folder, entries=ENTRIES, use_ocdbt=True):
    folder.mkdir(parents=True)
    (folder / "_METADATA").write_text(
        json.dumps({"tree_metadata": entries, "use_ocdbt": use_ocdbt, "use_zarr3": False})
    )
    if use_ocdbt:
        (folder / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a" + bytes(100))
    return folder


NAMES = ["other/lr", "model/fc/kernel", "optimizer/0/mu/fc/kernel", "model/step"]


class TestListing:
    def test_names_and_shapes_of_ocdbt(self, tmp_path):
        with Checkpoint(write(tmp_path / "a")) as checkpoint:
            assert checkpoint.format == "Orbax"
            assert list(checkpoint.tensors) == NAMES
            tensor = checkpoint.tensor("model/fc/kernel")
            assert (tensor.shape, tensor.dtype, tensor.is_readable) == ((3, 4), "", False)
            assert "OCDBT" in tensor.reason_not_editable
            assert "torch.save or as safetensors" in tensor.reason_not_editable

    @pytest.mark.parametrize(
        ("name", "about"),
        [
            (".zarray", {"dtype": "<f4", "shape": [6, 4], "zarr_format": 2}),
            ("zarr.json", {"data_type": "float32", "shape": [6, 4], "zarr_format": 3}),
        ],
    )
    def test_dtypes_and_shapes_of_zarr(self, tmp_path, name, about):
        folder = write(tmp_path / "a", use_ocdbt=False)
        (folder / "params.fc.kernel").mkdir()
        (folder / "params.fc.kernel" / name).write_text(json.dumps(about))
        with Checkpoint(folder) as checkpoint:
            tensor = checkpoint.tensor("model/fc/kernel")
            assert (tensor.shape, tensor.dtype) == ((6, 4), "float32")
            assert "zarr" in tensor.reason_not_editable

    def test_a_step_of_a_manager(self, tmp_path):
        write(tmp_path / "7/default")
        write(tmp_path / "8/state")
        handlers = {"default": "H", "state": "H", "metrics": "H"}
        for step in ("7", "8"):
            (tmp_path / step / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": handlers}))
        with Checkpoint(tmp_path / "7") as checkpoint:
            assert list(checkpoint.tensors) == NAMES
        with Checkpoint(tmp_path / "8") as checkpoint:
            assert {"model/step", "other/lr"} <= {*checkpoint.tensors}

    def test_reading_and_editing_are_refused(self, tmp_path):
        folder = write(tmp_path / "a")
        with pytest.raises(UsageError, match="OCDBT"):
            content(folder, "model/fc/kernel")
        with pytest.raises(UsageError), flipped(folder, "model/fc/kernel", 0, 1):
            pass


class TestHostile:
    def test_folders_without_metadata(self, tmp_path):
        (write(tmp_path / "a") / "_METADATA").unlink()
        refused(tmp_path / "a", "no _METADATA")

    @pytest.mark.parametrize(
        "text",
        [
            "", "[]", "{}", "{", '{"tree_metadata": []}', '{"tree_metadata": {"a": 1}}', "[" * 100_000, "\ud800",
            '{"tree_metadata": {"a": {"key_metadata": [], "value_metadata": {"value_type": "x"}}}}',
            json.dumps({"tree_metadata": dict([entry(("a",), write_shape=[-1])])}),
            json.dumps({"tree_metadata": dict([entry(("a",), write_shape=[2**40, 2**40])])}),
        ],
    )  # fmt: skip
    def test_metadata_that_are_none(self, tmp_path, text):
        folder = write(tmp_path / "a")
        (folder / "_METADATA").write_text(text, errors="surrogatepass")
        refused(folder, "no metadata of Orbax")

    @pytest.mark.parametrize("key", ["../../secret", "/etc", "a\0b", "x" * 499])
    def test_keys_that_lead_out_of_the_folder(self, tmp_path, key):
        folder = write(tmp_path / "a", dict([entry((key,))]), use_ocdbt=False)
        if key.startswith("x"):
            with Checkpoint(folder) as checkpoint:
                assert len(checkpoint.tensors) == 1
        else:
            refused(folder, "not inside it")

    def test_flipped_bits(self, tmp_path):
        folder = write(tmp_path / "a")
        assert_damage_raises_usage_errors(folder / "_METADATA", folder, 300)
