"""How long a request waits for its length forecast: not at all while forecasts come too late anyway.

A predictor that is late every time would otherwise cost each request the whole `prediction.timeout_s`. No vLLM import.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_LATE_IN_A_ROW = 3


class ForecastBreaker:
    """Opens after `MAX_LATE_IN_A_ROW` late forecasts; the next one in time closes it. Forecasts are asked for on."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_late_in_a_row = 0

    @property
    def is_open(self) -> bool:
        """Whether nobody waits for a forecast now."""
        return self._num_late_in_a_row >= MAX_LATE_IN_A_ROW

    @property
    def patience_s(self) -> float:
        """How long a request waits for its forecast, from its arrival on."""
        return 0.0 if self.is_open else self._timeout_s

    def observe(self, is_in_time: bool) -> None:
        """A forecast came within the timeout, or did not."""
        was_open = self.is_open
        self._num_late_in_a_row = 0 if is_in_time else self._num_late_in_a_row + 1
        if self.is_open != was_open:
            logger.warning(
                "%d length forecasts in a row took over %g s: history is used, nobody waits until one is in time"
                if self.is_open
                else "length forecasts come in time again",
                *((self._num_late_in_a_row, self._timeout_s) if self.is_open else ()),
            )
