"""``hf:DIR``: a transformers model in a local folder that ``save_pretrained`` wrote.

Nothing is downloaded and no code from the folder runs: local files only, no remote code, safetensors weights only.
The model class is the first of the config's ``architectures``. Inputs come from a ``.npz`` whose arrays are named like
the arguments of the model's ``forward``. Without such a file they are synthetic, and ``info`` says so: text from the
Python reference if the folder has a tokenizer, else seeded random token ids or pixels. One evaluation is one call of
the model, or, with ``generate``, greedy generation with a key/value cache.

Invariant: it is an error if the folder lacks weights, because measurements of a randomly completed model mean nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.error_origin import call_user_code
from unsilent.basics.errors import UsageError, first_line
from unsilent.outcomes import NUMERIC
from unsilent.workloads.base import Workload
from unsilent.workloads.hf_generate import SEQUENCES, prepare, run_generate
from unsilent.workloads.hf_inputs import Inputs, decoded_text, from_npz, synthetic_inputs
from unsilent.workloads.model_fitting import check_option_range, import_transformers, isolated_training, parameter_count


def hf_folder(
    *,
    folder: str,
    eval: int = 16,  # noqa: A002 - option name
    batch: int = 0,
    length: int = 32,
    seed: int = 0,
    generate: int | None = None,
    data: str | None = None,
) -> Workload:
    """The workload of the transformers model in a folder.

    The judge follows from its architecture.

    Args:
        folder: Folder with ``config.json`` and ``*.safetensors``.
        eval: Number of synthetic samples.
        batch: Samples per batch; 0 for all samples in one batch.
        length: Tokens per synthetic sample, limited to the largest length that the model takes.
        seed: Seed of synthetic inputs.
        generate: Number of new tokens that are generated greedily for each sample; default: one call of the model.
        data: ``.npz`` file of inputs.

    Raises:
        UsageError: transformers is not installed; folder, options or data do not fit; or the model cannot generate.
    """
    ref = f"hf:{folder}"
    check_option_range(ref, "eval", eval, 100_000, "samples")
    check_option_range(ref, "length", length, 100_000, "tokens")
    with quiet(ref), isolated_training(seed):
        model = _model(ref, Path(folder).expanduser())
        evaluate: Callable[[nn.Module, Any], Tensor] = run_model
        if generate is not None:
            length = prepare(ref, model, generate, length)
            evaluate = partial(run_generate, tokens=generate)
        inputs = from_npz(ref, model, data) if data else synthetic_inputs(ref, model, folder, eval, length, seed)
        if generate is not None and not data:  # the output begins with the model's own first token
            inputs = Inputs({k: v for k, v in inputs.arrays.items() if k != "decoder_input_ids"}, inputs.description)
        samples = len(next(iter(inputs.arrays.values())))
        check_option_range(ref, "batch", batch or samples, samples, "samples in all")
        batches = _split_into_batches(inputs, batch or samples)
        _try_out(ref, model, batches[0], evaluate)
    architecture = type(model).__name__
    return Workload(
        model,
        batches,
        judge=_judge(architecture, model.config) if generate is None else SEQUENCES,
        run=evaluate,
        show=partial(decoded_text, folder) if "input_ids" in inputs.arrays else None,
        name=ref,
        components=_components(model),
        info={
            "description": f"{architecture} from the transformers folder {Path(folder).name}",
            "data": inputs.description,
            "synthetic_inputs": data is None,
            "parameters": parameter_count(model),
            "samples": samples,
            **({} if generate is None else {"new_tokens": generate}),
        },
    )


def run_model(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The ``logits`` of one call of the model, or else the first floating-point tensor of the output."""
    output = call_user_code(model, **batch)
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise UsageError(
        f"{type(model).__name__} returns no floating-point tensor; write your own workload with a run= that returns one"
    )


@contextmanager
def quiet(ref: str) -> Iterator[None]:
    """Context in which transformers shows no log messages and no progress bars.

    If the package is missing, one line names the extra to install.
    """
    logging = import_transformers(ref, "transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _model(ref: str, folder: Path) -> Any:
    """The model of a folder, with all of its weights read from there."""
    # Imported by name, so that the types do not depend on whether the extra is installed.
    transformers: Any = importlib.import_module("transformers")
    if not (folder / "config.json").is_file():
        raise UsageError(f"workload {ref!r}: no config.json in {folder}; expected a folder written by save_pretrained")
    for path in folder.iterdir():  # transformers chooses by name which files it reads
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"workload {ref!r}: {path} is not a regular file; remove it from the folder")
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"workload {ref!r}: no *.safetensors in {folder}; write one with save_pretrained of a current transformers version"
        )
    where = str(folder.resolve())
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(where, **safe)
    except Exception as error:
        raise UsageError(f"workload {ref!r}: cannot read config.json: {first_line(error)}") from None
    names = getattr(config, "architectures", None) or []
    if not names:
        raise UsageError(
            f"workload {ref!r}: config.json names no architectures; add the name of the model class, as save_pretrained does"
        )
    kind: Any = getattr(transformers, str(names[0]), None)
    is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise UsageError(
            f"workload {ref!r}: transformers {transformers.__version__} has no model {names[0]!r}, "
            "and code in the folder is never run; use a model class of transformers"
        )
    try:
        model, report = kind.from_pretrained(
            where, config=config, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        raise UsageError(f"workload {ref!r}: cannot load {names[0]}: {first_line(error)}") from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"workload {ref!r}: the weights of {names[0]} lack {missing[0]!r} ({len(missing)} tensors are missing); "
            "save the complete model with save_pretrained"
        )
    model.config.use_cache = False  # one call per batch: a key/value cache would be built and never used
    return model.eval()


def _split_into_batches(inputs: Inputs, size: int) -> list[dict[str, Tensor]]:
    """The arrays cut into batches of ``size`` samples."""
    parts = {name: array.split(size) for name, array in inputs.arrays.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


@torch.no_grad()
def _try_out(ref: str, model: Any, batch: dict[str, Tensor], evaluate: Callable[[nn.Module, Any], Tensor]) -> None:
    """Run one batch.

    Raises ``UsageError`` in one line if the inputs do not fit the model.
    """
    try:
        evaluate(model, batch)
    except UsageError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in batch.items())
        raise UsageError(
            f"workload {ref!r}: {type(model).__name__} cannot run on {shapes}: {first_line(error)}; "
            "try batch=1 or other inputs with --data"
        ) from None


def _judge(architecture: str, config: Any) -> str:
    """The name of the judge for the outputs of an architecture."""
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "next-token"
    classes = int(getattr(config, "num_labels", 0) or 0)
    if architecture.endswith(("ForSequenceClassification", "ForImageClassification")) and classes > 1:
        return "top1"
    return NUMERIC


def _components(model: nn.Module) -> dict[str, list[str]]:
    """Parameter names by function: embedding, attention, norm, other parts of the blocks (mlp), head."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")[:-1]
        above = [model.get_submodule(".".join(parts[:i])) for i in range(1, len(parts) + 1)]
        kinds = [type(module).__name__.lower() for module in above]
        if above and isinstance(above[-1], nn.Embedding):
            group = "embedding"
        elif kinds and "norm" in kinds[-1]:
            group = "norm"
        elif any(isinstance(module, nn.ModuleList) for module in above):
            group = "attention" if any("attention" in kind for kind in kinds) else "mlp"
        else:
            group = "embedding" if any("embedding" in kind for kind in kinds) else "head"
        groups.setdefault(group, []).append(name)
    if "attention" not in groups and "mlp" in groups:
        groups["layers"] = groups.pop("mlp")
    return groups
