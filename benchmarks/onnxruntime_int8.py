"""An int8 model of ONNX Runtime, as it is deployed: statically quantised by ONNX Runtime's tools, run by its kernels."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def quantised_session(model: nn.Module, calibration: Tensor) -> Callable[[Tensor], Tensor]:
    """Inputs -> class scores of the int8 model: QDQ format, weights per channel, ranges from the calibration inputs."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches: Iterator[Tensor] = iter(calibration.split(50))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self._batches, None)
            return None if batch is None else {"x": batch.numpy()}

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs no further package is deprecated
        exported, quantised = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        torch.onnx.export(model, (calibration[:2],), str(exported), input_names=["x"], output_names=["scores"],
                          dynamic_axes={"x": {0: "n"}, "scores": {0: "n"}}, dynamo=False)  # fmt: skip
        quantize_static(exported, quantised, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
                        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(quantised.read_bytes(), options, providers=["CPUExecutionProvider"])

    def scores(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["scores"], {"x": x.detach().numpy()})[0])

    return scores
