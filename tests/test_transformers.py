"""Stock `generate()` in blocks of a real daemon: the tokens are those of its own cache."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
)

import tierd
from tierd.client import Client
from tierd.engines.attention import attend
from tierd.engines.transformers import NAME, TierdCache, generate, layout_of, revision_of
from tierd.pool import Pool

ROOT = Path(__file__).parents[1]
BLOCK = 16
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
WINDOWED = {**TINY, "num_hidden_layers": 4, "sliding_window": 24, "layer_types": ALTERNATING}


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**TINY, num_hidden_layers=3)).eval()


def gemma3() -> Any:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**WINDOWED)).eval()


def gemma2() -> Any:
    """Softcapped scores, which stock sdpa cannot do."""
    torch.manual_seed(0)
    config = Gemma2Config(**WINDOWED, attn_logit_softcapping=0.5, attn_implementation="eager")
    return Gemma2ForCausalLM(config).eval()


def gpt_oss() -> Any:
    """Attention sinks."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**WINDOWED, **experts, attn_implementation="eager")
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def mistral() -> Any:
    """One window for all layers, and no layer types."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**TINY, num_hidden_layers=2, sliding_window=20)).eval()


def prompt(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 128, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: Tensor, num_tokens: int = 12, **kwargs: Any) -> Any:
    """What stock transformers says."""
    return model.generate(ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


def ours(model: Any, pool: Pool, ids: Tensor, num_tokens: int = 12, **kwargs: Any) -> Any:
    return generate(model, pool, ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


class Daemon:
    """A `tierd serve` of its own, and the connections made to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "tierd.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, device: str = "32MiB", host: str = "32MiB", ssd: str = "") -> None:
        lines = [f'socket = "{self.socket}"', f'[device]\nsize = "{device}"']
        lines.append(f'[host]\nsize = "{host}"')
        if ssd:
            lines.append(f'[ssd]\npath = "{self.folder / "ssd"}"\nsize = "{ssd}"\nslab = "2MiB"')
            lines.append("min_free = 0")
        config = self.folder / "tierd.toml"
        config.write_text("\n".join(lines))
        command = [sys.executable, "-m", "tierd", "serve", "--config", str(config)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
            assert self.process.stderr is not None
            for line in self.process.stderr:  # until it says so
                log.write(line)
                if b"ready on" in line:
                    break

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate(timeout=30)
            self.process = None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()
        self.process = None


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for tests that leave nothing behind but cached blocks."""
    shared = Daemon(tmp_path_factory.mktemp("tierd"))
    shared.start()
    yield shared
    shared.stop()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """One to be started, filled up, killed."""
    own = Daemon(tmp_path)
    yield own
    own.stop()


@contextmanager
def attached(daemon: Daemon, model: Any, **layout: str) -> Iterator[Pool]:
    with tierd.connect(daemon.socket) as client:
        yield client.attach(layout_of(model, **layout))


@pytest.fixture
def pool_of(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Pool]]:
    """A pool for a model that no other test's prompts have been in."""
    with ExitStack() as stack:

        def attach(model: Any) -> Pool:
            layout = {"name": request.node.name, "salt": request.node.name}
            return stack.enter_context(attached(daemon, model, **layout))

        yield attach


def held(client: Client) -> tuple[int, int]:
    """Leases that any engine holds, and blocks in use in the top tier, where alone engines hold:
    below it, what is loading may be a copy that the daemon makes ahead."""
    status = client.status()
    (tenant,) = status["tenants"]
    groups = [g for n in tenant["namespaces"] for g in n["tiers"][0]["groups"]]
    used = sum(g["private"] + g["loading"] + g["quarantined"] for g in groups)
    return sum(session["leases"] for session in status["sessions"]), used


FAMILIES = [llama, gemma3, gemma2, gpt_oss, mistral]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_tokens_and_logits_are_those_of_stock_transformers(
    family: Callable[[], Any], pool_of: Callable[[Any], Pool]
) -> None:
    model = family()
    pool = pool_of(model)
    facts = {"return_dict_in_generate": True, "output_logits": True}
    for num_tokens in (1, 5, 70, 70, 64, 33, 130):  # cold, whole and partial hits
        ids = prompt(num_tokens)
        expected, got = greedy(model, ids, **facts), ours(model, pool, ids, **facts)
        assert torch.equal(got.sequences, expected.sequences), num_tokens
        torch.testing.assert_close(
            torch.cat(got.logits), torch.cat(expected.logits), rtol=1e-4, atol=1e-4
        )


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


def test_two_processes_share_a_prefix(daemon: Daemon) -> None:
    model, ids = llama(), prompt(100)
    script = (
        "import torch\n"
        "from pathlib import Path\n"
        "from tests.test_transformers import Daemon, attached, llama, ours, prompt\n"
        "from tierd.engines.transformers import TierdCache\n"
        f"model, ids = llama(), prompt(100)\n"
        f"with attached(Daemon(Path({str(daemon.folder)!r})), model, name='two') as pool:\n"
        "    with TierdCache(pool, ids) as cache:\n"
        "        print(cache.hit)\n"
        "    print(ours(model, pool, ids).tolist())\n"
    )
    with attached(daemon, model, name="two") as pool:
        expected = ours(model, pool, ids).tolist()
        other = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
        )
    assert other.stdout.splitlines() == ["96", str(expected)]


