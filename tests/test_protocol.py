"""Frames and bodies: round trips, any chunking, and nothing but ProtocolError for garbage."""

import json
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd import errors, protocol
from tierd.block import HASH_NBYTES, BlockHash
from tierd.errors import ProtocolError
from tierd.protocol import HEADER, AddedBlocks, Kind, LeaseState, Op, StepRequest

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
block_ids = st.integers(-1, 2**63 - 1)
hash_lists = st.lists(st.binary(min_size=HASH_NBYTES, max_size=HASH_NBYTES).map(BlockHash))
tables = st.lists(block_ids, max_size=6)
steps = st.builds(StepRequest, u64, u32, u32, hash_lists, st.booleans())
added_blocks = st.builds(AddedBlocks, u32, tables)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner),
    max_leaves=5,
)


def test_a_frame_that_is_not_whole_is_left_as_it_is() -> None:
    data = protocol.encode(Op.STATUS, Kind.REQUEST, 7, b"body")
    for stop in range(len(data)):
        assert protocol.split(data[:stop]) == ([], 0)


def test_an_oversized_frame_is_refused_as_soon_as_its_header_is_there() -> None:
    header = HEADER.pack(101, Op.STATUS, Kind.REQUEST, 0, 1)
    with pytest.raises(ProtocolError, match="101 bytes; at most 100"):
        protocol.split(header, max_frame=100)
    assert protocol.split(header, max_frame=101) == ([], 0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 16,
        HEADER.pack(0, Op.STATUS, Kind.REQUEST, 1, 1),  # the reserved word is not zero
        HEADER.pack(0, Op.STATUS, max(Kind) + 1, 0, 1),
    ],
    ids=["http", "ones", "reserved", "kind"],
)
def test_a_garbage_header_is_refused_at_once(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.split(garbage)
    with pytest.raises(ProtocolError):  # also behind a good frame
        protocol.split(protocol.encode(Op.STATUS, Kind.REQUEST, 1) + garbage)


@given(data=st.binary(max_size=200))
def test_no_bytes_break_split_otherwise(data: bytes) -> None:
    try:
        whole, used = protocol.split(data)
    except ProtocolError:
        return
    assert sum(HEADER.size + len(frame.body) for frame in whole) == used <= len(data)


@given(
    lease=u64,
    num_tokens=u32,
    room=u32,
    hashes=hash_lists,
    prefill=st.floats(0, 2**100, width=32),
    hints=st.binary(max_size=255),
)
def test_acquire_crosses_unchanged(lease, num_tokens, room, hashes, prefill, hints) -> None:
    asked = (lease, num_tokens, room, hashes, prefill, hints)
    body = protocol.dump_acquire(*asked)
    assert protocol.parse_acquire(body) == (lease, num_tokens, room, prefill, hashes, hints)


@pytest.mark.parametrize("prefill", [-1.0, float("inf"), float("nan")])
def test_an_acquire_at_no_possible_speed_is_refused(prefill: float) -> None:
    with pytest.raises(ProtocolError, match="tokens a second"):
        protocol.parse_acquire(protocol.dump_acquire(1, 2, 3, HASHES, prefill))


@given(first=u32, hashes=hash_lists)
def test_a_lookup_crosses_unchanged(first, hashes) -> None:
    assert protocol.parse_lookup(protocol.dump_lookup(first, hashes)) == (first, hashes)


@given(sent=st.lists(steps, max_size=5))
def test_steps_cross_unchanged(sent: list[StepRequest]) -> None:
    assert protocol.parse_steps(protocol.dump_steps(sent)) == sent


@given(leases=st.lists(u64))
def test_released_leases_cross_unchanged(leases: list[int]) -> None:
    assert protocol.parse_leases(protocol.dump_leases(leases)) == leases


@given(lease=u64, hit=u32, room=u32, ready=u64, groups=st.none() | st.lists(tables, min_size=1))
def test_a_lease_crosses_unchanged(lease, hit, room, ready, groups) -> None:
    state = LeaseState(lease, hit, room, ready, groups)
    assert protocol.parse_lease(protocol.dump_lease(state), len(groups or ())) == state


@given(data=st.data(), groups=st.integers(1, 4), count=st.integers(0, 4))
def test_added_blocks_cross_unchanged(data: st.DataObject, groups: int, count: int) -> None:
    step = st.lists(added_blocks, min_size=groups, max_size=groups)
    added = data.draw(st.lists(step, min_size=count, max_size=count))
    assert protocol.parse_added(protocol.dump_added(added), count, groups) == added


@given(forks=st.lists(st.tuples(u64, u64, u32)), cuts=st.lists(st.tuples(u64, u32)))
def test_forks_and_cuts_cross_unchanged(
    forks: list[tuple[int, int, int]], cuts: list[tuple[int, int]]
) -> None:
    assert protocol.parse_forks(protocol.dump_forks(forks)) == forks
    assert protocol.parse_cuts(protocol.dump_cuts(cuts)) == cuts
    rooms = [length for _, length in cuts]
    assert protocol.parse_rooms(protocol.dump_rooms(rooms)) == rooms


@pytest.mark.parametrize("parse", [protocol.parse_forks, protocol.parse_cuts])
def test_half_a_fork_or_cut_is_a_protocol_error(parse) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError, match="of 7 bytes"):
        parse(bytes(7))


