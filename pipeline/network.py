"""The predictor as a PyTorch module: a pretrained backbone, the conversation's lengths, one head over fine buckets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pipeline.backbone import load_backbone
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import NUM_FEATURES
from serving_plugin.predictor.encoding import pad_batch

if TYPE_CHECKING:
    from serving_plugin.predictor.encoding import EncodedConversation

BACKBONE_FOLDER = "backbone"
HEAD_FILE = "head.safetensors"
FEATURE_WIDTH = 64
HEAD_WIDTH = 256
MAX_DEVIATIONS = 5.0  # of a feature from its mean: what lies beyond is an outlier


class LengthNetwork(nn.Module):
    """(input_ids, attention_mask), both (batch, length) int64, and features (batch, NUM_FEATURES) float32 -> logits
    (batch, num_buckets) float32.

    An encoder's states are averaged over the tokens; of a causal backbone the last token's state is taken, found by the
    attention mask, never by a padding id. Features are standardised by the training rows' mean and deviation.
    `use_features` False: the features are read and have no effect. `head_dropout` counts in training only.
    """

    def __init__(self, backbone: Any, num_buckets: int, use_features: bool, head_dropout: float = 0.0) -> None:
        super().__init__()
        self.backbone = backbone
        config = backbone.config
        self.is_causal = is_causal(config)
        width = int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)
        self.features = nn.Sequential(
            nn.Linear(NUM_FEATURES, FEATURE_WIDTH), nn.GELU(), nn.Linear(FEATURE_WIDTH, FEATURE_WIDTH), nn.GELU()
        )
        self.head = nn.Sequential(
            nn.Dropout(head_dropout),
            nn.Linear(width + FEATURE_WIDTH, HEAD_WIDTH),
            nn.GELU(),
            nn.Dropout(head_dropout),
            nn.Linear(HEAD_WIDTH, num_buckets),
        )
        self.feature_scale: torch.Tensor
        self.feature_mean: torch.Tensor
        self.feature_deviation: torch.Tensor
        self.register_buffer("feature_scale", torch.tensor(1.0 if use_features else 0.0))
        self.register_buffer("feature_mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("feature_deviation", torch.ones(NUM_FEATURES))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, features: torch.Tensor, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        """Logits by name, as the Trainer wants them; `labels` are left to its loss function."""
        return {"logits": self.logits_of(self.pooled(input_ids, attention_mask), features)}

    def pooled(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(batch, width) state of the text."""
        states: torch.Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.is_causal:
            last = attention_mask.sum(dim=1, keepdim=True) - 1
            return torch.gather(states, 1, last.unsqueeze(-1).expand(-1, 1, states.shape[-1])).squeeze(1)
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return (states * mask).sum(dim=1) / mask.sum(dim=1)

    def logits_of(self, pooled: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """(batch, num_buckets) from the text's state and the features."""
        standard = ((features - self.feature_mean) / self.feature_deviation).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
        beside = self.features(standard * self.feature_scale)
        logits: torch.Tensor = self.head(torch.cat([pooled, beside.to(pooled.dtype)], dim=-1)).float()
        return logits

    def start_from(self, shares: Sequence[float], features: torch.Tensor) -> None:
        """Begin at the marginal distribution: what is left to learn is the difference a conversation makes.

        Args:
            shares: (num_buckets,) of the training rows.
            features: (rows, NUM_FEATURES) of the training rows.
        """
        last = self.head[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.copy_(torch.log(torch.tensor(list(shares), dtype=torch.float32) + 1e-4))
            self.feature_mean.copy_(features.mean(dim=0))
            self.feature_deviation.copy_(features.std(dim=0, correction=0) + 1e-2)

    def save(self, folder: Path) -> None:
        """Write `backbone/` (Hugging Face form) and `head.safetensors`."""
        from safetensors.torch import save_file

        self.backbone.save_pretrained(folder / BACKBONE_FOLDER)
        own = {
            name: value.contiguous() for name, value in self.state_dict().items() if not name.startswith("backbone.")
        }
        save_file(own, folder / HEAD_FILE)


def is_causal(config: Any) -> bool:
    """Whether a token of this backbone sees only those before it (OPT, Llama), not those behind (BERT)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING


def new_network(path: str, num_buckets: int, use_features: bool, head_dropout: float = 0.0) -> LengthNetwork:
    """A pretrained backbone under a fresh head (its weights come from torch's global seed)."""
    return LengthNetwork(load_backbone(path), num_buckets, use_features, head_dropout)


def load_network(checkpoint: Path, num_buckets: int) -> LengthNetwork:
    """The network of a checkpoint folder, in evaluation mode.

    Raises:
        ConfigurationError: no network lies there, or one with another number of buckets.
    """
    from safetensors.torch import load_file

    path = checkpoint / HEAD_FILE
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing; run `dvc repro train`")
    network = new_network(str(checkpoint / BACKBONE_FOLDER), num_buckets, use_features=True)
    try:
        left_out = network.load_state_dict(load_file(path), strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ConfigurationError(f"{path} does not fit predictor.json ({reason}); run `dvc repro train`") from None
    missing = [name for name in left_out.missing_keys if not name.startswith("backbone.")]
    if missing or left_out.unexpected_keys:
        raise ConfigurationError(
            f"{path} lacks {missing} and has unknown {left_out.unexpected_keys}; run `dvc repro train`"
        )
    return network.eval()


def predict_logits(
    network: LengthNetwork, encoded: Sequence[EncodedConversation], pad_token_id: int, batch_size: int = 32
) -> np.ndarray:
    """(rows, buckets) float32 logits, on the GPU where there is one; rows of like length share a batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device).eval()
    chunks: dict[int, np.ndarray] = {}
    by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
    with torch.inference_mode():
        for start in range(0, len(encoded), batch_size):
            chosen = by_length[start : start + batch_size]
            batch = to_batch([encoded[i] for i in chosen], pad_token_id)
            logits = network(**{name: value.to(device) for name, value in batch.items()})["logits"]
            chunks |= dict(zip(chosen, logits.cpu().numpy(), strict=True))
    network.to("cpu")
    return np.stack([chunks[i] for i in range(len(encoded))])


def to_batch(encoded: Sequence[EncodedConversation], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The network's inputs, padded with the very function that serving pads with."""
    input_ids, attention_mask = pad_batch([one.ids for one in encoded], pad_token_id)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "features": torch.tensor([one.features for one in encoded], dtype=torch.float32),
    }
