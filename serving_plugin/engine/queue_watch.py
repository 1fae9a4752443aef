"""The bound on a leg's wait in an instance's queue: bind it to another decode instance, or refuse it with 429.

Only what has no block yet and has sent nothing can be withdrawn: EngineCore answers that between two steps
(`scheduler.withdraw`). No vLLM import.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from serving_plugin.core.config import AdmitSettings

logger = logging.getLogger(__name__)

RECHECK_S = 0.5


class Withdrawal(StrEnum):
    """What became of the attempt to withdraw a request."""

    DONE = "done"
    WAITS_ON = "waits_on"  # the room offered is too small for it, or it is another one's turn
    NOT_WAITING = "not_waiting"  # admitted
    UNKNOWN = "unknown"  # the engine has not seen it yet, or it is gone


@dataclass(frozen=True, slots=True)
class QueueWatch:
    """Bounds of one leg's wait. `may_relinquish`: the gateway can bind it to another decode instance.

    `room_elsewhere_tokens` gives the tokens that fit the roomiest other decode instance, None if there is none;
    `withdraw(room_tokens)` takes the request out of the queue, to be pulled elsewhere if it fits `room_tokens`, for
    good if that is None.
    """

    admit: AdmitSettings
    may_relinquish: bool
    room_elsewhere_tokens: Callable[[], int | None]
    withdraw: Callable[[int | None], Awaitable[Withdrawal]]

    async def run(self, answered: asyncio.Future[object] | asyncio.Task[object]) -> bool | None:
        """Watch until `answered` is done, or the request was admitted: None.

        True: it was relinquished; False: it waited for `max_wait_s` and was taken out for good. While the engine cannot
        be asked (vLLM refuses it while it drains), the request waits on.
        """
        clock = asyncio.get_running_loop().time
        started_s = clock()
        pause_s = self.admit.max_wait_s
        if self.may_relinquish:
            pause_s = min(pause_s, self.admit.relinquish_after_s)
        has_failed = False
        while True:
            await asyncio.wait([answered], timeout=pause_s)
            if answered.done():
                return None
            pause_s = RECHECK_S
            is_over = clock() - started_s >= self.admit.max_wait_s
            room_tokens = self.room_elsewhere_tokens() if self.may_relinquish and not is_over else None
            if not is_over and room_tokens is None:
                continue
            try:
                result = await self.withdraw(room_tokens)
            except Exception as error:
                if not has_failed:
                    logger.warning("the engine does not say whether a request still waits (%s): it waits on", error)
                has_failed, result = True, Withdrawal.WAITS_ON
            if result is Withdrawal.DONE:
                return not is_over
            if result is Withdrawal.NOT_WAITING:
                return None
