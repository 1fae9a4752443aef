"""What a length predictor is trained on: cross-entropy over fine buckets, and what may join it.

Plain cross-entropy is the paper's (TetriInfer 3.3.2). The options know that buckets have an order:
  soft labels     a label's mass spreads over near buckets (EGTP, arXiv 2602.11812)
  expected value  error of the mean forecast, in units of the published granularity
A pairwise ranking loss was tried and left out: it cost more accuracy than it gained in rank (docs/prediction.md).
A censored reply is "at least": its likelihood is the mass from its bucket on, and it is nowhere taken as a length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import log_softmax


@dataclass(frozen=True, slots=True)
class LengthLoss:
    """Mean loss of a batch; `labels` are (batch, 2): length in tokens, 1 if censored.

    `smoothing_tokens` is the standard deviation with which a label spreads over near buckets; 0: none.
    """

    edges_tokens: tuple[int, ...]
    granularity_tokens: int
    smoothing_tokens: float
    expected_value_weight: float

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"].float()
        edges = torch.tensor(self.edges_tokens, dtype=torch.float32, device=logits.device)
        middles = (edges[:-1] + edges[1:] - 1) / 2
        lengths = labels[:, 0].to(logits.device).float().clamp(max=self.edges_tokens[-1] - 1)
        censored = labels[:, 1].to(logits.device) > 0.5
        log_shares = log_softmax(logits, dim=-1)
        loss = torch.where(
            censored, self._survival(log_shares, lengths, edges), self._cross_entropy(log_shares, lengths, middles)
        ).mean()
        if self.expected_value_weight > 0:
            means = log_shares.exp() @ middles
            error = torch.where(censored, (lengths - means).clamp(min=0), (means - lengths).abs())
            loss = loss + self.expected_value_weight * error.mean() / self.granularity_tokens
        return loss

    def _cross_entropy(self, log_shares: torch.Tensor, lengths: torch.Tensor, middles: torch.Tensor) -> torch.Tensor:
        if self.smoothing_tokens > 0:
            distance = (middles[None, :] - lengths[:, None]) / self.smoothing_tokens
            return -(torch.softmax(-0.5 * distance**2, dim=-1) * log_shares).sum(dim=-1)
        bucket = (lengths // self.edges_tokens[1]).long()
        return -log_shares.gather(1, bucket[:, None]).squeeze(1)

    def _survival(self, log_shares: torch.Tensor, lengths: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """-log P(length >= the cut's bucket)."""
        possible = edges[1:][None, :] > lengths[:, None]
        return -torch.logsumexp(log_shares.masked_fill(~possible, -1e9), dim=-1)
