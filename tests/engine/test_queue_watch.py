"""The bound on a leg's wait in an instance's queue, under a fake clock."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest
from fake_clock import now_s, run

from serving_plugin.core.config import AdmitSettings
from serving_plugin.engine.queue_watch import RECHECK_S, QueueWatch, Withdrawal

RELINQUISH_S, WAIT_S = 10.0, 60.0
DONE, WAITS_ON, NOT_WAITING = Withdrawal.DONE, Withdrawal.WAITS_ON, Withdrawal.NOT_WAITING
UNKNOWN = Withdrawal.UNKNOWN


@dataclass
class Queue:
    """An instance's queue with one request, and the room that others have. `log`: (when, what was asked)."""

    needs_tokens: int = 100
    admitted_s: float = float("inf")
    room_tokens: int | None = None
    room_from_s: float = 0.0
    log: list[tuple[float, object]] = field(default_factory=list)

    def room_elsewhere_tokens(self) -> int | None:
        self.log.append((now_s(), "room?"))
        return self.room_tokens if now_s() >= self.room_from_s else None

    async def withdraw(self, room_tokens: int | None) -> Withdrawal:
        self.log.append((now_s(), room_tokens))
        if now_s() >= self.admitted_s:
            return NOT_WAITING
        return WAITS_ON if room_tokens is not None and room_tokens < self.needs_tokens else DONE

    @property
    def withdrawals(self) -> list[tuple[float, object]]:
        return [entry for entry in self.log if entry[1] != "room?"]


def watch(
    queue: Queue,
    may_relinquish: bool = True,
    answered_s: float | None = None,
    relinquish_after_s: float = RELINQUISH_S,
    max_wait_s: float = WAIT_S,
) -> tuple[bool | None, float]:
    """(what the watch says, when) of a request that is answered at `answered_s`."""
    settings = AdmitSettings(relinquish_after_s=relinquish_after_s, max_wait_s=max_wait_s)

    async def watching() -> tuple[bool | None, float]:
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if answered_s is not None:
            asyncio.get_running_loop().call_later(answered_s, answered.set_result, None)
        watcher = QueueWatch(settings, may_relinquish, queue.room_elsewhere_tokens, queue.withdraw)
        return await watcher.run(answered), now_s()

    return run(watching())


@pytest.mark.parametrize("may_relinquish", [True, False])
@pytest.mark.parametrize("answered_s", [0.0, 3.0, RELINQUISH_S - 0.01])
def test_a_request_that_is_answered_soon_is_left_alone(may_relinquish: bool, answered_s: float) -> None:
    queue = Queue(room_tokens=1000)
    assert watch(queue, may_relinquish, answered_s) == (None, answered_s)
    assert queue.log == []


def test_an_answer_between_two_looks_ends_the_watch_at_once() -> None:
    queue = Queue()  # nobody has room
    assert watch(queue, answered_s=31.3) == (None, 31.3)
    assert queue.withdrawals == []


def test_it_is_relinquished_after_its_time_if_another_has_room() -> None:
    queue = Queue(room_tokens=100)
    assert watch(queue) == (True, RELINQUISH_S)
    assert queue.withdrawals == [(RELINQUISH_S, 100)]  # the room goes along: the engine judges whether it suffices


def test_it_is_relinquished_as_soon_as_another_gets_room() -> None:
    queue = Queue(room_tokens=100, room_from_s=20.2)
    assert watch(queue) == (True, 20.5)
    assert queue.withdrawals == [(20.5, 100)]


def test_without_a_gateway_that_can_bind_it_elsewhere_it_waits_on_whatever_room_there_is() -> None:
    queue = Queue(room_tokens=1000)
    assert watch(queue, may_relinquish=False, answered_s=WAIT_S - 0.01) == (None, WAIT_S - 0.01)
    assert queue.log == []


@pytest.mark.parametrize(
    ("may_relinquish", "queue"),
    [
        (False, Queue(room_tokens=1000)),
        (True, Queue()),
        (True, Queue(room_tokens=99)),
        (True, Queue(room_tokens=1000, room_from_s=WAIT_S)),  # at the end it is over, also if there is room just then
    ],
)
def test_after_max_wait_s_it_is_taken_out_for_good(may_relinquish: bool, queue: Queue) -> None:
    assert watch(queue, may_relinquish) == (False, WAIT_S)
    assert queue.withdrawals[-1] == (WAIT_S, None)


