"""Messages over a connection: whole, in order, with their descriptors, whatever the socket does."""

from __future__ import annotations

import os
import resource
import socket
import struct
from itertools import pairwise
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.wire import channel as wire
from nblaunch.wire import messages
from nblaunch.wire.channel import METRICS, PROGRESS, TYPED, Channel, ChannelClosed
from nblaunch.wire.messages import Bar, Display, Goodbye, Metrics, Notice, Progress, Result, Stop

KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message
]


@pytest.fixture
def ends():
    left, right = (Channel(end) for end in wire.pair())
    yield left, right
    left.close()
    right.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_arrives_as_it_was_sent(ends):
    left, right = ends
    left.send(Stop("run-1", now=True))
    left.send(Notice("the disk is full", "warning"))
    assert [frame.open() for frame in right.receive()] == [
        Stop("run-1", now=True),
        Notice("the disk is full", "warning"),
    ]


def test_what_is_forwarded_keeps_its_lane_unopened(ends):
    left, right = ends
    left.send(Metrics(0, ["loss"], b"\0" * 4, b"\0" * 8, b"\0" * 8, b"\0" * 8))
    left.send(Progress(1, 2.5, [Bar(0, "epoch")]))
    left.send(Goodbye())
    frames = right.wait(5)
    assert [frame.lane for frame in frames] == [METRICS, PROGRESS, TYPED]
    for frame in frames:
        right.forward(frame)
    assert [(frame.lane, frame.body) for frame in left.receive()] == [(frame.lane, frame.body) for frame in frames]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SIMPLE = {
    Any: plain,
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
}


