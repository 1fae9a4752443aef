"""The gateway's drift watch: reads what predictors said, compares it with what came, tells whether to trust them.

The rules are `core.drift`; here are what never to trust of an answer, the counters and the log lines.
"""

from __future__ import annotations

import logging

from serving_plugin.core.drift import DriftFigures, DriftSettings, DriftWatches, ForecastSummary, Transition

logger = logging.getLogger(__name__)

MAX_SUMMARIES = 4  # of one request: a champion, a shadow, and room
TO_HISTORY, TO_MODEL = "history", "model"


class ForecastMonitor:
    """One per gateway. Its state is as soft as the gateway's: a new gateway trusts until it has seen enough."""

    def __init__(self, settings: DriftSettings) -> None:
        self._watches = DriftWatches(settings)
        self.num_malformed = 0
        self.num_transitions = {TO_HISTORY: 0, TO_MODEL: 0}

    @property
    def is_trusted(self) -> bool:
        """Whether prefill instances may use their predictors' forecasts."""
        return self._watches.is_trusted

    def figures(self) -> list[DriftFigures]:
        """What is known of each model's forecasts now, champions first."""
        return self._watches.figures()

    def read(self, raw: object, request_id: str) -> tuple[ForecastSummary, ...]:
        """The summaries in a prefill leg's answer (None: it has none); what cannot be read is counted and left out."""
        if raw is None:
            return ()
        if not isinstance(raw, list):
            self._count_malformed(request_id, f"forecast summaries are a {type(raw).__name__}, need a list")
            return ()
        if len(raw) > MAX_SUMMARIES:
            self._count_malformed(request_id, f"{len(raw)} forecast summaries, limit {MAX_SUMMARIES}")
        read: dict[tuple[str, bool], ForecastSummary] = {}  # a model speaks once of a request
        for item in raw[:MAX_SUMMARIES]:
            try:
                summary = ForecastSummary.from_dict(item)
            except ValueError as error:
                self._count_malformed(request_id, str(error))
            else:
                read[summary.model, summary.is_shadow] = summary
        return tuple(read.values())

    def observe(self, summaries: tuple[ForecastSummary, ...], actual_tokens: int) -> None:
        """A request ended well with so many output tokens."""
        was_trusted = self.is_trusted
        turned = self._watches.observe(summaries, actual_tokens)
        for model, transition in turned:
            _log(model, transition)
        if was_trusted != self.is_trusted:
            self.num_transitions[TO_MODEL if self.is_trusted else TO_HISTORY] += 1
            if not turned:
                logger.warning("length forecasts are trusted again: the model that had drifted is no longer in use")

    def _count_malformed(self, request_id: str, reason: str) -> None:
        self.num_malformed += 1
        if self.num_malformed == 1:  # once: an instance of another release would fill the log
            logger.warning("%s: %s; ignored, further ones are only counted", request_id, reason)


def _log(model: str, transition: Transition) -> None:
    figures = (
        transition.coverage * 100,
        transition.nominal * 100,
        transition.num_samples,
    )
    if transition.is_trusted:
        logger.warning(
            "length forecasts of %s are trusted again: %.1f %% of replies within their upper bound, nominal %.1f %%, "
            "over %d requests",
            model,
            *figures,
        )
    else:
        logger.warning(
            "length forecasts of %s have drifted: %.1f %% of replies within their upper bound, nominal %.1f %%, "
            "over %d requests; recent lengths take their place until coverage is back",
            model,
            *figures,
        )
