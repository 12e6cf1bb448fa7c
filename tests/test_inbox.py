"""Frames come out of an inbox as they were sent, whatever the pieces they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd import inbox, protocol
from tierd.errors import ProtocolError
from tierd.inbox import Inbox
from tierd.protocol import HEADER, Frame, Kind, Op

frames = st.builds(
    Frame,
    st.sampled_from(Op),
    st.sampled_from(Kind),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=40) | st.integers(0, 4 * inbox.NBYTES).map(lambda n: b"x" * n),
)


def encoded(*sent: Frame) -> bytes:
    return b"".join(
        protocol.encode(frame.op, Kind(frame.kind), frame.request, frame.body) for frame in sent
    )


def put(into: Inbox, data: bytes) -> list[Frame]:
    """As a socket would: as much at once as there is space."""
    out = []
    while data:
        space = into.space()
        assert len(space), "an inbox has room for more"
        nbytes = min(len(space), len(data))
        space[:nbytes], data = data[:nbytes], data[nbytes:]
        out += into.took(nbytes)
    return out


@given(sent=st.lists(frames, max_size=6), cuts=st.lists(st.integers(1, 100_000)))
def test_frames_arrive_whatever_the_pieces(sent: list[Frame], cuts: list[int]) -> None:
    data, received, into = encoded(*sent), [], Inbox()
    for cut in cuts:
        received += put(into, data[:cut])
        data = data[cut:]
    assert received + put(into, data) == sent


def test_a_frame_outlives_the_buffer_it_came_in() -> None:
    into = Inbox()
    first = Frame(Op.STATUS, Kind.REQUEST, 1, b"first")
    (kept,) = put(into, encoded(first))
    put(into, encoded(Frame(Op.STATUS, Kind.REQUEST, 2, b"other")))
    assert kept == first


def test_an_inbox_grows_for_a_large_frame_alone() -> None:
    into, small = Inbox(), len(Inbox().space())
    large = Frame(Op.STATUS, Kind.REQUEST, 1, bytes(5 * small))
    assert put(into, encoded(large)[:-1]) == []
    following = Frame(Op.STATUS, Kind.REQUEST, 2, b"next")
    assert put(into, encoded(large)[-1:] + encoded(following)[:9]) == [large]
    assert len(into.space()) == small - 9
    assert put(into, encoded(following)[9:]) == [following]
    assert put(into, encoded(large)) == [large]
    assert len(into.space()) == small


def test_an_inbox_is_never_larger_than_the_largest_frame() -> None:
    into = Inbox(max_frame=inbox.NBYTES)
    largest = encoded(Frame(Op.STATUS, Kind.REQUEST, 1, bytes(inbox.NBYTES)))
    assert put(into, largest[:-1]) == []
    assert len(into.space()) == 1
    with pytest.raises(ProtocolError, match=f"{inbox.NBYTES + 1} bytes; at most {inbox.NBYTES}"):
        put(Inbox(max_frame=inbox.NBYTES), HEADER.pack(inbox.NBYTES + 1, Op.STATUS, 0, 0, 1))