@given(values=st.dictionaries(st.text(), json_values))
def test_json_crosses_unchanged(values: dict[str, object]) -> None:
    assert protocol.parse(protocol.dump(values)) == values


DAEMON_PARSERS = [
    protocol.parse_acquire,
    protocol.parse_steps,
    protocol.parse_lookup,
    protocol.parse_leases,
    protocol.parse,
    protocol.parse_error,
]


@pytest.mark.parametrize("parse", DAEMON_PARSERS)
@given(body=st.binary(max_size=120))
def test_no_body_breaks_what_the_daemon_parses(parse, body: bytes) -> None:
    try:
        parse(body)
    except ProtocolError:
        return


HASHES = [BlockHash(bytes([n]) * HASH_NBYTES) for n in range(3)]
STEPS = [StepRequest(1, 2, 3, HASHES), StepRequest(4, 5, 6, HASHES[:1])]


def test_a_truncated_acquire_is_refused() -> None:
    body = protocol.dump_acquire(1, 2, 3, HASHES)
    whole = {len(body) - HASH_NBYTES * n for n in range(4)}  # one with fewer hashes is well formed
    for stop in set(range(len(body))) - whole:
        with pytest.raises(ProtocolError, match="ACQUIRE"):
            protocol.parse_acquire(body[:stop])


def test_truncated_or_lengthened_steps_are_refused() -> None:
    body = protocol.dump_steps(STEPS)
    for stop in range(len(body)):
        with pytest.raises(ProtocolError):
            protocol.parse_steps(body[:stop])
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        protocol.parse_steps(body + b"x")


def test_steps_that_announce_too_much_are_refused_before_they_are_made() -> None:
    with pytest.raises(ProtocolError, match="4294967295 steps"):
        protocol.parse_steps(struct.pack("<I", 2**32 - 1) + bytes(28))
    head = struct.pack("<IQIII", 1, 1, 2, 3, 2**32 - 1)
    with pytest.raises(ProtocolError, match="4294967295 hashes"):
        protocol.parse_steps(head + bytes(16))


def test_truncated_leases_are_refused() -> None:
    with pytest.raises(ProtocolError, match="RELEASE of 7 bytes"):
        protocol.parse_leases(array("Q", [1]).tobytes()[:7])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b"null", b'{"a": }'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        protocol.parse(body)


def test_json_nested_without_end_is_refused() -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        protocol.parse(b'{"a":' * 100_000)


CROSSING = [
    errors.TierdError,
    errors.OutOfBlocks,
    errors.ProtocolError,
    errors.Refused,
    errors.LayoutMismatch,
    errors.LeaseError,
    errors.ConfigError,
]


@pytest.mark.parametrize("kind", CROSSING)
def test_an_error_crosses_as_its_own_class(kind: type[errors.TierdError]) -> None:
    back = protocol.parse_error(protocol.dump_error(kind("why, exactly: ü")))
    assert type(back) is kind
    assert str(back) == "why, exactly: ü"


def test_an_error_of_a_class_we_do_not_know_is_still_ours() -> None:
    back = protocol.parse_error(json.dumps({"error": "exec", "message": "m"}).encode())
    assert type(back) is errors.TierdError
    assert str(back) == "m"


def test_engine_and_daemon_look_for_the_same_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("TIERD_SOCKET", "/here.sock")
    assert protocol.default_socket() == "/here.sock"
    monkeypatch.delenv("TIERD_SOCKET")
    assert protocol.default_socket() == "/run/user/7/tierd/tierd.sock"
