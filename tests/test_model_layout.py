"""The layout of a transformers model, and the name of its weights."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import tierd
from tests.tiny_models import gemma3, llama, mistral
from tierd.engines.transformers import layout_of, revision_of


def test_a_layout_says_what_the_configuration_does() -> None:
    layout = layout_of(gemma3(), name="g", revision="r")
    assert layout == tierd.KVLayout(
        "g", 4, 2, 16, "float32", windows=(24, None, 24, None), revision="r"
    )
    assert layout_of(mistral()).windows == (20, 20)
    assert layout_of(llama()).windows == ()
    model = llama()
    model.config.attention_chunk_size = 8
    with pytest.raises(ValueError, match="chunked"):
        layout_of(model)


def test_a_revision_is_of_the_weights_and_not_of_where_they_lay(tmp_path: Path) -> None:
    model, other = llama(), llama()
    assert revision_of(model) == revision_of(other)
    model.save_pretrained(tmp_path)
    assert revision_of(LlamaForCausalLM.from_pretrained(tmp_path)) == revision_of(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    assert revision_of(other) != revision_of(model)
    assert revision_of(llama(seed=1)) != revision_of(model)
