"""Files of profiles: one that does not hold what was written is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.protection.profile import load_profile, make_profile


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()


@pytest.fixture(scope="module", params=["ranger", "dr-dna+golden-test"])
def content(request, model, tmp_path_factory):
    """The bytes of a profile's file."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(50, 4, generator=generator) for _ in range(6)]
    path = tmp_path_factory.mktemp("profile") / "p"
    make_profile(model, batches, request.param).save(path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "changed"


def refusal(path, model):
    """The text of the error; None where the file is read."""
    try:
        load_profile(path, model).save(path.with_name("again"))
    except UsageError as error:
        return str(error)
    return None


def test_a_flipped_bit_is_refused_or_has_no_effect(model, content, path):
    bits = np.random.default_rng(2).choice(8 * len(content), 1000, replace=False)
    refused = 0
    for bit in [*range(64), *bits.tolist()]:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        message = refusal(path, model)
        if message is None:
            assert path.with_name("again").read_bytes() == content, bit
        else:
            assert "\n" not in message
            refused += 1
    assert refused > 900


def test_a_flipped_bit_of_a_value_is_named(model, content, path):
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "differs from what was written" in refusal(path, model)


@pytest.mark.parametrize("end", [0, 8, -1, None], ids=["empty", "length alone", "a byte less", "a byte more"])
def test_a_truncated_or_extended_file_is_refused(model, content, path, end):
    path.write_bytes(content + b"\0" if end is None else content[:end])
    assert refusal(path, model) is not None


def test_a_profile_of_an_older_version_must_be_made_again(model, path):
    save_file({}, str(path), metadata={"profile": json.dumps({"format": "unsilent/activation-profile/3"})})
    assert "make the profile again" in refusal(path, model)


def test_a_safetensors_file_without_a_profile_is_refused(model, path):
    save_file({"a": torch.zeros(2)}, str(path))
    assert "is not an activation profile" in refusal(path, model)


def test_a_golden_test_gives_its_answer_again_whatever_the_strides_of_its_input_were(tmp_path):
    class Layout(nn.Module):
        """Kernels choose by strides in which order they add; here the answer depends on them openly."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x.flatten(1) * self.weight + x.stride(1)

    model = Layout().eval()
    images = torch.randn(50, 8, 8, 1, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)
    assert images.stride(1) == 1  # of one channel, so that the tensor counts as contiguous all the same
    make_profile(model, [images] * 6, "golden-test").save(tmp_path / "p")
    load_profile(tmp_path / "p", model)
