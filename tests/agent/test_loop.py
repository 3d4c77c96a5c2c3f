"""The agent's loop: timers in their order, descriptors that are ready, and none that was given up meanwhile."""

from __future__ import annotations

import os
import socket

import pytest

from nblaunch.agent.loop import Loop


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop._selector.close()


@pytest.fixture
def connection():
    near, far = socket.socketpair()
    near.setblocking(False)
    yield near, far
    near.close()
    far.close()


def test_timers_fire_in_the_order_of_their_times(loop):
    fired = []
    loop.later(0.002, lambda: fired.append("late"))
    loop.later(0.0, lambda: fired.append("first"))
    loop.later(0.0, lambda: fired.append("second"))
    loop.later(0.003, loop.stop)
    loop.run()
    assert fired == ["first", "second", "late"]


def test_a_cancelled_timer_does_not_fire(loop):
    fired = []
    timer = loop.later(0.0, lambda: fired.append("never"))
    loop.later(0.001, loop.stop)
    timer.cancel()
    loop.run()
    assert fired == []


def test_a_timer_may_set_the_next_one(loop):
    fired = []

    def tick() -> None:
        fired.append(len(fired))
        if len(fired) == 3:
            loop.stop()
        else:
            loop.later(0.0, tick)

    loop.later(0.0, tick)
    loop.run()
    assert fired == [0, 1, 2]


def test_what_arrives_is_read(loop, connection):
    near, far = connection
    came = []

    def read() -> None:
        came.append(near.recv(10))
        loop.stop()

    loop.watch(near.fileno(), read)
    far.send(b"hello")
    loop.run()
    assert came == [b"hello"]


def test_writing_is_called_for_only_while_it_is_wanted(loop, connection):
    near, _ = connection
    written = []

    def write() -> None:
        written.append("once")
        loop.want_write(near.fileno(), None)
        loop.later(0.002, loop.stop)

    loop.watch(near.fileno(), lambda: None)
    loop.want_write(near.fileno(), write)
    loop.run()
    assert written == ["once"]


def test_a_descriptor_that_another_callback_gave_up_is_not_called(loop):
    pairs = [socket.socketpair() for _ in range(2)]
    called = []

    def give_up(mine, other) -> None:
        called.append(mine)
        loop.forget(pairs[other][0].fileno())
        loop.stop()

    for mine, other in ((0, 1), (1, 0)):
        fd = pairs[mine][0].fileno()
        loop.watch(fd, lambda mine=mine, other=other: give_up(mine, other))
        loop.want_write(fd, lambda: None)
        pairs[mine][1].send(b"x")
    loop.run()
    assert len(called) == 1
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_number_that_was_given_to_another_is_not_called_for_the_former(loop):
    """A descriptor is closed and its number taken anew between two callbacks of one round."""
    pipes = [os.pipe() for _ in range(2)]
    called = []

    def replace(mine: int, other: int) -> None:
        called.append("former")
        number = pipes[other][0]
        loop.forget(number)
        os.close(number)
        os.dup2(pipes[mine][0], number)
        loop.watch(number, lambda: called.append("new"))
        loop.stop()

    for mine, other in ((0, 1), (1, 0)):
        loop.watch(pipes[mine][0], lambda mine=mine, other=other: replace(mine, other))
        os.write(pipes[mine][1], b"x")
    loop.run()
    assert called == ["former"]
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)
