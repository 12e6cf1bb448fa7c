"""Stock `generate()` in blocks of a real daemon: the tokens are those of its own cache."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.tiny_models import (
    BLOCK,
    check_equal,
    gemma2,
    gemma3,
    gpt_oss,
    greedy,
    llama,
    mistral,
    ours,
    prompt,
    served,
)
from tierd.engines.attention import attend
from tierd.engines.transformers import NAME, TierdCache, generate
from tierd.hints import Hints
from tierd.pool import Pool

ROOT = Path(__file__).parents[1]
FAMILIES = [llama, gemma3, gemma2, gpt_oss, mistral]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_tokens_and_logits_are_those_of_stock_transformers(
    family: Callable[[], Any], pool_of: Callable[[Any], Pool]
) -> None:
    model = family()
    pool = pool_of(model)
    for num_tokens in (1, 5, 70, 70, 64, 33, 130):  # cold, whole and partial hits
        check_equal(model, pool, prompt(num_tokens), max_new_tokens=12)


def test_a_second_cache_computes_only_what_the_first_did_not(
    pool_of: Callable[[Any], Pool],
) -> None:
    model = llama()
    pool, computed = pool_of(model), []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        computed.append(kwargs["input_ids"].shape[1])

    system = prompt(100)
    with model.register_forward_pre_hook(count, with_kwargs=True):
        for question in (prompt(10, 2), prompt(20, 3)):
            ours(model, pool, torch.cat((system, question), 1), num_tokens=3)
    assert computed == [110, 1, 1, 120 - 100 // BLOCK * BLOCK, 1, 1]


def test_what_was_generated_is_committed_too(pool_of: Callable[[Any], Pool]) -> None:
    model = gemma3()
    pool, ids = pool_of(model), prompt(40)
    answer = ours(model, pool, ids, num_tokens=50)
    follow_up = torch.cat((answer, prompt(9, 2)), 1)
    with TierdCache(pool, follow_up) as cache:
        assert cache.hit == (answer.shape[1] - 1) // BLOCK * BLOCK  # its last is not computed
    assert torch.equal(ours(model, pool, follow_up), greedy(model, follow_up))


def test_a_stock_model_generates_with_the_cache_handed_to_it(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(50)
    pool, expected = pool_of(model), greedy(llama(), ids, 40)
    model.set_attn_implementation(NAME)
    with TierdCache(pool, ids) as cache:
        got = greedy(model, ids, 20, cache=cache, logits_processor=[cache.channel])
        got = greedy(model, got, 20, cache=cache, logits_processor=[cache.channel])
        assert cache.get_seq_length() == got.shape[1] - 1
    assert torch.equal(got, expected)


def test_chunked_prefill_and_sampling_work(pool_of: Callable[[Any], Pool]) -> None:
    model, ids = llama(), prompt(50)
    pool = pool_of(model)
    assert torch.equal(ours(model, pool, ids, prefill_chunk_size=17), greedy(model, ids))
    draws = {"do_sample": True, "max_new_tokens": 20}
    torch.manual_seed(5)
    expected = model.generate(ids, **draws)
    torch.manual_seed(5)
    assert torch.equal(generate(model, pool, ids, **draws), expected)


CHILD = """
import sys
import tierd
from tests.tiny_models import llama, ours, prompt
from tierd.engines.transformers import TierdCache, layout_of

model, ids = llama(), prompt(100)
with tierd.connect(sys.argv[1]) as client, client.attach(layout_of(model)) as pool:
    with TierdCache(pool, ids) as cache:
        print(cache.hit)
    print(ours(model, pool, ids).tolist())
"""


def test_hints_of_each_prompt_reach_the_daemon(pool_of: Callable[[Any], Pool]) -> None:
    model = llama()
    pool = pool_of(model)
    batch = torch.cat((prompt(40, 1), prompt(40, 2)))
    open_one, last = Hints("a", returns_in=60.0), Hints("b", closed=True)
    mask = torch.ones_like(batch)
    generate(model, pool, batch, attention_mask=mask, hints=[open_one, last], max_new_tokens=3)
    generate(model, pool, prompt(40, 3), hints=Hints("c", priority=1), max_new_tokens=3)
    heard = pool.client.status()["tenants"][0]["namespaces"][0]["hints"]
    assert (heard["session"], heard["priority"], heard["closed"]) == (4, 1, 1)
    assert heard["returns_in"] == 2  # with the request, and at its end
    assert heard["sessions"] == 3
    with pytest.raises(ValueError, match="hints: 1 for 2 prompts"):
        TierdCache(pool, batch, hints=[last])


def test_two_processes_share_a_prefix(tmp_path: Path) -> None:
    model, ids = llama(), prompt(100)
    with served(tmp_path, model) as pool:
        expected = ours(model, pool, ids).tolist()
        command = [sys.executable, "-c", CHILD, str(tmp_path / "tierd.sock")]
        other = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert other.stdout.splitlines() == ["96", str(expected)]


def test_another_cache_falls_back_to_sdpa(pool_of: Callable[[Any], Pool]) -> None:
    for model in (llama(), gemma3()):
        expected = greedy(model, prompt(60))
        padded = {"attention_mask": (torch.arange(60) >= 7).long()[None]}
        expected_padded = greedy(model, prompt(60), **padded)
        model.set_attn_implementation(NAME)
        assert torch.equal(greedy(model, prompt(60)), expected)
        cache = DynamicCache(config=model.config)
        assert torch.equal(greedy(model, prompt(60), cache=cache), expected)
        assert torch.equal(greedy(model, prompt(60), **padded), expected_padded)


def test_inputs_that_token_ids_do_not_name_need_a_hash(pool_of: Callable[[Any], Pool]) -> None:
    model, ids = llama(), prompt(40)
    pool, positions = pool_of(model), torch.arange(40)[None]
    with pytest.raises(ValueError, match="position_ids: not named by token ids"):
        ours(model, pool, ids, position_ids=positions)
    for _ in range(2):
        got = ours(model, pool, ids, position_ids=positions, extra={3: b"positions"})
        assert torch.equal(got, greedy(model, ids, position_ids=positions))
    with TierdCache(pool, ids) as plain, TierdCache(pool, ids, extra={3: b"positions"}) as other:
        assert (plain.hit, other.hit) == (0, 32)


def test_without_a_dict_the_key_tensor_carries_the_way_to_the_blocks(
    pool_of: Callable[[Any], Pool],
) -> None:
    model = llama()
    q, k, v = (torch.randn(1, heads, 20, 16) for heads in (4, 2, 2))
    with TierdCache(pool_of(model), prompt(20)) as cache:
        key, value = cache.update(k, v, 0)
        out, _ = attend(model.model.layers[0].self_attn, q, key, value, None)
        cache.release()
        del key
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_the_attention_of_the_model_is_put_back(pool_of: Callable[[Any], Pool]) -> None:
    model = llama()
    pool = pool_of(model)
    ours(model, pool, prompt(20))
    assert model.config._attn_implementation == "sdpa"
