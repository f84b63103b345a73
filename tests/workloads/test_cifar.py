"""CIFAR ResNets with files of the user's own, good and bad."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from unsilent.basics.errors import UsageError
from unsilent.workloads import load
from unsilent.workloads.cifar_resnet import CifarResNet, normalised
from unsilent.workloads.saved_files import read_images, read_weights

from .conftest import SHARED


def _load(cifar_files, depth=20, weights="20.th", data="images.npz", **options):
    options = {"eval": "4", "batch": "4", "min_accuracy": "0"} | options
    return load(f"cifar-resnet{depth}", options, weights=str(cifar_files / weights), data=str(cifar_files / data))


def test_batches(cifar_files):
    batches = _load(cifar_files, eval="10").batches()
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), _load(cifar_files, eval="10", batch="10").batches()[0])


def test_normalised():
    images = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    images[0, 2, 5] = torch.tensor([255, 0, 51], dtype=torch.uint8)
    out = normalised(images)
    assert out.shape == (1, 3, 32, 32)
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225]
    np.testing.assert_allclose(out[0, :, 2, 5].numpy(), expected, rtol=1e-5)


def test_safetensors_and_bare_state_dicts(cifar_files):
    state = _load(cifar_files).model().state_dict()
    save_file(state, cifar_files / "plain.safetensors")
    torch.save(state, cifar_files / "plain.pt")
    without = {key: value for key, value in state.items() if "num_batches" not in key}
    torch.save(without, cifar_files / "old.pt")
    for name in ("plain.safetensors", "plain.pt", "old.pt"):
        assert torch.equal(_load(cifar_files, weights=name).model().linear.weight, state["linear.weight"])


def test_guessing_weights_are_noticed(cifar_files):
    with pytest.raises(
        UsageError,
        match=r"'cifar-resnet20' reached accuracy 0\.\d+, expected at least 0\.3: check that .* was trained for .*min_accuracy=0",
    ):
        load("cifar-resnet20", weights=str(cifar_files / "20.th"), data=str(cifar_files / "images.npz"))


@pytest.mark.parametrize(
    ("depth", "weights", "message"),
    [
        (20, "32.th", r"has 'layer1\.3\.conv1\.weight', which the model lacks; it looks like cifar-resnet32"),
        (56, "32.th", r"it lacks 'layer1\.5\.conv1\.weight'; it looks like cifar-resnet32"),
    ],
)
def test_another_depth(cifar_files, depth, weights, message):
    with pytest.raises(UsageError, match=message):
        _load(cifar_files, depth, weights)


def test_misshaped(cifar_files):
    state = CifarResNet(20).state_dict()
    state["conv1.weight"] = torch.zeros(16, 1, 3, 3)
    torch.save(state, cifar_files / "misshaped.pt")
    with pytest.raises(UsageError, match=r"has 'conv1\.weight' as \[16, 1, 3, 3\], expected \[16, 3, 3, 3\]$"):
        _load(cifar_files, weights="misshaped.pt")


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def _evil_torch():
    buffer = io.BytesIO()
    torch.save({"state_dict": Evil()}, buffer)
    return buffer.getvalue()


def _list_torch():
    buffer = io.BytesIO()
    torch.save([1, 2], buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evil.pt", _evil_torch(), r"evil\.pt is damaged or holds more than tensors; it is not loaded"),
        ("evil.pkl", pickle.dumps(Evil()), r"evil\.pkl is damaged or holds more than tensors"),
        ("list.pt", _list_torch(), r"holds no state dict"),
        ("empty.pt", b"", r"empty\.pt is not a valid weights file"),
        ("text.pt", b"hello there", r"text\.pt is (not a valid weights file|damaged or holds more than tensors)"),
        ("cut.pt", _list_torch()[:-40], r"cut\.pt is not a valid weights file"),
        ("text.safetensors", b"hello there, no header", r"text\.safetensors is not a valid weights file"),
        ("gone.pt", None, r"cannot read .*gone\.pt: No such file"),
        ("gone.safetensors", None, r"cannot read .*gone\.safetensors: No such file"),
    ],
)
def test_bad_weights(cifar_files, capsys, name, content, message):
    if content is not None:
        (cifar_files / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        _load(cifar_files, weights=name)
    assert "\n" not in str(caught.value)
    assert "run" not in capsys.readouterr().out


IMAGES = np.zeros((5, 32, 32, 3), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, r"has no array 'labels'; expected a .npz with 'images' and 'labels'"),
        ({"pictures": IMAGES, "labels": np.zeros(5, int)}, r"has no array 'images'; expected"),
        ({"images": IMAGES.astype(float), "labels": np.zeros(5, int)}, r"'images' is float64 \[5, 32, 32, 3\]; expected uint8"),
        ({"images": IMAGES[:, :28], "labels": np.zeros(5, int)}, r"'images' is uint8 \[5, 28, 32, 3\]; expected uint8"),
        ({"images": IMAGES[:0], "labels": np.zeros(0, int)}, r"'images' is uint8 \[0, 32, 32, 3\]"),
        ({"images": IMAGES, "labels": np.zeros(4, int)}, r"'labels' is int64 \[4\]; expected integers \[5\]"),
        ({"images": IMAGES, "labels": np.zeros(5)}, r"'labels' is float64 \[5\]; expected integers"),
        ({"images": IMAGES, "labels": np.full(5, 10)}, r"labels range from 10 to 10; the weights have classes 0 to 9"),
        ({"images": np.array([Evil()] * 5), "labels": np.zeros(5, int)}, r"is damaged, or is not a .npz file of plain arrays"),
    ],
)  # fmt: skip
def test_bad_images(cifar_files, tmp_path, capsys, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        _load(cifar_files, data=tmp_path / "bad.npz")
    assert "run" not in capsys.readouterr().out


def test_unreadable_images(cifar_files, tmp_path):
    np.save(tmp_path / "bare.npy", IMAGES)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_text("")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("images.npy", b"no array")
    for name, message in [
        ("bare.npy", "holds a single array without a name"),
        ("text.npz", "is damaged, or is not a .npz"),
        ("empty.npz", "is damaged, or is not a .npz"),
        ("zip.npz", "is damaged, or is not a .npz|'images' is .*; expected uint8|has no array 'labels'"),
        ("gone.npz", "cannot read .*: No such file"),
    ]:
        with pytest.raises(UsageError, match=message):
            _load(cifar_files, data=tmp_path / name)


def test_damaged_files_never_raise_anything_else(cifar_files, tmp_path):
    rng = np.random.default_rng(0)
    for source, read in (("20.th", read_weights), ("images.npz", lambda path: read_images(path, 10))):
        content = (cifar_files / source).read_bytes()
        for trial in range(60):
            damaged = bytearray(content)
            for at in rng.integers(0, len(content) if trial % 2 else 400, 3):
                damaged[-at if trial % 3 else at] ^= 1 << int(rng.integers(8))
            (tmp_path / source).write_bytes(damaged)
            with contextlib.suppress(UsageError):
                read(str(tmp_path / source))


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "resnet32-d509ac18.th").exists(), reason="real weights not there")
def test_published_weights():
    files = {"weights": str(SHARED / "resnet32-d509ac18.th"), "data": str(SHARED / "cifar10-test-a.npz")}
    workload = load("cifar-resnet32", **files)
    assert workload.info["accuracy"]["value"] > 0.8
    assert workload.batches()[0].shape == (64, 3, 32, 32)
    with pytest.raises(UsageError, match="looks like cifar-resnet32"):
        load("cifar-resnet44", **files)
