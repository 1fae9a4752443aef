"""Stage calibrate: make the checkpoint's probabilities mean what they say, on the calibration split.

A temperature first, then distributional conformal calibration by group (`serving_plugin.predictor.calibration`). A
predictor of recorded replies is calibrated a second time on the target's own replies to the same split, if there are
enough of them: how likely each length is differs between models, and serving meets the target's. Writes
`models/predictor/calibration.json`, which evaluation and export read.

    python -m pipeline.calibrate
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.files import progress, run_stage, write_json
from pipeline.label import TARGET_CALIBRATION_FILE
from pipeline.network import LengthNetwork, load_network, predict_logits
from pipeline.params import CalibrateParams, load_params
from pipeline.train import CHECKPOINT, LABELLED
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import (
    Recalibration,
    fit_recalibration,
    fit_temperature,
    identity,
    pit_values,
    softmax,
)
from serving_plugin.predictor.encoding import ConversationEncoder, EncodedConversation
from serving_plugin.predictor.model import groups_of
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import TOKENIZER_FILE, PredictorSpec

CALIBRATION = Path("models/predictor/calibration.json")
MIN_TARGET_ROWS = 50


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
            spec = spec.calibrated(*read_calibrations(calibration))
        return cls(load_network(folder, spec.num_buckets), encoder, spec)

    def encode(self, rows: Sequence[LabelledRow]) -> list[EncodedConversation]:
        """Inputs of labelled rows."""
        return [self.encoder.encode(row.messages) for row in rows]

    def probabilities(self, rows: Sequence[LabelledRow]) -> np.ndarray:
        """(rows, fine buckets) probabilities, calibrated for the rows' source; all of one source."""
        encoded = self.encode(rows)
        calibration = self.spec.calibration_of(rows[0].source)
        logits = predict_logits(self.network, encoded, self.spec.pad_token_id)
        groups = groups_of(encoded, calibration.prompt_edges_tokens)
        return calibration.apply(softmax(logits / calibration.temperature), groups)


def read_calibrations(path: Path) -> tuple[Recalibration, Recalibration | None]:
    """What the stage wrote: for the training's source, and for the target's own replies if they were enough.

    Raises:
        ConfigurationError: the file is missing or not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        target = content["target"]
        return (
            Recalibration.from_json(content["labelled"]),
            None if target is None else Recalibration.from_json(target),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} cannot be used ({error}); run `dvc repro calibrate`") from None


def calibrate(
    params: CalibrateParams, labelled: Path, checkpoint: Path, out: Path
) -> tuple[Recalibration, Recalibration | None]:
    """Fit on the calibration split; `out` is written whole or not at all."""
    loaded = Checkpoint.load(checkpoint)
    own = _fit_on(params, loaded, read_rows(labelled / "calibration.jsonl"))
    progress(f"calibrate: temperature {own.temperature:.3f}, {own.num_groups} groups")
    target = None
    path = labelled / TARGET_CALIBRATION_FILE
    rows = read_rows(path) if path.is_file() and path.stat().st_size else []
    rows = list({row.id: row for row in rows}.values())  # samples of one reply are no more than one exchangeable row
    if params.target and rows and rows[0].source != loaded.spec.source:
        if len(rows) < MIN_TARGET_ROWS:
            progress(f"calibrate: {len(rows)} replies of the target are under {MIN_TARGET_ROWS}: not calibrated for it")
        else:
            # few rows: the temperature stays, and there is one group
            pooled = replace(params, temperature=False, prompt_edges_tokens=())
            target = replace(_fit_on(pooled, loaded, rows, own.temperature), temperature=own.temperature)
            progress(f"calibrate: and on {len(rows)} replies of {loaded.spec.target_model}")
    write_json(out, {"labelled": own.to_json(), "target": None if target is None else target.to_json()})
    return own, target


def _fit_on(
    params: CalibrateParams, loaded: Checkpoint, rows: Sequence[LabelledRow], temperature: float = 1.0
) -> Recalibration:
    """`fit` on labelled rows; `temperature` holds when none is to be fitted."""
    encoded = loaded.encode(rows)
    logits = predict_logits(loaded.network, encoded, loaded.spec.pad_token_id) / temperature
    lengths = np.asarray([row.output_tokens for row in rows])
    censored = np.asarray([row.censored for row in rows])
    return fit(params, loaded.spec.edges_tokens, logits, lengths, censored, encoded)


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


def main() -> None:
    """Entry point."""
    calibrate(load_params().calibrate, LABELLED, CHECKPOINT, CALIBRATION)


if __name__ == "__main__":
    run_stage(main)
