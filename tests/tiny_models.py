"""Models with random weights for tests of the transformers adapter, each made in milliseconds, and
what stock transformers and ours say of a prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.daemon import Daemon, held
from tierd.engines.transformers import generate, layout_of
from tierd.layout import KVLayout
from tierd.pool import Pool

BLOCK = 16
WINDOW = 24
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
WINDOWED = {**TINY, "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ALTERNATING}


def llama(seed: int = 0, **facts: Any) -> Any:
    torch.manual_seed(seed)
    facts = {**TINY, "num_hidden_layers": 3, **facts}
    return LlamaForCausalLM(LlamaConfig(**facts)).train(False)


def gemma3() -> Any:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**WINDOWED)).train(False)


def gemma2() -> Any:
    """Softcapped scores, which stock sdpa cannot do."""
    torch.manual_seed(0)
    config = Gemma2Config(**WINDOWED, attn_logit_softcapping=0.5, attn_implementation="eager")
    return Gemma2ForCausalLM(config).train(False)


def gpt_oss() -> Any:
    """Attention sinks."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**WINDOWED, **experts, attn_implementation="eager")
    model = GptOssForCausalLM(config).train(False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def mistral() -> Any:
    """One window for all layers, and no layer types."""
    torch.manual_seed(0)
    config = MistralConfig(**TINY, num_hidden_layers=2, sliding_window=20)
    return MistralForCausalLM(config).train(False)


def prompt(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 128, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def padded(*prompts: Tensor) -> dict[str, Tensor]:
    """Prompts of one batch, padded on the left, as keyword arguments of `generate`."""
    width = max(ids.shape[1] for ids in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(prompts):
        ids[row, width - tokens.shape[1] :] = tokens[0]
        mask[row, width - tokens.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, ids: Tensor, num_tokens: int = 12, **kwargs: Any) -> Any:
    """What stock transformers says."""
    return model.generate(ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


def ours(model: Any, pool: Pool, ids: Tensor, num_tokens: int = 12, **kwargs: Any) -> Any:
    return generate(model, pool, ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


def check_equal(model: Any, pool: Pool, input_ids: Tensor, **kwargs: Any) -> None:
    """The tokens are those of stock transformers, and the logits as far as they are told."""
    facts = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, **kwargs}
    torch.manual_seed(5)
    expected = model.generate(input_ids, **facts)
    torch.manual_seed(5)
    got = generate(model, pool, input_ids, **facts)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.cat(got.logits), torch.cat(expected.logits), rtol=1e-4, atol=1e-4
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small are slower with several, and on a busy machine many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def served(
    folder: Path, model: Any, layout: KVLayout | None = None, **tiers: Any
) -> Iterator[Pool]:
    """A pool for a model in a daemon of its own, in which at the end nobody holds anything."""
    with (
        one_thread(),
        Daemon(folder, **{"device": "32MiB", "host": "32MiB", "ssd": None, **tiers}) as daemon,
        daemon.client() as client,
        client.attach(layout or layout_of(model)) as pool,
    ):
        yield pool
        daemon.until(lambda status: not held(status))
        assert [session["leases"] for session in client.status()["sessions"]] == [0]


def damage(folder: Path) -> None:
    """Flip a byte in the middle of what each slab under a folder holds: in two pages, as the first
    may be what follows a block."""
    for file in folder.rglob("c/*/0"):
        data = bytearray(file.read_bytes())
        filled = [at for at in range(0, len(data), 4096) if any(data[at : at + 4096])]
        for at in filled[len(filled) // 2 :][:2]:
            data[at + 100] ^= 1
        file.write_bytes(data)
