"""`predictor.json`: all that turns an ONNX file and a tokenizer into a length predictor."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import Recalibration
from serving_plugin.predictor.conversation import FEATURE_NAMES
from serving_plugin.predictor.encoding import InputRule
from serving_plugin.predictor.files import write_json

FORMAT = 2
MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
SPEC_FILE = "predictor.json"
MODEL_FOLDER_FILES = (MODEL_FILE, TOKENIZER_FILE, SPEC_FILE)


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """What was trained, on what, for which target, and how a conversation becomes its input.

    `edges_tokens` are the fine buckets of the model's head; `granularity_tokens` is the width it is published at.
    `train_counts` are the training split's rows per fine bucket: the modal baseline needs no second file.
    `split` names how conversations were dealt out: models of another split may have been trained on one's test rows.
    `calibration` was fitted on held-out replies of the training's `source`; `target_calibration`, if any, on the
    target's own replies, which are what serving meets.
    """

    edges_tokens: tuple[int, ...]
    granularity_tokens: int
    target_model: str
    backbone: str
    input: InputRule
    feature_names: tuple[str, ...]
    pad_token_id: int
    source: str
    train_counts: tuple[int, ...]
    calibration: Recalibration
    target_calibration: Recalibration | None = None
    split: str = ""

    @property
    def num_buckets(self) -> int:
        """Number of fine buckets, i.e. of the model's outputs."""
        return len(self.edges_tokens) - 1

    def calibrated(self, calibration: Recalibration, target_calibration: Recalibration | None = None) -> PredictorSpec:
        """The same predictor with other calibrations."""
        return replace(self, calibration=calibration, target_calibration=target_calibration)

    def calibration_of(self, source: str | None = None) -> Recalibration:
        """What holds for replies of `source`; None: for a request to the target."""
        if source == self.source or self.target_calibration is None:
            return self.calibration
        return self.target_calibration

    def save(self, folder: Path) -> None:
        """Write `predictor.json` atomically."""
        target = self.target_calibration
        content = {
            "format": FORMAT,
            **asdict(self),
            "calibration": self.calibration.to_json(),
            "target_calibration": None if target is None else target.to_json(),
        }
        write_json(folder / SPEC_FILE, content)

    @classmethod
    def load(cls, folder: Path) -> PredictorSpec:
        """Read `predictor.json`.

        Raises:
            ConfigurationError: it is missing, not JSON, of another format, or lacks a key.
        """
        path = folder / SPEC_FILE
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigurationError(
                f"{folder} is no predictor folder ({SPEC_FILE} is missing); run `dvc repro`"
            ) from None
        except ValueError as error:  # not JSON, or not even UTF-8
            raise ConfigurationError(f"{path} is not JSON ({error}); run `dvc repro`") from None
        if not isinstance(content, dict):
            raise ConfigurationError(f"{path} holds no JSON object; run `dvc repro`")
        if content.get("format") != FORMAT:
            raise ConfigurationError(
                f"{path} has format {content.get('format')!r}, this version reads {FORMAT}; run `dvc repro`"
            )
        content = {"target_calibration": None, "split": "", **content}
        missing = sorted(field.name for field in fields(cls) if field.name not in content)
        if missing:
            raise ConfigurationError(f"{path} lacks {', '.join(missing)}; run `dvc repro`")
        values = {field.name: content[field.name] for field in fields(cls)}
        try:
            for name in ("edges_tokens", "train_counts", "feature_names"):
                values[name] = tuple(values[name])
            values["input"] = InputRule(**values["input"])
            values["calibration"] = Recalibration.from_json(values["calibration"])
            target = values["target_calibration"]
            values["target_calibration"] = None if target is None else Recalibration.from_json(target)
            _check(values)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(f"{path} cannot be used ({error}); run `dvc repro`") from None
        if values["feature_names"] != FEATURE_NAMES:
            raise ConfigurationError(
                f"{path} was trained on other conversation features than this version computes; run `dvc repro`"
            )
        return cls(**values)


def _check(values: dict[str, Any]) -> None:
    edges, counts = values["edges_tokens"], values["train_counts"]
    rising = all(low < high for low, high in pairwise(edges))
    if len(edges) < 2 or edges[0] != 0 or not rising or not all(isinstance(edge, int) for edge in edges):
        raise ValueError(f"edges_tokens {edges} are not whole numbers that rise from 0")
    if len(counts) != len(edges) - 1 or min(counts) < 0 or sum(counts) <= 0:
        raise ValueError(f"train_counts {counts} are no rows of {len(edges) - 1} buckets")
    for name in ("granularity_tokens", "pad_token_id"):
        if not isinstance(values[name], int) or values[name] < (name == "granularity_tokens"):
            raise ValueError(f"{name} is {values[name]!r}")
    for recalibration in (values["calibration"], values["target_calibration"]):
        if recalibration is not None and not 0 < recalibration.temperature < math.inf:
            raise ValueError(f"temperature is {recalibration.temperature}, must be above 0")
