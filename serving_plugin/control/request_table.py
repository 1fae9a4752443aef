"""Request status table: one row per open request, and a bounded history of finished ones as `RequestRecord`s."""

from __future__ import annotations

import uuid
from collections import Counter, deque
from dataclasses import dataclass, replace
from enum import StrEnum

from serving_plugin.core.drift import ForecastSummary
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import Outcome, RequestRecord

_NUM_RECENT_LENGTHS = 256
_NUM_LATE = 512  # finished requests among which a late transfer report looks for its own


class Phase(StrEnum):
    """Where an open request is."""

    ARRIVED = "arrived"
    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


@dataclass(slots=True)
class Row:
    """An open request. Times are unix seconds; see `RequestRecord` for the fields they share.

    `summaries`: what the length predictors said of it, for the drift watch.
    """

    id: str
    arrival_s: float
    phase: Phase = Phase.ARRIVED
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    forecast_ready_s: float | None = None
    dispatch_s: float | None = None
    transfer_start_s: float | None = None
    transfer_end_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    length_range: LengthRange | None = None
    whole_reason: str | None = None
    error: str | None = None
    summaries: tuple[ForecastSummary, ...] = ()


class RequestTable:
    """Open rows by id and the last `history_size` records, oldest first.

    `recent_lengths_tokens`: output lengths of the last requests that ended well, for history forecasts.
    """

    def __init__(self, history_size: int) -> None:
        self._open: dict[str, Row] = {}
        self._history: deque[RequestRecord] = deque(maxlen=history_size)
        self.recent_lengths_tokens: deque[int] = deque(maxlen=_NUM_RECENT_LENGTHS)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client_id: str | None, arrival_s: float) -> Row:
        """A new row under the client's id, or a fresh one if it gave none or that id is open already."""
        request_id = client_id or uuid.uuid4().hex
        if request_id in self._open:  # two legs under one id would share a KV transfer
            request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        row = self._open[request_id] = Row(request_id, arrival_s)
        return row

    def close(self, row: Row, outcome: Outcome) -> RequestRecord:
        """Move a row into the history."""
        del self._open[row.id]
        record = RequestRecord(
            id=row.id,
            arrival_s=row.arrival_s,
            num_prompt_tokens=row.num_prompt_tokens,
            num_output_tokens=row.num_output_tokens,
            outcome=outcome,
            prefill_start_s=row.prefill_start_s,
            prefill_end_s=row.prefill_end_s,
            forecast_ready_s=row.forecast_ready_s,
            dispatch_s=row.dispatch_s,
            transfer_start_s=row.transfer_start_s,
            transfer_end_s=row.transfer_end_s,
            first_token_s=row.first_token_s,
            last_token_s=row.last_token_s,
            prefill_instance=row.prefill_instance,
            decode_instance=row.decode_instance,
            length_range=row.length_range,
            whole_reason=row.whole_reason,
            error=row.error,
        )
        self._history.append(record)
        if outcome is Outcome.OK and record.num_output_tokens > 0:
            self.recent_lengths_tokens.append(record.num_output_tokens)
        return record

    def set_transfer(self, request_id: str, start_s: float, end_s: float) -> bool:
        """Note when a request's KV cache was pulled; a short request may have ended already. False: unknown id."""
        row = self._open.get(request_id)
        if row is not None:
            row.transfer_start_s, row.transfer_end_s = start_s, end_s
            return True
        last = len(self._history)
        for i in range(last - 1, max(-1, last - 1 - _NUM_LATE), -1):
            if self._history[i].id == request_id:
                self._history[i] = replace(self._history[i], transfer_start_s=start_s, transfer_end_s=end_s)
                return True
        return False

    def records(self, limit: int) -> list[RequestRecord]:
        """The last `limit` finished requests, newest last."""
        if limit >= len(self._history):
            return list(self._history)
        return [self._history[i] for i in range(len(self._history) - limit, len(self._history))]

    def phases(self) -> dict[str, int]:
        """Number of open requests per phase."""
        counts = Counter(row.phase for row in self._open.values())
        return {phase: counts[phase] for phase in Phase}
