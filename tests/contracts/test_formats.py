"""What every checkpoint format must do: the contract that is shipped. A new one joins by its row in `CHECKPOINTS`."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.fuzz_seeds import MAKERS
from unsilent.checkpoints.formats.known import FORMATS
from unsilent.testing import FormatContract

ARCHIVE = {"model/dense/vars/1": np.arange(7, dtype=">f8"), "model/count": np.arange(3)}
CHECKPOINTS = {
    "torch.save": ("no_crc.pt", {"model/w": np.ones((4, 4), "f4"), "other/lr": np.array(0.5)}),
    "torch.distributed.checkpoint": ("views", {"model/w": np.arange(12, dtype="f4").reshape(3, 4).T}),
    "DeepSpeed": ("stage2", {}),
    "transformers": (
        "safetensors",
        {"model/a.weight": np.zeros((4, 3), "f4"), "model/b.weight": np.ones((4, 3), "f4")},
    ),
    "safetensors": (
        "model.safetensors",
        {"model/layer.weight": np.arange(24, dtype="f4").reshape(4, 6), "model/counter": np.arange(5)},
    ),
    "torch.save (legacy)": ("views.pt", {"model/whole": np.arange(60, dtype="f4")}),
    "Orbax": ("zarr", {}),
    "HDF5": ("model.h5", ARCHIVE),
    "Keras": ("model.keras", ARCHIVE),
}
"""The file or folder of the seeds, and values in it by the names that the format gives them."""
SLOW_TO_OPEN = ("HDF5", "Keras")
"""A process is started for each of these."""
NAMES = [pytest.param(one.name, marks=[pytest.mark.slow] * (one.name in SLOW_TO_OPEN)) for one in FORMATS]


class TestFormats(FormatContract):
    @pytest.fixture(autouse=True, params=NAMES)
    def _name(self, request):
        self.name = request.param

    def make_format(self):
        return next(one for one in FORMATS if one.name == self.name)

    def write_checkpoint(self, folder):
        if self.name in SLOW_TO_OPEN:
            pytest.importorskip("h5py")
        file, values = CHECKPOINTS[self.name]
        (folder / "seeds").mkdir()
        MAKERS[self.name].write(folder / "seeds")
        return folder / "seeds" / file, values
