"""Protected transformers models: calls, and generation with a cache."""

import numpy as np
import pytest
import torch

from unsilent.protection.protect import protect

transformers = pytest.importorskip("transformers")


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompts(count, samples=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(2, 64, (samples, 6), generator=generator)} for _ in range(count)]


def generate(model, batch):
    return model.generate(
        **batch, attention_mask=torch.ones_like(batch["input_ids"]), max_new_tokens=4, do_sample=False
    )


def test_a_call_gives_the_same_type_and_bits():
    model, batch = llama(), prompts(1, 3, seed=9)[0]
    with protect(model, prompts(20), rate=0.02) as guarded, torch.no_grad():
        output, clean = guarded(**batch), model(**batch)
    assert type(output) is type(clean)
    assert torch.equal(output.logits, clean.logits)
    assert guarded.verdict.flagged.shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["dr-dna", "dr-dna+duplication"])
def test_generation_is_watched_in_every_pass(detector):
    model, batch = llama(), prompts(1, 3, seed=9)[0]
    with protect(model, prompts(20), detector, rate=0.02, run=generate, recovery="repair") as guarded:
        clean = generate(model, batch)
        assert torch.equal(generate(guarded, batch), clean)
        assert any(name.endswith("@later") for name in guarded._ranges)
        calls = []

        def corrupt(module, inputs, output):  # the third pass alone
            calls.append(1)
            if len(calls) != 3:
                return None
            output = output.clone()
            output[1] = 1e6
            return output

        hook = model.model.layers[0].mlp.down_proj.register_forward_hook(corrupt, prepend=True)
        generate(guarded, batch)
        assert guarded.verdict.flagged[1]
        hook.remove()
        model.model.layers[0].mlp.up_proj.weight.data[3, 3] = 1e30
        assert torch.equal(generate(guarded, batch), clean)
    assert guarded.verdict.flagged.all()
    assert guarded.verdict.action == "repair"
    assert np.isfinite(guarded.verdict.margins).all()
