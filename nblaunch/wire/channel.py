"""Frames of messages over a stream socket, with file descriptors as attachments where it is a Unix one.

A frame is a header (body length, lane, number of attachments) and a body. Bodies of the lane TYPED are opened by
whoever receives them; METRICS and PROGRESS bodies are forwarded as they came.
"""

from __future__ import annotations

import array
import functools
import operator
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from nblaunch.wire import messages
from nblaunch.wire.messages import Message

TYPED, METRICS, PROGRESS = range(3)

_HEADER = struct.Struct("<IBB")
_LARGEST = 1 << 30
_FDS_AT_ONCE = 64
_READ = 1 << 18
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_encoder = msgspec.msgpack.Encoder()
_kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)]
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, (kind for kind in _kinds if kind is not Message))
)

_LANES: dict[type[Message], int] = {messages.Metrics: METRICS, messages.Progress: PROGRESS}


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Frame(NamedTuple):
    """One frame as it came: still closed, with its attachments as descriptors that the receiver owns."""

    lane: int
    body: bytes
    fds: tuple[int, ...]

    def open(self) -> Message:
        """The message in it.

        Raises:
            msgspec.DecodeError: The body is not a message.
        """
        return _decoder.decode(self.body)


def encode(message: Message, attachments: int = 0) -> bytes:
    """The frame of `message`, whole.

    Raises:
        ValueError: It is larger than any receiver takes, or has text in it that is no Unicode.
        TypeError: It has something in it that is no plain data.
    """
    body = _encoder.encode(message)
    if len(body) > _LARGEST:
        raise ValueError(f"a {type(message).__name__} of {len(body):,} bytes is too large to be sent as a message")
    return _HEADER.pack(len(body), _LANES.get(type(message), TYPED), attachments) + body


class Channel:
    """One end of a connection. Never blocks: what can't be sent yet waits here until `flush`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self.waiting = 0
        """Bytes that are queued to be sent."""
        self.closed = False
        """The other side has closed; whatever it sent before has been received."""

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message and send what can be sent now; the channel owns `fds` from here on and closes them."""
        try:
            data = encode(message, len(fds))
        except Exception:
            _close_all(fds)
            raise
        self._queue(data, list(fds))

    def forward(self, frame: Frame) -> None:
        """Queue a frame as it came."""
        header = _HEADER.pack(len(frame.body), frame.lane, len(frame.fds))
        self._queue(header + frame.body, list(frame.fds))

    def _queue(self, data: bytes, fds: list[int]) -> None:
        self._out.append((memoryview(data), fds))
        self.waiting += len(data)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now. Nothing is raised if the other side is gone: `receive` tells that."""
        while self._out:
            data, fds = self._out[0]
            try:
                sent = self._socket.sendmsg([data], [_rights(fds)]) if fds else self._socket.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._drop_queue()
                return
            self.waiting -= sent
            _close_all(fds)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], [])

    def receive(self) -> list[Frame]:
        """All frames that have arrived whole; sets `closed` at the end of the stream.

        Raises:
            ChannelClosed: What came is no frame of ours, or a descriptor could not be taken; the connection is of no
                use any more.
        """
        while not self.closed:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    _READ, socket.CMSG_SPACE(4 * _FDS_AT_ONCE), _CLOSE_ON_EXEC
                )
            except BlockingIOError:
                break
            except OSError:
                self.closed = True
                break
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._fds.extend(array.array("i", payload[: len(payload) - len(payload) % 4]))
            if flags & socket.MSG_CTRUNC:
                raise ChannelClosed("a descriptor was lost on its way: this process has too many open files")
            if not data:
                self.closed = True
                break
            self._in += data
            if len(data) < _READ and not ancillary:
                break
        return self._split()

    def take(self) -> list[Frame]:
        """Like `receive`, for one end that serves on: what is no frame of ours counts as the end of the stream."""
        try:
            return self.receive()
        except ChannelClosed:
            self.closed = True
            return []

    def wait(self, timeout: float | None = None) -> list[Frame]:
        """Like `receive`, but waits for at least one frame, the end of the stream, or `timeout` seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            frames = self.receive()
            if frames or self.closed:
                return frames
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if not poll.poll(left):
                return []

    def close(self) -> None:
        """Close the socket and every descriptor that was still to be sent or fetched."""
        self._drop_queue()
        _close_all(self._fds)
        self._fds.clear()
        self._socket.close()

    def disown(self) -> None:
        """This is a forked copy: leave the descriptor to whoever closes it; no finalizer may close its successor."""
        self._socket.detach()

    def _split(self) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        while len(self._in) - start >= _HEADER.size:
            length, lane, attachments = _HEADER.unpack_from(self._in, start)
            if length > _LARGEST or lane > PROGRESS:
                _close_all(fd for frame in frames for fd in frame.fds)
                raise ChannelClosed("what came over the connection is no message of nblaunch")
            end = start + _HEADER.size + length
            if len(self._in) < end or len(self._fds) < attachments:
                break
            fds = tuple(self._fds.popleft() for _ in range(attachments))
            frames.append(Frame(lane, bytes(self._in[start + _HEADER.size : end]), fds))
            start = end
        del self._in[:start]
        return frames

    def _drop_queue(self) -> None:
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self.waiting = 0


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, closed on exec, with room for a few thousand small messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ends


def _rights(fds: list[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
