"""Small transformers models with seeded random weights, as workloads: ``architectures.py:bert`` and so on.

Between them they hold every kind of parameter that a shortcut could get wrong: batch, layer and RMS norm, embeddings,
biases, tied heads, depthwise and strided convolutions, rotary tables, padded attention, fused and split projections.
Nothing is downloaded. Each has two or three batches of different sizes and takes well under 50 ms a batch on one core.

Invariant: the same name gives the same bits in every process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.workloads.base import Workload
from unsilent.workloads.hf_folder import quiet

NEW_TOKENS = 6
VOCABULARY = 131
"""No multiple of 8 or 16, so that the last columns of a head go through the remainder loop of a kernel."""

ARCHITECTURES = ("resnet", "vit", "bert", "gpt2", "llama", "segformer")
GENERATING = ("gpt2_generate", "llama_generate")


def resnet() -> Workload:
    """Bottleneck ResNet: convolutions of all strides, batch norm, pooling."""
    model = _model("ResNet", "ForImageClassification", seed=1, num_labels=10, num_channels=3, embedding_size=16,
                   hidden_sizes=[32, 64, 72, 128], depths=[1, 2, 1, 1], layer_type="bottleneck")  # fmt: skip
    return _workload("resnet", model, [_pixels(n, 64, 10 + n) for n in (3, 2)], "top1")


def vit() -> Workload:
    """Vision transformer: patch convolution, class token, learned positions, layer norm."""
    model = _model("ViT", "ForImageClassification", seed=2, num_labels=10, image_size=32, patch_size=4, hidden_size=96,
                   num_hidden_layers=3, num_attention_heads=4, intermediate_size=200)  # fmt: skip
    return _workload("vit", model, [_pixels(n, 32, 20 + n) for n in (4, 1)], "top1")


def bert() -> Workload:
    """Masked language model with padding, token types and a head tied to the word embeddings."""
    model = _model("Bert", "ForMaskedLM", seed=3, vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=2,
                   num_attention_heads=4, intermediate_size=200, max_position_embeddings=32)  # fmt: skip
    batches = []
    for lengths in ((24, 11, 3), (9, 9)):
        tokens = _tokens(len(lengths), max(lengths), 30 + len(lengths))
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        types = (torch.arange(max(lengths)) >= 4).long().expand(len(lengths), -1).contiguous()
        batches.append({"input_ids": tokens, "attention_mask": mask, "token_type_ids": types})
    return _workload("bert", model, batches, "next-token")


def _gpt2(**options: Any) -> nn.Module:
    return _model("GPT2", "LMHeadModel", seed=4, vocab_size=VOCABULARY, n_positions=32, n_embd=96, n_layer=3, n_head=4,
                  attn_implementation="eager", bos_token_id=1, **options)  # fmt: skip


def gpt2() -> Workload:
    """Decoder with fused projections (``Conv1D``), eager attention and a tied head."""
    return _workload("gpt2", _gpt2(use_cache=False), [_text(2, 14, 41), _text(1, 9, 42)], "next-token")


def gpt2_generate() -> Workload:
    """Greedy decoding that stops early when the model says so: the length depends on the values."""
    model = _gpt2(eos_token_id=7, pad_token_id=0)
    return _workload("gpt2-generate", model, [_text(2, 7, 43), _text(1, 5, 44)], "exact-sequence", generate)


def _llama(**options: Any) -> nn.Module:
    return _model("Llama", "ForCausalLM", seed=5, vocab_size=VOCABULARY, hidden_size=96, intermediate_size=168,
                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                  bos_token_id=1, **options)  # fmt: skip


def llama() -> Workload:
    """Decoder with rotary positions, RMS norm, grouped key/value heads and a gated MLP."""
    return _workload("llama", _llama(use_cache=False), [_text(2, 13, 51), _text(3, 6, 52)], "next-token")


def llama_generate() -> Workload:
    """Greedy decoding of a fixed length from left-padded prompts."""
    model = _llama(eos_token_id=None, pad_token_id=0)
    padded = _text(2, 8, 53)
    padded["input_ids"][1, :3] = 0
    padded["attention_mask"][1, :3] = 0
    return _workload("llama-generate", model, [padded, _text(1, 4, 54)], "exact-sequence", generate)


def segformer() -> Workload:
    """Hierarchical transformer: depthwise convolution, sequence reduction, batch norm and interpolation in the head."""
    model = _model("Segformer", "ForSemanticSegmentation", seed=6, num_labels=5, num_channels=3, num_encoder_blocks=4,
                   depths=[1, 1, 1, 1], sr_ratios=[4, 2, 2, 1], hidden_sizes=[16, 32, 48, 64],
                   num_attention_heads=[1, 2, 3, 4], mlp_ratios=[4, 4, 2, 2], decoder_hidden_size=40)  # fmt: skip
    return _workload("segformer", model, [_pixels(n, 64, 60 + n) for n in (2, 1)], "tolerance")


def logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """One call of the model."""
    found: Tensor = model(**batch).logits
    return found


def generate(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Greedy decoding with a key/value cache: the tokens, and the logits of every step [n, steps, vocabulary]."""
    out = model.generate(
        **batch, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return {"sequences": out.sequences, "steps": torch.stack(out.logits, 1)}


def _workload(
    name: str,
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    judge: str,
    run: Callable[[Any, Any], Any] = logits,
) -> Workload:
    return Workload(model, batches, judge=judge, run=run, name=name)


def _model(family: str, head: str, *, seed: int, attn_implementation: str = "sdpa", **options: Any) -> nn.Module:
    """A model from a config; every tensor of it gets values that matter (no zero bias, no unit norm)."""
    with quiet(family):
        transformers: Any = importlib.import_module("transformers")
        config = getattr(transformers, f"{family}Config")(**options)
        if family not in ("ResNet", "Segformer"):
            config._attn_implementation = attn_implementation
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = getattr(transformers, family + head)(config).eval()
    _fill(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Matrices keep the size of what goes through them; vectors (biases, norms, statistics) vary around their start."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or "inv_freq" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim < 2:
            positive = name.endswith(("norm.weight", "running_var")) or bool((tensor == 1).all())
            tensor.copy_(1 + 0.3 * noise.clamp(-2, 2) if positive else 0.3 * noise)
        else:
            tensor.copy_(noise if "embed" in name or "wte" in name else noise * _fan_in(name, tensor) ** -0.5)


def _fan_in(name: str, tensor: Tensor) -> int:
    """Products summed in one output; GPT-2's ``Conv1D`` keeps its matrices input first."""
    return tensor.shape[0] if ".c_" in name else tensor[0].numel()


def _pixels(samples: int, size: int, seed: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(seed))}


def _tokens(samples: int, length: int, seed: int) -> Tensor:
    return torch.randint(8, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def _text(samples: int, length: int, seed: int) -> dict[str, Tensor]:
    tokens = _tokens(samples, length, seed)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
