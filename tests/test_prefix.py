"""The hash chain: the same for any split, rooted, and never Python's own hash()."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.block import HASH_NBYTES, BlockHash
from tierd.prefix import PrefixChain, token_array

ROOT = BlockHash(bytes(HASH_NBYTES))
OTHER = BlockHash(b"other namespace!")

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=24)


def hashes(tokens, granule: int = 2, root: BlockHash = ROOT, extra=None) -> list[BlockHash]:
    chain = PrefixChain(root, granule, extra)
    chain.append(tokens)
    return chain.hashes


def common(one: list[BlockHash], two: list[BlockHash]) -> int:
    """How many leading hashes are equal, having checked that none after them are."""
    equal = [a == b for a, b in zip(one, two, strict=True)]
    leading = equal.index(False) if False in equal else len(equal)
    assert not any(equal[leading:]), "a hash after a difference is equal"
    return leading


@given(parts=st.lists(token_lists, max_size=6), granule=st.integers(1, 7))
def test_any_split_of_appends_gives_the_chain_of_one(parts: list[list[int]], granule: int) -> None:
    chain = PrefixChain(ROOT, granule)
    for part in parts:
        chain.append(part)
    whole = [token for part in parts for token in part]
    assert chain.hashes == hashes(whole, granule)
    assert len(chain.hashes) == len(whole) // granule


@given(prefix=token_lists, one=token_lists, two=token_lists)
def test_equal_prefixes_have_equal_hashes(prefix, one, two) -> None:
    full = len(prefix) // 2
    assert hashes(prefix + one)[:full] == hashes(prefix + two)[:full] == hashes(prefix)


@given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=8), position=st.integers(0, 7))
def test_one_token_changes_every_hash_from_its_granule_on(tokens, position) -> None:
    changed = list(tokens)
    changed[position] += 10
    assert common(hashes(tokens), hashes(changed)) == position // 2


@given(position=st.integers(0, 7))
def test_extra_keys_change_every_hash_from_their_position_on(position: int) -> None:
    tokens = list(range(8))
    plain, image = hashes(tokens), hashes(tokens, extra={position: b"image"})
    assert common(plain, image) == position // 2
    assert common(image, hashes(tokens, extra={position: b"another"})) == position // 2


def test_an_extra_key_is_bound_to_its_very_position() -> None:
    tokens = [5] * 4
    assert common(hashes(tokens, 4, extra={0: b"x"}), hashes(tokens, 4, extra={1: b"x"})) == 0
    assert common(hashes(tokens, 4, extra={0: b"xy"}), hashes(tokens, 4, extra={0: b"x"})) == 0
    one, two = {0: b"x", 1: b"y"}, {0: b"xy"}
    assert common(hashes(tokens, 4, extra=one), hashes(tokens, 4, extra=two)) == 0


def test_extra_keys_past_the_tokens_known_so_far_count_once_they_are_reached() -> None:
    chain = PrefixChain(ROOT, 2, {3: b"image"})
    chain.append([1, 2, 3])
    assert chain.hashes == hashes([1, 2])
    chain.append([4])
    assert chain.hashes == hashes([1, 2, 3, 4], extra={3: b"image"})


def test_the_root_separates_namespaces() -> None:
    assert common(hashes([1, 2, 3, 4]), hashes([1, 2, 3, 4], root=OTHER)) == 0


def test_a_granule_that_is_not_full_has_no_hash() -> None:
    assert hashes([1], 2) == []
    assert len(hashes([1, 2, 3], 2)) == 1


def test_the_granule_decides_what_is_named() -> None:
    assert not set(hashes(range(8), 2)) & set(hashes(range(8), 4))


def test_every_kind_of_integers_is_the_same_tokens() -> None:
    kinds = [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], ">i8"), np.array([1, 2], "u1")]
    assert {tuple(hashes(tokens)) for tokens in kinds} == {tuple(hashes([1, 2]))}
    assert all(token_array(tokens).dtype.str == "<u4" for tokens in kinds)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [2**64],
        [1.0],
        ["1"],
        [True],
        [[1, 2]],
        7,
        np.array([1.5]),
        np.array([-1], "i8"),
    ],
    ids=repr,
)
def test_what_is_no_token_id_is_refused_and_changes_nothing(tokens) -> None:
    chain = PrefixChain(ROOT, 1)
    chain.append([1])
    with pytest.raises(ValueError, match="tokens"):
        chain.append(tokens)
    chain.append([2])
    assert chain.hashes == hashes([1, 2], 1)


def test_no_tokens_are_tokens_too() -> None:
    assert hashes([]) == hashes(np.array([])) == []
    assert len(token_array([2**32 - 1, 0])) == 2


def test_known_digests_have_not_changed() -> None:
    """They name blocks on disks: a change of the format is a change of every namespace."""
    assert [key.hex() for key in hashes([1, 2, 3, 4])] == GOLDEN
    assert [key.hex() for key in hashes([1, 2], extra={1: b"image"})] == GOLDEN_EXTRA


GOLDEN = ["5755319e7435b6b328396542a9e681c9", "9277483fb003365394603ee5d67b1cfe"]
GOLDEN_EXTRA = ["47774e39016ec81464bfa1d4d96d2676"]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_process_with_another_hash_seed_agrees(seed: str) -> None:
    program = (
        "from tierd.prefix import PrefixChain\n"
        "chain = PrefixChain(bytes(16), 2, {1: b'image'})\n"
        "chain.append([1, 2, 3, 4])\n"
        "print(*(key.hex() for key in chain.hashes))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    here = hashes([1, 2, 3, 4], extra={1: b"image"})
    assert found.stdout.split() == [key.hex() for key in here]