def values_of(kind):
    """Whatever a field of this type may hold."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    parts = [values_of(part) for part in get_args(kind)]
    if get_origin(kind) is list:
        return st.lists(parts[0], max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(*parts, max_size=3)
    if parts:
        return st.one_of(parts)
    return st.builds(kind, **{name: values_of(field) for name, field in fields_of(kind).items()})


def fields_of(kind):
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_kind_of_message_makes_the_round_trip(kind, data):
    message = data.draw(values_of(kind))
    assert wire.Frame(TYPED, wire.encode(message)[6:], ()).open() == message


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(max_size=50), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 600), max_size=12),
)
def test_frames_come_out_whole_wherever_the_stream_is_cut(texts, cuts):
    sent = [Notice(text) for text in texts]
    stream = b"".join(wire.encode(message) for message in sent)
    near, far = wire.pair()
    receiver = Channel(far)
    came = []
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in pairwise(edges):
        near.sendall(stream[start:end])
        came += [frame.open() for frame in receiver.receive()]
    assert came == sent
    near.close()
    receiver.close()


def test_descriptors_travel_with_their_message(ends):
    left, right = ends
    before = open_files()
    for word in (b"first", b"second"):
        read, write = os.pipe()
        os.write(write, word)
        os.close(write)
        left.send(Result(0), (read,))
        left.send(Goodbye())
    first, _, second, _ = right.wait(5) + right.receive()
    assert os.read(first.fds[0], 100) == b"first"
    assert os.read(second.fds[0], 100) == b"second"
    assert not os.get_inheritable(first.fds[0])
    for frame in (first, second):
        os.close(frame.fds[0])
    assert open_files() == before


def test_a_full_socket_makes_messages_wait_and_loses_none(ends):
    left, right = ends
    texts = [str(number) * 50_000 for number in range(60)]
    for number, text in enumerate(texts):
        read, write = os.pipe()
        os.write(write, str(number).encode())
        os.close(write)
        left.send(Notice(text), (read,))
    assert left.waiting > 0
    frames = []
    while len(frames) < len(texts):
        frames += right.receive()
        left.flush()
    assert left.waiting == 0
    assert [frame.open().text for frame in frames] == texts
    for number, frame in enumerate(frames):
        assert os.read(frame.fds[0], 10) == str(number).encode()
        os.close(frame.fds[0])


def test_what_was_sent_before_the_end_still_arrives(ends):
    left, right = ends
    left.send(Goodbye())
    left.close()
    assert [frame.open() for frame in right.wait()] == [Goodbye()]
    assert right.wait() == [] and right.closed


def test_sending_to_one_who_is_gone_drops_the_message_and_its_descriptors(ends):
    left, right = ends
    right.close()
    read, write = os.pipe()
    os.close(write)
    left.send(Result(0), (read,))
    assert left.waiting == 0
    with pytest.raises(OSError):
        os.fstat(read)
    assert left.receive() == [] and left.closed


def test_closing_closes_what_was_never_sent_or_fetched(ends):
    left, right = ends
    before = open_files()
    left.send(Notice("x" * (1 << 23)))
    for _ in range(3):
        read, write = os.pipe()
        os.close(write)
        left.send(Result(0), (read,))
    left.close()
    left.close()
    assert open_files() == before - 1
    right.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack("<IBB", 4, 77, 0) + b"four",
        struct.pack("<IBB", 0xFFFFFFFF, 0, 0),
    ],
    ids=["http", "lane", "length"],
)
def test_junk_ends_the_connection(junk):
    near, far = wire.pair()
    receiver = Channel(far)
    near.sendall(junk)
    with pytest.raises(ChannelClosed, match="no message of nblaunch"):
        receiver.receive()
    near.close()
    receiver.close()


def test_junk_behind_a_message_with_a_descriptor_leaks_nothing():
    near, far = wire.pair()
    sender, receiver = Channel(near), Channel(far)
    read, write = os.pipe()
    os.close(write)
    before = open_files()
    sender.send(Result(0), (read,))
    near.sendall(b"\xff" * 64)
    with pytest.raises(ChannelClosed):
        while True:
            assert all(frame.fds == () for frame in receiver.receive())
    assert open_files() == before - 1
    sender.close()
    receiver.close()


def test_too_many_open_files_end_the_connection_instead_of_hanging(ends):
    left, right = ends
    read, write = os.pipe()
    os.close(write)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left.send(Result(0), (read,))
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        with pytest.raises(ChannelClosed, match="too many open files"):
            right.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("message", "error"),
    [(Notice("\udcff"), UnicodeEncodeError), (Display(0, {"text/plain": object()}), TypeError)],
    ids=["no Unicode", "no plain data"],
)
def test_what_can_not_be_encoded_is_said_at_once_and_leaks_nothing(ends, message, error):
    left, right = ends
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(error):
        left.send(message, (read,))
    with pytest.raises(OSError):
        os.fstat(read)
    left.send(Goodbye())
    assert [frame.open() for frame in right.receive()] == [Goodbye()]


def test_a_message_that_no_receiver_would_take_is_refused_by_the_sender(monkeypatch):
    monkeypatch.setattr(wire, "_LARGEST", 100)
    with pytest.raises(ValueError, match=r"a Notice of .* bytes is too large"):
        wire.encode(Notice("x" * 200))


def test_a_body_that_is_no_message_is_a_decode_error():
    with pytest.raises(msgspec.DecodeError):
        wire.Frame(TYPED, b"\xc1", ()).open()
    with pytest.raises(msgspec.DecodeError):
        wire.Frame(TYPED, msgspec.msgpack.encode({"_": "Unheard"}), ()).open()


def test_waiting_gives_up_after_its_time_even_if_half_a_frame_came():
    near, far = wire.pair()
    receiver = Channel(far)
    near.sendall(wire.encode(Notice("half"))[:5])
    assert receiver.wait(timeout=0.01) == []
    assert not receiver.closed
    near.close()
    receiver.close()


def test_a_connection_over_tcp_carries_messages_too():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    sender, receiver = Channel(near), Channel(far)
    sender.send(Notice("over the network"))
    assert [frame.open().text for frame in receiver.wait(5)] == ["over the network"]
    sender.close()
    receiver.close()