def test_a_prompt_too_long_for_the_device_tier_is_out_of_blocks(own_daemon: Daemon) -> None:
    own_daemon.start(device="2MiB")
    model = llama()
    with attached(own_daemon, model) as pool:
        with pytest.raises(tierd.OutOfBlocks, match="tier 'device'"):
            ours(model, pool, prompt(4000))
        assert held(pool.client) == (0, 0)
        assert torch.equal(ours(model, pool, prompt(50)), greedy(model, prompt(50)))


def test_out_of_blocks_in_mid_generation_leaks_nothing(own_daemon: Daemon) -> None:
    own_daemon.start(device="2MiB")
    model, ids = llama(), prompt(60)
    with attached(own_daemon, model) as pool:
        room = pool.view(0).shape[0] * BLOCK
        with pool.acquire([1], room=room - 5 * BLOCK):
            with pytest.raises(tierd.OutOfBlocks):
                ours(model, pool, ids, 60)
            assert held(pool.client)[0] == 1
        assert held(pool.client) == (0, 0)
        assert torch.equal(ours(model, pool, ids, 60), greedy(model, ids, 60))


class AtStep(LogitsProcessor):
    """Does something once, after `num_steps` steps."""

    def __init__(self, num_steps: int, action: Callable[[], None]) -> None:
        self._left, self._action = num_steps, action

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._action()
        return scores


def test_a_generation_outlives_its_daemon_in_the_blocks_it_has(own_daemon: Daemon) -> None:
    own_daemon.start()
    model, ids = llama(), prompt(49)  # room for 15 more, and the last one needs none
    with attached(own_daemon, model) as pool:
        got = ours(model, pool, ids, 16, logits_processor=[AtStep(3, own_daemon.kill)])
        assert torch.equal(got, greedy(model, ids, 16))
        with pytest.raises(tierd.DaemonLost):
            ours(model, pool, ids)


def test_a_generation_that_needs_blocks_of_a_lost_daemon_says_so(own_daemon: Daemon) -> None:
    own_daemon.start()
    model = llama()
    with attached(own_daemon, model) as pool, pytest.raises(tierd.DaemonLost):
        ours(model, pool, prompt(49), 40, logits_processor=[AtStep(3, own_daemon.kill)])


