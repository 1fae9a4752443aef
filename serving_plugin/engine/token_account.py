"""What the tokens of each step were: a prompt's first computation, a preempted request's again, or replies.

vLLM says only how many tokens of a request a step computes. Kept by the scheduler mixin, read by the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving_plugin.engine.tracker import Tracked


class TokenAccount:
    """Totals since the start, and which requests are under way. Tokens throughout; `requests` are vLLM's, by id."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(
            (
                "num_prompt_tokens_computed",
                "num_prompt_tokens_loaded",
                "num_tokens_recomputed",
                "num_output_tokens",
                "num_preemptions",
            ),
            0,
        )
        self.prefilling: dict[str, Tracked] = {}  # scheduled, prompt not yet computed to its end
        self._recomputing: dict[str, int] = {}  # preempted: tokens whose KV cache was lost

    def begin(self, request_id: str, tracked: Tracked) -> None:
        """The request is in a step for the first time."""
        self.prefilling[request_id] = tracked

    def lose(self, request_id: str, num_computed_tokens: int) -> None:
        """The request was preempted and had so many tokens in its KV cache."""
        self._recomputing[request_id] = max(num_computed_tokens, self._recomputing.get(request_id, 0))

    def load(self, num_tokens: int) -> None:
        """So many prompt tokens came from another instance."""
        self.totals["num_prompt_tokens_loaded"] += num_tokens

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.prefilling.pop(request_id, None)
        self._recomputing.pop(request_id, None)

    def note_step(self, requests: Mapping[str, Any], output: Any) -> int:
        """Book vLLM's `SchedulerOutput` of a step that `num_computed_tokens` already counts.

        Returns the prompt tokens among its tokens, first time or again: 0 for a step that only decodes.
        """
        num_prompt_tokens = self._note_prompt_tokens(requests, output.num_scheduled_tokens)
        num_recomputed = self._note_recomputed_tokens(requests, output.num_scheduled_tokens) if self._recomputing else 0
        self.totals["num_prompt_tokens_computed"] += num_prompt_tokens
        self.totals["num_tokens_recomputed"] += num_recomputed
        self.totals["num_output_tokens"] += output.total_num_scheduled_tokens - num_prompt_tokens - num_recomputed
        self.totals["num_preemptions"] += len(output.preempted_req_ids or ())
        return num_prompt_tokens + num_recomputed

    def _note_prompt_tokens(self, requests: Mapping[str, Any], num_scheduled_tokens: Mapping[str, int]) -> int:
        total = 0
        for request_id, tracked in list(self.prefilling.items()):
            num_scheduled = num_scheduled_tokens.get(request_id, 0)
            request = requests[request_id]
            before = max(request.num_computed_tokens - num_scheduled, self._recomputing.get(request_id, 0))
            num_prompt_tokens = max(0, min(request.num_computed_tokens, request.num_prompt_tokens) - before)
            tracked.num_local_prompt_tokens += num_prompt_tokens
            total += num_prompt_tokens
            if num_scheduled and request.num_computed_tokens >= request.num_prompt_tokens:
                del self.prefilling[request_id]
        return total

    def _note_recomputed_tokens(self, requests: Mapping[str, Any], num_scheduled_tokens: Mapping[str, int]) -> int:
        total = 0
        for request_id, num_lost in list(self._recomputing.items()):
            num_scheduled = num_scheduled_tokens.get(request_id, 0)
            before = requests[request_id].num_computed_tokens - num_scheduled
            total += min(num_scheduled, max(0, num_lost - before))
            if num_scheduled and before + num_scheduled >= num_lost:
                del self._recomputing[request_id]
        return total
