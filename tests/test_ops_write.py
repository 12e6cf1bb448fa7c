"""Writes into caches of one byte a number and of two head sizes; two attentions merged."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.op_calls import TOLERANCE, assert_right, int32, make_call, quantised_call, run
from tierd import ops
from tierd.ops import reference
from tierd.ops.call import AttentionCall
from tierd.ops.quantised import QUANTISED, largest

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
# Per tensor, block, (block, head), (token, head), of 3 blocks, 2 heads and 4 slots.
SCALES = [(), (1,), (3, 1, 1), (3, 2, 1), (3, 2, 4)]


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    with torch.no_grad():
        yield
    ops.set_backend(None)


def written(
    dtype: torch.dtype, scale: Tensor, tokens: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    caches = [torch.full((3, 2, 4, dim), 7).to(dtype) for dim in (16, 8)]
    ops.write_kv(tokens, tokens[..., :8], *caches, slots, scale, scale * 2)
    return caches[0], caches[1]


@pytest.mark.parametrize("shape", SCALES, ids=str)
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_what_is_written_times_its_scale_is_the_token(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tokens = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    scale = (5 + torch.rand(shape)) / largest(dtype)
    slots = torch.tensor([11, 0, -1, 6, 3])
    k_cache, v_cache = written(dtype, scale, tokens, slots)
    whole = scale.expand(3, 2, 4)
    # int8 is even over its range, a float of m bits relative to the number: half a step of each.
    relative = {torch.int8: 0.0, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}[dtype]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = (slot // 4, slice(None), slot % 4)
            step = whole[at][:, None]
            absolute = 0.501 * step if dtype == torch.int8 else 0.01 * step
            error = (k_cache[at].float() * step - tokens[token]).abs()
            assert (error <= absolute + relative * tokens[token].abs()).all()
            error = (v_cache[at].float() * 2 * step - tokens[token, :, :8]).abs()
            assert (error <= 2 * absolute + relative * tokens[token, :, :8].abs()).all()
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (k_cache.float().transpose(1, 2).reshape(12, -1)[untouched] == 7).all()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_numbers_beyond_the_range_are_stored_as_its_ends(dtype: torch.dtype) -> None:
    tokens = torch.tensor([1e9, -1e9]).repeat(8).expand(1, 2, 16)
    k_cache, _ = written(dtype, torch.tensor(1.0), tokens, torch.tensor([0]))
    ends = torch.tensor([1.0, -1.0]).repeat(8) * largest(dtype)
    assert torch.equal(k_cache[0, 0, 0].float(), ends)


@pytest.mark.parametrize("backend", ["torch", "reference", None], ids=str)
@pytest.mark.parametrize("dims", [(32, 16), (16, 48)], ids=str)
def test_values_may_be_of_another_size_than_keys(dims: tuple[int, int], backend: str) -> None:
    ops.set_backend(backend)
    for dtype in TOLERANCE:
        batch = [(37, 1), (20, 20), (50, 9), (0, 1)]
        assert_right(make_call(batch, dim=dims[0], v_dim=dims[1], dtype=dtype))
        assert_right(make_call(batch, dim=dims[0], v_dim=dims[1], dtype=dtype, softcap=2.0))
    fresh = ops.paged_attention(*make_call(batch, dim=dims[0], v_dim=dims[1])[2:10])
    assert fresh.shape == (31, 4, dims[1])


BAD_SCALES = {
    "missing": ({"k_scale": None}, ValueError, "k_scale is missing"),
    "shape": ({"v_scale": torch.ones(4)}, ValueError, "v_scale must have one element"),
    "dtype": ({"v_scale": torch.ones(1).double()}, TypeError, "v_scale must be"),
    "device": ({"k_scale": torch.ones(1, device="meta")}, ValueError, "k_scale must be on"),
}


@pytest.mark.parametrize(("change", "error", "text"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_a_wrong_scale_is_named_and_nothing_is_written(
    change: dict[str, Tensor | None], error: type[Exception], text: str
) -> None:
    call = quantised_call(make_call([(20, 1)]), torch.int8, (0, 0, 1))
    with pytest.raises(error, match=text):
        run(call._replace(**change))  # type: ignore[arg-type]
    assert call.out.isnan().all()
    k_cache = call.k_cache.clone()
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale, **change}
    tokens = torch.zeros(2, 1, 2, 32)
    with pytest.raises(error, match=text):
        ops.write_kv(*tokens, k_cache, call.v_cache, torch.zeros(1).long(), **scales)
    assert torch.equal(k_cache, call.k_cache)


def in_two(call: AttentionCall, cut: int) -> tuple[Tensor, Tensor]:
    """A decode step over keys [0, cut) and [cut, end) apart, then merged."""
    assert call.lse is not None
    first = call._replace(
        out=torch.empty_like(call.out), lse=torch.empty_like(call.lse), seq_lens=int32(cut)
    )
    second = call._replace(
        out=torch.empty_like(call.out),
        lse=torch.empty_like(call.lse),
        seq_lens=call.seq_lens - cut,
        block_table=call.block_table[:, cut // 16 :],
    )
    run(first), run(second)
    assert first.lse is not None
    assert second.lse is not None
    ops.merge_states(first.out, first.lse, second.out, second.lse)
    return first.out, first.lse


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_parts_merged_are_the_whole(dtype: torch.dtype) -> None:
    call = make_call([(100, 1)], dtype=dtype)
    exact, exact_lse = reference.attention(call, torch.float64)
    for cut in (16, 48, 96):
        out, lse = in_two(call, cut)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)


def test_a_part_without_keys_changes_nothing() -> None:
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    none, no_lse = torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf)
    merged, merged_lse = out.clone(), lse.clone()
    ops.merge_states(merged, merged_lse, none, no_lse)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    ops.merge_states(none, no_lse, out, lse)
    torch.testing.assert_close(none, out)
    nothing = torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf)
    ops.merge_states(*nothing, torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf))
    assert not nothing[0].any()
    assert (nothing[1] == -torch.inf).all()


BAD_STATES = {
    "out": (ValueError, {"out": torch.zeros(3, 8)}, "out must be"),
    "out dtype": (TypeError, {"out": torch.zeros(3, 2, 8).double()}, "out must be"),
    "lse": (ValueError, {"lse": torch.zeros(2, 3)}, "lse must be"),
    "out2": (TypeError, {"out2": torch.zeros(3, 2, 8).half()}, "out2 must be"),
    "lse2": (TypeError, {"lse2": torch.zeros(3, 2).half()}, "lse2 must be"),
}


@pytest.mark.parametrize(("error", "change", "text"), BAD_STATES.values(), ids=BAD_STATES)
def test_a_wrong_state_is_named(
    error: type[Exception], change: dict[str, Tensor], text: str
) -> None:
    good = {
        "out": torch.zeros(3, 2, 8),
        "lse": torch.zeros(3, 2),
        "out2": torch.ones(3, 2, 8),
        "lse2": torch.zeros(3, 2),
    }
    with pytest.raises(error, match=text):
        ops.merge_states(**{**good, **change})
    assert not good["out"].any()


def test_merge_states_passes_opcheck() -> None:
    arguments = (torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(3, 2, 8), torch.randn(3, 2))
    opcheck(torch.ops.tierd.merge_states.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("dtype", [torch.int8], ids=str)
def test_quantised_ops_pass_opcheck(dtype: torch.dtype) -> None:
    call = quantised_call(make_call([(37, 1), (20, 20)]), dtype, (0, 0, 1))
    call = call._replace(out=torch.zeros_like(call.q), lse=None)
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    opcheck(torch.ops.tierd.paged_attention.default, call[:10], scales, test_utils=CHECKS)
    tokens = torch.randn(2, 3, 2, 32).unbind()
    arguments = (*tokens, call.k_cache, call.v_cache, torch.arange(3))
    opcheck(torch.ops.tierd.write_kv.default, arguments, scales, test_utils=CHECKS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own
def test_quantised_writes_and_merged_attentions_compile_into_one_graph() -> None:
    def layer(call: AttentionCall, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
        ops.write_kv(k, v, call.k_cache, call.v_cache, slots, **scales)
        lses = [torch.empty(call.q.shape[:2]) for _ in range(2)]
        outs = [ops.paged_attention(*call[2:10], lse=lse, **scales) for lse in lses]
        ops.merge_states(outs[0], lses[0], outs[1], lses[1])
        return outs[0] * 2, lses[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (20, 37):
        call = quantised_call(make_call([(length, 3)]), torch.int8, (0, 0, 1))
        slots = call.block_table[0, :1].long() * 16
        k, v = torch.randn(2, 1, 2, 32)
        for ours, theirs in zip(compiled(call, k, v, slots), layer(call, k, v, slots), strict=True):
            assert torch.equal(ours, theirs)
