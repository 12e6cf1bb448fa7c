"""Shapes and bytes of blocks, the namespace's root, and what a layout refuses."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from tierd.layout import PAGE, KVLayout, LayerGroup

LAYOUT = KVLayout(
    model="tiny",
    num_layers=4,
    num_kv_heads=2,
    head_dim=8,
    dtype="bfloat16",
    groups=(LayerGroup((0, 2), 16), LayerGroup((1, 3), 24)),
    windows=(None, 100, None, 100),
)


def test_a_block_is_layers_k_and_v_heads_tokens_and_dims() -> None:
    assert LAYOUT.block_shape(0) == (2, 2, 2, 16, 8)
    assert LAYOUT.block_shape(1) == (2, 2, 2, 24, 8)
    assert LAYOUT.payload_nbytes(1) == 2 * 2 * 2 * 24 * 8 * 2


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, PAGE), (32, PAGE), (33, 2 * PAGE), (64, 2 * PAGE)]
)
def test_a_block_is_padded_to_whole_pages(head_dim: int, padded: int) -> None:
    layout = KVLayout("m", 1, 1, head_dim, "float32", (LayerGroup((0,), 16),))
    assert layout.payload_nbytes(0) == 2 * 16 * head_dim * 4
    assert layout.block_nbytes(0) == padded


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_dtype(dtype: str, size: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.nbytes_per_token() == 2 * 4 * 2 * 8 * size
    assert layout.payload_nbytes(0) == 2 * 2 * 2 * 16 * 8 * size


def test_a_layer_knows_its_group_and_its_place_in_it() -> None:
    assert [LAYOUT.group_of(layer) for layer in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.raises(ValueError, match="no layer 4"):
        LAYOUT.group_of(4)


def test_a_group_has_the_window_of_its_layers() -> None:
    assert [LAYOUT.window(group) for group in (0, 1)] == [None, 100]
    assert replace(LAYOUT, windows=()).window(1) is None


def test_hashes_come_at_the_gcd_and_groups_end_together_at_the_lcm() -> None:
    assert (LAYOUT.hash_step, LAYOUT.alignment) == (8, 48)
    assert replace(LAYOUT, granule=4).hash_step == 4
    assert replace(LAYOUT, granule=4).alignment == 48


def test_layers_of_equal_block_size_and_window_become_a_group() -> None:
    plain = KVLayout("m", 5, 1, 1, "float32", windows=(None, 8, None, 8, 9))
    assert plain.with_block_sizes([4, 4, 2, 4, 4]).groups == (
        LayerGroup((0,), 4),
        LayerGroup((1, 3), 4),
        LayerGroup((2,), 2),
        LayerGroup((4,), 4),
    )
    assert replace(plain, windows=()).with_block_sizes([4] * 5).groups == (
        LayerGroup((0, 1, 2, 3, 4), 4),
    )


def test_block_sizes_for_too_few_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="groups"):
        replace(LAYOUT, groups=()).with_block_sizes([4, 4])


CHANGES: dict[str, Any] = {
    "model": "other",
    "num_layers": 5,
    "num_kv_heads": 3,
    "head_dim": 9,
    "dtype": "float16",
    "groups": (LayerGroup((0, 2), 8), LayerGroup((1, 3), 24)),
    "windows": (None, 101, None, 101),
    "revision": "main",
    "adapter": "lora",
    "salt": "salt",
    "rank": 1,
    "num_ranks": 2,
    "granule": 4,
}


def changed(name: str) -> KVLayout:
    values = {field.name: getattr(LAYOUT, field.name) for field in fields(KVLayout)}
    if name == "num_layers":  # the other fields follow from it
        values |= {"groups": (), "windows": ()}
    if name == "rank":
        values |= {"num_ranks": 2}
    return KVLayout(**{**values, name: CHANGES[name]})


@pytest.mark.parametrize("name", [field.name for field in fields(KVLayout)])
def test_the_root_changes_with_every_single_field(name: str) -> None:
    base = changed(name)
    base = replace(base, **{name: 4 if name == "num_layers" else getattr(LAYOUT, name)})
    assert base.root("tenant") != changed(name).root("tenant")
    assert [text.split()[0] for text in base.differences(changed(name))] == [name]


def test_the_root_changes_with_the_tenant_and_with_nothing_else() -> None:
    assert LAYOUT.root("one") != LAYOUT.root("two")
    assert LAYOUT.root("one") == replace(LAYOUT).root("one")


def test_the_root_is_the_one_that_disks_know() -> None:
    assert LAYOUT.root("tenant").hex() == "2a058f64790fe6ef852b1f97536c4d95"


def test_which_text_is_in_which_field_matters() -> None:
    one, two = replace(LAYOUT, revision="a"), replace(LAYOUT, adapter="a")
    assert one.root("tenant") != two.root("tenant")


@pytest.mark.parametrize("name", [field.name for field in fields(KVLayout)])
def test_a_layout_survives_json(name: str) -> None:
    layout = changed(name)
    back = KVLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert back == layout
    assert back.root("t") == layout.root("t")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"rank": -1}, "rank"),
        ({"rank": 1}, "rank"),
        ({"granule": -2}, "granule"),
        ({"granule": 3}, "granule"),
        ({"dtype": "int8"}, "dtype"),
        ({"windows": (None,)}, "windows"),
        ({"windows": (None, 0, None, 0)}, "windows"),
        ({"groups": (LayerGroup((0, 1, 2), 16),)}, "groups"),
        ({"groups": (LayerGroup((0, 1, 2, 3), 16),)}, "layers.*window"),
        ({"groups": (LayerGroup((0, 2), 16), LayerGroup((1, 3), 0))}, "block_size"),
    ],
    ids=lambda value: json.dumps(value, default=str) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"layout: .*{named}"):
        replace(LAYOUT, **values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"revision": 1}, "revision"),
        ({"adapter": []}, "adapter"),
        ({"salt": {}}, "salt"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"num_layers": "4"}, "num_layers"),
        ({"num_layers": 4.0}, "num_layers"),
        ({"num_kv_heads": float("nan")}, "num_kv_heads"),
        ({"head_dim": True}, "head_dim"),
        ({"rank": "0"}, "rank"),
        ({"granule": 0.5}, "granule"),
        ({"groups": 1}, "groups"),
        ({"groups": None}, "groups"),
        ({"groups": [1]}, "groups"),
        ({"groups": [{}]}, "groups"),
        ({"groups": [{"layers": [0, 1, 2, 3]}]}, "groups"),
        ({"groups": [{"layers": "0123", "block_size": 4}]}, "groups"),
        ({"groups": [{"layers": [0, 1, 2, 3.5], "block_size": 4}]}, "groups"),
        ({"groups": [{"layers": [0, 1, 2, 3], "block_size": "4"}], "windows": []}, "block_size"),
        ({"windows": 4}, "windows"),
        ({"windows": [None, 4.5, None, 4.5]}, "windows"),
        ({"windows": "abcd"}, "windows"),
        ({"colour": "blue"}, "colour"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_field_of_the_wrong_kind_is_a_value_error(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"layout: .*{named}"):
        KVLayout.from_json({**LAYOUT.to_json(), **values})


@pytest.mark.parametrize("name", ["model", "num_layers", "num_kv_heads", "head_dim", "dtype"])
def test_a_missing_field_is_named(name: str) -> None:
    values = LAYOUT.to_json()
    del values[name]
    with pytest.raises(ValueError, match=f"layout: .*{name}"):
        KVLayout.from_json(values)


@pytest.mark.parametrize("values", [[], "layout", 1, None])
def test_only_an_object_is_a_layout(values: Any) -> None:
    with pytest.raises(ValueError, match="layout: "):
        KVLayout.from_json(values)