def test_a_hit_cut_short_by_a_corrupt_block_gives_the_same_tokens(own_daemon: Daemon) -> None:
    own_daemon.start(ssd="16MiB")
    model, ids = gemma3(), prompt(200)
    with attached(own_daemon, model) as pool:
        expected = ours(model, pool, ids)
    own_daemon.stop()
    damage(own_daemon.folder / "ssd")
    own_daemon.start(ssd="16MiB")
    with attached(own_daemon, model) as pool:
        assert torch.equal(ours(model, pool, ids), expected)
        (namespace,) = pool.client.status()["tenants"][0]["namespaces"]
        assert namespace["tokens_hit"] > 0
        assert namespace["lost"] > 0


def damage(folder: Path) -> None:
    """Flip a byte in the middle of what each data file holds."""
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20:
            data = bytearray(file.read_bytes())
            filled = [at for at in range(0, len(data), 4096) if any(data[at : at + 4096])]
            data[filled[len(filled) // 2] + 100] ^= 1
            file.write_bytes(data)


def test_one_cache_holds_one_sequence(pool_of: Callable[[Any], Pool]) -> None:
    model, ids = llama(), prompt(20)
    pool = pool_of(model)
    with pytest.raises(ValueError, match=r"batch of 1.*\(2, 20\)"):
        ours(model, pool, ids.expand(2, -1))
    for several in ({"num_beams": 2}, {"num_return_sequences": 2}):
        with pytest.raises((ValueError, NotImplementedError), match="one sequence"):
            generate(model, pool, ids, max_new_tokens=4, do_sample="num_beams" not in several,
                     **several)  # fmt: skip
    assert held(pool.client) == (0, 0)


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


def test_a_model_that_does_not_attend_to_the_cache_is_found_out(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(20)
    with (
        TierdCache(pool_of(model), ids) as cache,
        pytest.raises(RuntimeError, match=r"set_attn_implementation\('tierd'\)"),
    ):
        greedy(model, ids, cache=cache, logits_processor=[cache.channel])


def test_a_mask_that_the_op_would_not_apply_is_refused(pool_of: Callable[[Any], Pool]) -> None:
    model, ids = llama(), prompt(40)
    pool = pool_of(model)
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    with pytest.raises(NotImplementedError, match="attention_mask"):
        ours(model, pool, ids, attention_mask=mask)
    assert held(pool.client) == (0, 0)


def test_another_prompt_than_the_caches_is_never_committed(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(40)
    pool = pool_of(model)
    model.set_attn_implementation(NAME)
    with TierdCache(pool, ids) as cache, pytest.raises(ValueError, match="not the sequence"):
        greedy(model, prompt(40, seed=9), cache=cache, logits_processor=[cache.channel])
    with TierdCache(pool, ids) as cache:
        assert cache.hit == 0
        said = greedy(model, ids, cache=cache, logits_processor=[cache.channel])
        said[0, 45] += 1
        with pytest.raises(ValueError, match="not the sequence"):
            greedy(model, said, 20, cache=cache, logits_processor=[cache.channel])


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


def test_a_cache_is_not_used_after_a_forward_pass_that_was_broken_off(
    pool_of: Callable[[Any], Pool],
) -> None:
    model, ids = llama(), prompt(40)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model.set_attn_implementation(NAME)
    with TierdCache(pool_of(model), ids) as cache:
        with (
            model.model.layers[1].mlp.register_forward_pre_hook(interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            greedy(model, ids, cache=cache)
        with pytest.raises(RuntimeError, match="broken off"):
            greedy(model, torch.cat((ids, ids), 1), cache=cache)


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


def test_a_released_cache_is_not_written(pool_of: Callable[[Any], Pool]) -> None:
    model, ids = llama(), prompt(20)
    cache = TierdCache(pool_of(model), ids)
    cache.release()
    cache.release()
    model.set_attn_implementation(NAME)
    with pytest.raises(tierd.LeaseError, match="released"):
        greedy(model, ids, cache=cache)


def test_the_attention_of_the_model_is_put_back(pool_of: Callable[[Any], Pool]) -> None:
    model = llama()
    pool = pool_of(model)
    ours(model, pool, prompt(20))
    assert model.config._attn_implementation == "sdpa"


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
