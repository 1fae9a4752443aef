"""Stage calibrate: make the checkpoint's probabilities mean what they say, on the calibration split.

A temperature first, then distributional conformal calibration by group (`serving_plugin.predictor.calibration`).
Writes `models/predictor/calibration.json`, which evaluation and export read.

    python -m pipeline.calibrate
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files import progress, run_stage, write_json
from pipeline.network import LengthNetwork, load_network, predict_logits
from pipeline.params import CalibrateParams, load_params
from pipeline.train import CHECKPOINT, LABELLED
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import (
    Recalibration,
    fit_recalibration,
    fit_temperature,
    group_of,
    identity,
    pit_values,
)
from serving_plugin.predictor.encoding import ConversationEncoder, EncodedConversation
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import TOKENIZER_FILE, PredictorSpec

CALIBRATION = Path("models/predictor/calibration.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trained network with all that it needs to forecast."""

    network: LengthNetwork
    encoder: ConversationEncoder
    spec: PredictorSpec

    @classmethod
    def load(cls, folder: Path, calibration: Path | None = None) -> Checkpoint:
        """Read a checkpoint folder, and its calibration if a file is named.

        Raises:
            ConfigurationError: something is missing or does not fit.
        """
        spec = PredictorSpec.load(folder)
        encoder = ConversationEncoder.from_file(folder / TOKENIZER_FILE, spec.input)
        if calibration is not None:
            spec = spec.calibrated(read_calibration(calibration))
        return cls(load_network(folder, spec.num_buckets), encoder, spec)

    def encode(self, rows: Sequence[LabelledRow]) -> list[EncodedConversation]:
        """Inputs of labelled rows."""
        return [self.encoder.encode(row.messages) for row in rows]

    def probabilities(self, rows: Sequence[LabelledRow]) -> np.ndarray:
        """(rows, fine buckets) calibrated probabilities."""
        encoded = self.encode(rows)
        logits = predict_logits(self.network, encoded, self.spec.pad_token_id)
        calibration = self.spec.calibration
        groups = groups_of(encoded, calibration.prompt_edges_tokens)
        return calibration.apply(softmax(logits / calibration.temperature), groups)


def read_calibration(path: Path) -> Recalibration:
    """What the stage wrote.

    Raises:
        ConfigurationError: the file is missing or not such a file.
    """
    try:
        return Recalibration.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} cannot be used ({error}); run `dvc repro calibrate`") from None


def calibrate(params: CalibrateParams, labelled: Path, checkpoint: Path, out: Path) -> Recalibration:
    """Fit on the calibration split; `out` is written whole or not at all."""
    rows = read_rows(labelled / "calibration.jsonl")
    loaded = Checkpoint.load(checkpoint)
    encoded = loaded.encode(rows)
    logits = predict_logits(loaded.network, encoded, loaded.spec.pad_token_id)
    lengths = np.asarray([row.output_tokens for row in rows])
    censored = np.asarray([row.censored for row in rows])
    fitted = fit(params, loaded.spec.edges_tokens, logits, lengths, censored, encoded)
    write_json(out, fitted.to_json())
    progress(f"calibrate: {len(rows)} rows, temperature {fitted.temperature:.3f}, {fitted.num_groups} groups")
    return fitted


def fit(
    params: CalibrateParams,
    edges_tokens: Sequence[int],
    logits: np.ndarray,
    lengths_tokens: np.ndarray,
    censored: np.ndarray,
    encoded: Sequence[EncodedConversation],
) -> Recalibration:
    """Calibration from held-out (rows, buckets) logits and what came, all by row."""
    edges = np.asarray(edges_tokens)
    at = np.minimum(lengths_tokens, edges[-1] - 1)[:, None]
    below = edges[1:][None, :] <= at
    allowed = np.where(censored[:, None], ~below, ~below & (edges[:-1][None, :] <= at))
    temperature = fit_temperature(logits, allowed) if params.temperature else 1.0
    if not params.conformal:
        return Recalibration(temperature, (), identity().knots)
    pits = pit_values(edges_tokens, softmax(logits / temperature), lengths_tokens)
    # a length at the last edge's bucket is known, whatever lies beyond the cap
    unknown = censored & (lengths_tokens < edges[-2])
    groups = groups_of(encoded, params.prompt_edges_tokens)
    return fit_recalibration(temperature, params.prompt_edges_tokens, pits, unknown, groups)


def groups_of(encoded: Sequence[EncodedConversation], prompt_edges_tokens: Sequence[int]) -> np.ndarray:
    """(rows,) calibration groups of encoded conversations."""
    return group_of(
        prompt_edges_tokens,
        np.asarray([one.num_tokens for one in encoded], dtype=np.int64),
        np.asarray([one.num_earlier_replies for one in encoded], dtype=np.int64),
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Rows of logits as probabilities, in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    result: np.ndarray[Any, Any] = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def main() -> None:
    """Entry point."""
    calibrate(load_params().calibrate, LABELLED, CHECKPOINT, CALIBRATION)


if __name__ == "__main__":
    run_stage(main)
