"""The ops against their definition: float64, one sequence at a time, on the same rounded inputs."""

from collections.abc import Iterator
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from tests.op_calls import (
    BACKENDS,
    LAYERS,
    MIXED,
    PADDING,
    TOLERANCE,
    assert_right,
    int32,
    make_call,
    pool_views,
    run,
)
from tierd import ops
from tierd.ops import cpp, reference
from tierd.ops.call import AttentionCall


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    with torch.no_grad():
        yield
    ops.set_backend(None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (9, 3), (4, 1)], ids=str)
def test_decode_prefill_and_chunks_in_one_batch_match_the_definition(
    heads: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    assert_right(make_call(MIXED, heads, block_size, dtype=dtype))


OPTIONS = {
    "not causal": {"causal": False},
    "window of one": {"window_left": 0},
    "window": {"window_left": 10},
    "wide window": {"window_left": 1000},
    "window, not causal": {"window_left": 10, "causal": False},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
    "all": {
        "window_left": 10,
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
        "sinks": torch.tensor([0.5, -2.0, 3.0, 0.0]),
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_matches_the_definition(
    options: dict[str, object], dtype: torch.dtype, backend: str
) -> None:
    ops.set_backend(backend)
    assert_right(make_call(MIXED, dtype=dtype, **options))


def test_a_long_prompt_is_right_across_runs_of_queries() -> None:
    assert_right(make_call([(600, 520)], (2, 1), window_left=70))
    assert_right(make_call([(600, 600)], (2, 1), softcap=3.0))
    assert_right(make_call([(600, 300)], (2, 1), window_left=70, causal=False))


@st.composite
def calls(draw: st.DrawFn) -> AttentionCall:
    length = st.integers(0, 40).flatmap(
        lambda keys: st.tuples(st.just(keys), st.integers(0, keys or 3))
    )
    heads_kv = draw(st.integers(1, 3))
    return make_call(
        draw(st.lists(length, max_size=4)),
        (heads_kv * draw(st.integers(1, 4)), heads_kv),
        draw(st.sampled_from([1, 2, 7, 16, 64])),
        draw(st.sampled_from([8, 16, 40])),
        draw(st.sampled_from(list(TOLERANCE))),
        causal=draw(st.booleans()),
        window_left=draw(st.integers(-1, 20)),
        softcap=draw(st.sampled_from([0.0, 0.0, 4.0])),
    )


@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_any_ragged_batch_matches_the_definition(call: AttentionCall) -> None:
    with torch.no_grad():
        assert_right(call)


def test_a_reference_worked_by_hand() -> None:
    call = make_call([(2, 1)], (1, 1), block_size=2, dim=2)
    call.q[:] = torch.tensor([1.0, 0.0])
    block = int(call.block_table[0, 0])
    call.k_cache[block, 0] = torch.tensor([[0.0, 5.0], [1.0, 5.0]])
    call.v_cache[block, 0] = torch.tensor([[4.0, 0.0], [0.0, 8.0]])
    call = call._replace(scale=torch.tensor(3.0).log().item())
    out, lse = reference.attention(call, torch.float64)
    torch.testing.assert_close(out[0, 0].tolist(), [1.0, 6.0])  # weights 1/4 and 3/4
    torch.testing.assert_close(lse.exp().item(), 4.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_no_earlier_key_returns_each_token_its_own_value(backend: str) -> None:
    ops.set_backend(backend)
    call = run(make_call([(16, 16)], (2, 2), window_left=0))
    values = call.v_cache[int(call.block_table[0, 0])]
    torch.testing.assert_close(call.out, values.transpose(0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_outside_the_sequences_has_no_influence(backend: str) -> None:
    ops.set_backend(backend)
    dirty = make_call(MIXED)
    clean = dirty._replace(
        k_cache=dirty.k_cache.nan_to_num(0.0),
        v_cache=dirty.v_cache.nan_to_num(0.0),
        block_table=dirty.block_table.where(dirty.block_table >= 0, 0),
        out=torch.empty_like(dirty.out),
    )
    assert torch.equal(run(dirty).out, run(clean).out)


def test_blocks_behind_the_window_may_be_gone_from_the_table() -> None:
    whole = make_call([(80, 1), (80, 8)], window_left=20)
    cut = whole._replace(block_table=whole.block_table.clone(), out=torch.empty_like(whole.out))
    cut.block_table[0, : (80 - 1 - 20) // 16] = -1
    cut.block_table[1, : (80 - 8 - 20) // 16] = 2**31 - 1
    for backend in BACKENDS:
        ops.set_backend(backend)
        assert torch.equal(run(cut).out, run(whole).out)
        assert_right(cut)


def test_a_strided_view_of_a_pool_gives_the_same_bits_as_contiguous_caches() -> None:
    view = make_call(MIXED)
    assert view.k_cache.stride(0) == LAYERS * 2 * 2 * 16 * 32 + PADDING
    plain = view._replace(
        k_cache=view.k_cache.contiguous(),
        v_cache=view.v_cache.contiguous(),
        out=torch.empty_like(view.out),
    )
    assert torch.equal(run(view).out, run(plain).out)


def test_token_major_caches_and_strided_queries_are_read_as_they_lie() -> None:
    call = make_call(MIXED)
    token_major = call.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.cat([call.q, torch.randn(call.q.shape[0], 4, 32)], dim=1)
    assert_right(call._replace(k_cache=token_major, q=fused[:, :4]))


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, 2.0, 3.0, 4.0])])
def test_queries_of_an_empty_sequence_get_zero_and_an_empty_sum(sinks: Tensor | None) -> None:
    call = run(make_call([(0, 1), (5, 1), (0, 3)], sinks=sinks))
    empty = torch.tensor([True, False, True, True, True])
    assert call.lse is not None
    assert torch.equal(call.out[empty], torch.zeros(4, 4, 32))
    expected = torch.full((4,), -torch.inf) if sinks is None else sinks
    assert torch.equal(call.lse[empty], expected.expand(4, 4))
    assert call.out[1].isfinite().all()


def test_a_batch_of_nothing_is_fine() -> None:
    run(make_call([]))
    run(make_call([(0, 0)]))


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    call = run(make_call([(50, 50)]))
    parts = []
    for start, end in ((0, 20), (20, 21), (21, 50)):
        parts.append(
            ops.paged_attention(
                call.q[start:end],
                call.k_cache,
                call.v_cache,
                call.block_table,
                int32(end),
                int32(0, end - start),
                end - start,
                call.scale,
            )
        )
    torch.testing.assert_close(torch.cat(parts), call.out)


def test_the_function_equals_the_out_variant() -> None:
    call = run(make_call(MIXED, softcap=2.0))
    lse, out = torch.empty(call.q.shape[:2]), torch.empty_like(call.q)
    fresh = ops.paged_attention(*call[2:10], softcap=2.0, lse=lse)
    assert torch.equal(fresh, call.out)
    assert call.lse is not None
    assert torch.equal(lse, call.lse)
    assert ops.paged_attention(*call[2:10], softcap=2.0, out=out) is out
    assert torch.equal(out, call.out)


def test_a_tensor_made_in_inference_mode_does_not_spoil_later_calls() -> None:
    with torch.inference_mode():
        assert_right(make_call([(300, 1)], block_size=16))
    assert_right(make_call([(300, 1)], block_size=16))
    assert_right(make_call([(700, 1)], block_size=16))
    with torch.inference_mode():
        assert_right(make_call([(700, 1)], block_size=16))


def test_threads_do_not_share_their_scratch() -> None:
    batches = [make_call([(100 + 16 * n, 1)]) for n in range(4)]
    expected = [run(call).out.clone() for call in batches]
    wrong = []

    def repeat(index: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(run(batches[index]).out, expected[index]):
                    wrong.append(index)

    threads = [Thread(target=repeat, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_backend_can_be_seen_and_forced() -> None:
    default = "cpp" if cpp.available() else "torch"
    assert ops.backend() == default
    ops.set_backend("reference")
    assert ops.backend() == "reference"
    with pytest.raises(ValueError, match=r"backend must be one of .*torch, reference or None"):
        ops.set_backend("magic")
    ops.set_backend(None)
    assert ops.backend() == default


@pytest.mark.parametrize("num_tokens", [0, 1, 45])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_written_tokens_are_attended_to_like_contiguous_ones(
    num_tokens: int, block_size: int
) -> None:
    num_blocks = -(-45 // block_size) + 1
    k_cache, v_cache = pool_views(num_blocks, 2, block_size, 32)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    position = torch.arange(num_tokens)
    slots = order[position // block_size] * block_size + position % block_size
    q, k, v = (torch.randn(num_tokens, heads, 32) for heads in (4, 2, 2))
    ops.write_kv(k, v, k_cache, v_cache, slots)
    assert int(k_cache.isfinite().sum()) == int(v_cache.isfinite().sum()) == k.numel()
    out = ops.paged_attention(
        q,
        k_cache,
        v_cache,
        order[None].int(),
        int32(num_tokens),
        int32(0, num_tokens),
        num_tokens,
        0.125,
    )
    if num_tokens:
        k, v = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
        expected = F.scaled_dot_product_attention(
            q.transpose(0, 1), k, v, is_causal=True, scale=0.125
        )
        torch.testing.assert_close(out, expected.transpose(0, 1))


@pytest.mark.parametrize("slots", [[-1], [5, -1, 3], [-1, -1]], ids=str)
def test_a_token_at_slot_minus_one_is_not_written(slots: list[int]) -> None:
    k_cache, v_cache = pool_views(2, 1, 4, 8)
    k, v = torch.randn(2, len(slots), 1, 8)
    ops.write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    assert int(k_cache.isfinite().sum()) == 8 * sum(slot >= 0 for slot in slots)
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(k_cache[slot // 4, 0, slot % 4], k[token, 0])
            assert torch.equal(v_cache[slot // 4, 0, slot % 4], v[token, 0])


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("options", [{}, {"window_left": 10, "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("with_lse", [True, False])
def test_paged_attention_passes_opcheck(options: dict[str, object], with_lse: bool) -> None:
    call = make_call([(37, 1), (20, 20), (50, 9)])
    call = call._replace(out=torch.zeros_like(call.q), lse=torch.zeros(30, 4) if with_lse else None)
    opcheck(torch.ops.tierd.paged_attention.default, call[:10], options, test_utils=CHECKS)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_write_kv_passes_opcheck(num_tokens: int) -> None:
    caches = [torch.zeros(2, 3, 2, 4, 8)[:, 1] for _ in range(2)]
    tokens = torch.randn(2, num_tokens, 2, 8).unbind()
    arguments = (*tokens, *caches, torch.arange(num_tokens))
    opcheck(torch.ops.tierd.write_kv.default, arguments, test_utils=CHECKS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own
def test_both_ops_compile_into_one_graph_over_a_shared_pool() -> None:
    def layer(call: AttentionCall, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        ops.write_kv(k, v, call.k_cache, call.v_cache, slots)
        return ops.paged_attention(*call[2:10]) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (20, 37):
        call = make_call([(length, 3)])
        last = int(call.block_table[0, (length - 1) // 16])
        slots = torch.tensor([last * 16 + (length - 1) % 16])
        k, v = torch.randn(2, 1, 2, 32)
        out = compiled(call, k, v, slots)
        assert torch.equal(call.k_cache[last, :, (length - 1) % 16], k[0])
        assert torch.equal(out, layer(call, k, v, slots))


def by_two(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[..., ::2]


BAD = {
    "dtype": (TypeError, lambda x: x.to(torch.float64), "q k_cache v_cache out lse block_table"
              " seq_lens cu_seqlens_q sinks alibi_slopes"),
    "shape": (ValueError, lambda x: x.flatten()[:-1], "q k_cache v_cache out lse block_table"
              " seq_lens cu_seqlens_q sinks alibi_slopes"),
    "stride": (ValueError, by_two, "q k_cache v_cache out block_table"),
    "device": (ValueError, lambda x: x.to("meta"), "k_cache v_cache out lse block_table seq_lens"
               " cu_seqlens_q sinks alibi_slopes"),
}  # fmt: skip
BAD_TENSORS = [(kind, name) for kind, (_, _, names) in BAD.items() for name in names.split()]


def optional_call() -> AttentionCall:
    return make_call(
        [(37, 1), (20, 20)], sinks=torch.zeros(4), alibi_slopes=torch.zeros(4), softcap=1.0
    )


@pytest.mark.parametrize(("kind", "name"), BAD_TENSORS)
def test_a_wrong_tensor_is_named_and_nothing_is_written(kind: str, name: str) -> None:
    error, spoil, _ = BAD[kind]
    good = optional_call()
    call = good._replace(**{name: spoil(getattr(good, name))})
    named = "q must|q, k, v must" if name == "q" and kind != "dtype" else name
    with pytest.raises(error, match=named):
        run(call)
    assert good.out.isnan().all()


BAD_VALUES = {
    "a negative id": ({"block_table": int32(0, -1, 2, 0).view(1, 4)}, r"block_table\[0, 1\] is -1"),
    "an id too high": ({"block_table": int32(0, 1, 5, 0).view(1, 4)}, r"block_table\[0, 2\] is 5"),
    "a narrow table": ({"block_table": int32(0, 1).view(1, 2)}, "block_table: 2 blocks of 16"),
    "more queries than keys": ({"seq_lens": int32(3)}, r"seq_lens\[0\] is 3, with 4 queries"),
    "a negative length": ({"seq_lens": int32(-1)}, r"seq_lens\[0\] is -1"),
    "too few rows": ({"cu_seqlens_q": int32(0, 3)}, "cu_seqlens_q ends at 3, q has 4"),
    "a late start": ({"cu_seqlens_q": int32(1, 4)}, "cu_seqlens_q must rise from 0"),
    "a low maximum": ({"max_seqlen_q": 3}, "max_seqlen_q 3: sequence 0 has 4"),
    "a window below -1": ({"window_left": -2}, "window_left must be -1"),
    "a negative softcap": ({"softcap": -1.0}, "softcap must be 0"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "text"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_wrong_value_is_named_and_nothing_is_written(
    change: dict[str, object], text: str, backend: str
) -> None:
    ops.set_backend(backend)
    call = make_call([(40, 4)])._replace(**change)
    with pytest.raises(ValueError, match=text):
        run(call)
    assert call.out.isnan().all()


def test_a_bad_block_is_found_in_any_row_of_a_batch() -> None:
    call = make_call([(40, 1), (0, 1), (33, 2)])
    call.block_table[2, 2] = 99
    with pytest.raises(ValueError, match=r"block_table\[2, 2\] is 99, not a block of 0 to 7"):
        run(call)


def test_heads_that_do_not_divide_are_refused() -> None:
    call = make_call([(40, 4)], heads=(3, 2))
    with pytest.raises(ValueError, match="q: 3 heads are no multiple of k_cache's 2"):
        run(call)


def test_a_scale_for_a_cache_that_has_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"k_scale: a cache of torch.float32 has no scale"):
        run(make_call([(4, 1)], k_scale=torch.ones(1)))


def test_gradients_are_refused_rather_than_lost() -> None:
    call = make_call([(4, 1)])
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no backward"):
        run(call._replace(q=call.q.clone().requires_grad_()))


BAD_TOKENS = {
    "k": (ValueError, {"k": torch.zeros(3, 16)}, "k must be"),
    "heads": (ValueError, {"k": torch.zeros(3, 1, 8)}, "k has 1 heads, k_cache 2"),
    "v": (ValueError, {"v": torch.zeros(2, 2, 8)}, "v must be"),
    "k dtype": (TypeError, {"k": torch.zeros(3, 2, 8).double()}, "q, k, v must be float32"),
    "cache dtype": (TypeError, {"v_cache": torch.zeros(2, 2, 4, 8).half()}, "v_cache must be"),
    "slot dtype": (TypeError, {"slot_mapping": int32(0, 1, 2)}, "slot_mapping must be"),
    "slot shape": (ValueError, {"slot_mapping": torch.arange(2)}, "slot_mapping must be"),
    "high slot": (ValueError, {"slot_mapping": torch.tensor([0, 8, 1])}, "slot_mapping goes"),
    "low slot": (ValueError, {"slot_mapping": torch.tensor([0, -2, 1])}, "slot_mapping goes"),
}


@pytest.mark.parametrize(("error", "change", "text"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_write_kv_names_what_is_wrong_and_writes_nothing(
    error: type[Exception], change: dict[str, Tensor], text: str
) -> None:
    k_cache, v_cache = pool_views(2, 2, 4, 8)
    good = {
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.arange(3),
    }
    with pytest.raises(error, match=text):
        ops.write_kv(**{**good, **change})
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()
