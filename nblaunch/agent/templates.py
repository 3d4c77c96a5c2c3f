"""The agent's templates: the base one with torch, one with what a first optimizer imports, which takes a second, and
one with what earlier ranks imported, for launches like theirs. The less a template holds, the sooner it is forked.
"""

from __future__ import annotations

import os
import sysconfig
import weakref
from collections.abc import Callable

from nblaunch.agent.forking import fork_template
from nblaunch.agent.loop import Loop
from nblaunch.wire import channel as wire
from nblaunch.wire.channel import Channel, Frame
from nblaunch.wire.messages import Fork, Forked, Import, Launch, Warm

_FIRST_OPTIMIZER_IMPORTS = ["torch._dynamo"]
Key = tuple[dict[str, str], list[str], list[float]]


class Handle:
    """The agent's end of one template."""

    def __init__(self, loop: Loop, channel: Channel, key: Key | None, on: Callable[[Handle, Frame], None]) -> None:
        self.channel = channel
        self.key = key
        """Under which environment, path and state of site-packages it imported; None is the agent's own."""
        self.warm: Warm | None = None
        self.wanted: list[str] = []
        self._loop = loop
        self._on = on
        self._expected: list[Fork] = []
        self._retired = False
        self.lost: Callable[[Handle, list[Fork]], None] = lambda handle, expected: None
        loop.watch(channel.fileno(), self._read)

    def ask(self, message: Fork | Import, fds: list[int]) -> None:
        """Send a request with its descriptors."""
        if isinstance(message, Fork):
            self._expected.append(message)
        self.channel.send(message, fds)
        if self.channel.waiting:
            self._loop.want_write(self.channel.fileno(), self._write)

    @property
    def expecting(self) -> bool:
        """Whether it has not yet said what became of a process that it was asked for."""
        return bool(self._expected)

    def answered(self, answer: Forked) -> None:
        """It has said what became of one process that it was asked for."""
        asked = answer.run, answer.role, answer.rank
        self._expected = [fork for fork in self._expected if (fork.run, fork.role, fork.rank) != asked]
        if self._retired:
            self.retire()

    def retire(self) -> None:
        """Another has taken its place: let it go once nothing is expected of it any more."""
        self._retired = True
        if not self._expected:
            self.close()

    def close(self) -> None:
        """Let it go: it ends when its channel closes."""
        if self.channel.fileno() >= 0:
            self._loop.forget(self.channel.fileno())
            self.channel.close()

    def _read(self) -> None:
        for frame in self.channel.take():
            self._on(self, frame)
        if self.channel.fileno() < 0:
            return
        if self.channel.closed:
            self.close()
            self.lost(self, self._expected)

    def _write(self) -> None:
        self.channel.flush()
        if not self.channel.waiting:
            self._loop.want_write(self.channel.fileno(), None)


class Templates:
    """Which template serves which launch, and what the next one shall have imported."""

    def __init__(self, loop: Loop, path: list[str], owner: TemplateOwner) -> None:
        self._loop = loop
        self._owner = owner
        self._rejected: set[str] = set()
        self._ahead: Handle | None = None
        self._optimizers_seen = False
        """Whether a rank has imported what `_ahead` holds."""
        self._preloaded: Handle | None = None
        self._successor: Handle | None = None
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._base = self._handle(Channel(fork_template(path)), None)

    @property
    def warm(self) -> Warm | None:
        """What the base template said once it had torch; None while it imports."""
        return self._base.warm

    def fork(self, requests: list[tuple[Fork, list[int]]], launch: Launch | None) -> None:
        """Ask the template that fits `launch` best for processes, or the base one."""
        handle = self._base if launch is None else self._best(_key(launch))
        for request, fds in requests:
            handle.ask(request, fds)

    def _best(self, key: Key | None) -> Handle:
        if self._preloaded is not None and self._preloaded.key == key:
            return self._preloaded
        return self._ahead if self._ahead is not None and self._optimizers_seen else self._base

    def preload(self, modules: list[str], launch: Launch | None) -> None:
        """Have these ready for launches with the environment and path of `launch`, or for all."""
        self._optimizers_seen |= launch is not None and not set(_FIRST_OPTIMIZER_IMPORTS).isdisjoint(modules)
        if self._successor is not None or self.warm is None or self.warm.dirty:
            return
        key = _key(launch) if launch is not None else None
        start = self._best(key)
        assert start.warm is not None
        there = set(start.warm.modules)
        wanted = [name for name in modules if name not in there and name.split(".")[0] not in self._rejected]
        if not wanted:
            return
        ours, theirs = wire.pair()
        request = Import(wanted)
        if launch is not None:
            request.environment, request.path = launch.environment, launch.path
        start.ask(request, [theirs.detach()])
        self._successor = self._handle(Channel(ours), key)
        self._successor.wanted = modules

    @property
    def expecting(self) -> bool:
        """Whether a forked process may exist that nobody has named yet."""
        return any(handle.expecting for handle in self._handles)

    def _handle(self, channel: Channel, key: Key | None) -> Handle:
        handle = Handle(self._loop, channel, key, self._on_frame)
        handle.lost = self._on_lost
        self._handles.add(handle)
        return handle

    def _on_frame(self, handle: Handle, frame: Frame) -> None:
        message = frame.open()
        if isinstance(message, Warm):
            handle.warm = message
            self._on_warm(handle, message)
        elif isinstance(message, Forked):
            self._owner.forked(message)
            handle.answered(message)

    def _on_warm(self, handle: Handle, warm: Warm) -> None:
        self._rejected.update(name.split(".")[0] for name in warm.rejected)
        if handle is self._base:
            self._owner.template_ready(warm)
            self.preload(_FIRST_OPTIMIZER_IMPORTS, None)
            return
        self._successor = None
        if warm.dirty:
            handle.close()
            self._again(handle)
        elif handle.key is None:
            self._ahead = handle
        else:
            if self._preloaded is not None:
                self._preloaded.retire()
            self._preloaded = handle

    def _again(self, handle: Handle) -> None:
        """One package made the copy unfit: try without it."""
        if handle.key is None:
            return
        environment, path, _ = handle.key
        launch = Launch("", {}, environment, "", path, [], 0, {}, "", {}, "")
        self.preload(handle.wanted, launch)

    def _on_lost(self, handle: Handle, expected: list[Fork]) -> None:
        if handle is self._successor:
            self._successor = None
        elif handle is self._preloaded:
            self._preloaded = None
        elif handle is self._ahead:
            self._ahead = None
        for fork in expected:
            self._owner.forked(Forked(fork.run, fork.role, fork.rank, 0, "the process to fork it from has ended"))
        if handle is self._base:
            self._owner.template_ended(handle.warm)


class TemplateOwner:
    """What the templates tell the server."""

    def template_ready(self, warm: Warm) -> None:
        """The base template has torch, or says why not."""
        raise NotImplementedError

    def template_ended(self, warm: Warm | None) -> None:
        """The base template ended: no further launch can be served."""
        raise NotImplementedError

    def forked(self, message: Forked) -> None:
        """A process was forked, or was not."""
        raise NotImplementedError


def _key(launch: Launch) -> Key:
    """What an import may depend on: variables, path, and what is installed."""
    paths = sysconfig.get_paths()
    folders = [path for path in {paths["purelib"], paths["platlib"]} if os.path.isdir(path)]
    return launch.environment, launch.path, [os.stat(folder).st_mtime for folder in sorted(folders)]
