"""Stage calibrate: make the checkpoint's probabilities mean what they say, on the calibration split.

A temperature first, then distributional conformal calibration by group (`serving_plugin.predictor.calibration`). A
predictor of recorded replies is calibrated a second time on the target's own replies to the same split, if there are
enough of them: how likely each length is differs between models, and serving meets the target's. Writes
`models/predictor/calibration.json`, which evaluation and export read.

    python -m pipeline.calibrate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.checkpoint import Checkpoint
from pipeline.files import progress, run_stage, write_json
from pipeline.label import TARGET_CALIBRATION_FILE
from pipeline.params import CalibrateParams, load_params
from pipeline.train import CHECKPOINT, LABELLED
from serving_plugin.predictor.calibration import (
    Recalibration,
    fit_recalibration,
    fit_temperature,
    identity,
    pit_values,
    softmax,
)
from serving_plugin.predictor.encoding import EncodedConversation
from serving_plugin.predictor.model import groups_of
from serving_plugin.predictor.rows import LabelledRow, read_rows

CALIBRATION = Path("models/predictor/calibration.json")
MIN_TARGET_ROWS = 50


def calibrate(
    params: CalibrateParams, labelled: Path, checkpoint: Path, out: Path
) -> tuple[Recalibration, Recalibration | None]:
    """Fit on the calibration split; `out` is written whole or not at all."""
    loaded = Checkpoint.load(checkpoint)
    own = _fit_on(params, loaded, _one_per_reply(read_rows(labelled / "calibration.jsonl")))
    progress(f"calibrate: temperature {own.temperature:.3f}, {own.num_groups} groups")
    target = None
    path = labelled / TARGET_CALIBRATION_FILE
    rows = _one_per_reply(read_rows(path) if path.is_file() and path.stat().st_size else [])
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


def _one_per_reply(rows: Sequence[LabelledRow]) -> list[LabelledRow]:
    """Samples of one reply are no more than one exchangeable row."""
    return list({row.id: row for row in rows}.values())


def _fit_on(
    params: CalibrateParams, loaded: Checkpoint, rows: Sequence[LabelledRow], temperature: float = 1.0
) -> Recalibration:
    """`fit` on labelled rows; `temperature` holds when none is to be fitted."""
    encoded = loaded.encode(rows)
    logits = loaded.logits(encoded) / temperature
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
