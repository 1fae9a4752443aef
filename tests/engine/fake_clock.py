"""An event loop whose clock jumps to the next timer: waits of minutes are exact and take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. For code that waits for tasks and timers alone: no sockets, no threads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """The fake time."""
        return self.now_s


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: FakeClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError(f"at {self._loop.now_s:g} s nothing is left that could happen: a wait without a bound")
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end under a fake clock; what is left over is cancelled."""
    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        return runner.run(coroutine)


def now_s() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()