def test_too_large_for_the_room_elsewhere_is_watched_on_until_more_is_free() -> None:
    class Growing(Queue):
        def room_elsewhere_tokens(self) -> int | None:
            self.room_tokens = 99 if now_s() < 12 else 100
            return super().room_elsewhere_tokens()

    queue = Growing()
    assert watch(queue) == (True, 12.0)
    assert queue.withdrawals == [(10.0, 99), (10.5, 99), (11.0, 99), (11.5, 99), (12.0, 100)]


@pytest.mark.parametrize("may_relinquish", [True, False])
@pytest.mark.parametrize("admitted_s", [0.0, WAIT_S])
def test_a_request_that_no_longer_waits_is_watched_no_more(may_relinquish: bool, admitted_s: float) -> None:
    queue = Queue(admitted_s=admitted_s, room_tokens=1000 if admitted_s == 0 else None)
    verdict, at_s = watch(queue, may_relinquish)
    assert verdict is None
    assert at_s == (RELINQUISH_S if may_relinquish and admitted_s == 0 else WAIT_S)
    assert len(queue.withdrawals) == 1


@pytest.mark.parametrize("first", [UNKNOWN, RuntimeError("Server shutting down")])
@pytest.mark.parametrize(("may_relinquish", "from_s", "verdict"), [(True, RELINQUISH_S, True), (False, WAIT_S, False)])
def test_one_of_which_the_engine_says_nothing_is_watched_on(
    first: Withdrawal | Exception,
    may_relinquish: bool,
    from_s: float,
    verdict: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may be on its way to EngineCore, or EngineCore answers nobody while it drains."""

    class Silent(Queue):
        async def withdraw(self, room_tokens: int | None) -> Withdrawal:
            result = await super().withdraw(room_tokens)
            if now_s() >= from_s + 2:
                return result
            if isinstance(first, Exception):
                raise first
            return first

    queue = Silent(room_tokens=1000)
    assert watch(queue, may_relinquish) == (verdict, from_s + 2)
    assert len(queue.withdrawals) == 5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == isinstance(first, Exception), "one line, not one for each look"
    assert all("Server shutting down" in message for message in messages)


@pytest.mark.parametrize("may_relinquish", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("Server shutting down")])
def test_the_watch_of_one_that_the_engine_never_knows_ends_with_its_answer(
    error: Exception | None, may_relinquish: bool
) -> None:
    class Silent(Queue):
        async def withdraw(self, room_tokens: int | None) -> Withdrawal:
            await super().withdraw(room_tokens)
            if error is not None:
                raise error
            return UNKNOWN

    queue = Silent(room_tokens=1000)
    assert watch(queue, may_relinquish, answered_s=WAIT_S + 5.1) == (None, WAIT_S + 5.1)


@pytest.mark.parametrize("may_relinquish", [True, False])
def test_max_wait_s_also_bounds_a_longer_relinquish_after_s(may_relinquish: bool) -> None:
    queue = Queue(room_tokens=1000)
    assert watch(queue, may_relinquish, relinquish_after_s=100.0, max_wait_s=5.0) == (False, 5.0)
    assert queue.withdrawals == [(5.0, None)]


@pytest.mark.parametrize("queue", [Queue(), Queue(room_tokens=1)])
def test_it_looks_again_every_half_second_and_never_spins(queue: Queue) -> None:
    verdict, at_s = watch(queue, relinquish_after_s=0.001)
    assert verdict is False and WAIT_S <= at_s <= WAIT_S + RECHECK_S
    looks_s = [at_s for at_s, what in queue.log if what == "room?"]
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(looks_s)]
    assert len(looks_s) == pytest.approx(WAIT_S / RECHECK_S, abs=1)
    assert min(gaps_s) >= RECHECK_S - 1e-6


def test_a_withdrawal_that_takes_time_does_not_shorten_the_pause() -> None:
    """EngineCore answers between two steps: a long step must not make the watch ask without a pause."""

    class Slow(Queue):
        async def withdraw(self, room_tokens: int | None) -> Withdrawal:
            result = await super().withdraw(room_tokens)
            await asyncio.sleep(3.0)
            return result

    queue = Slow(room_tokens=99)
    assert watch(queue, max_wait_s=20.0) == (False, 23.5)
    assert queue.withdrawals == [(10.0, 99), (13.5, 99), (17.0, 99), (20.5, None)]
