"""A predictor between training and export: network, encoder and predictor.json in one folder, calibration beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.network import LengthNetwork, load_network, predict_logits
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import Recalibration, softmax
from serving_plugin.predictor.encoding import ConversationEncoder, EncodedConversation
from serving_plugin.predictor.model import groups_of
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import TOKENIZER_FILE, PredictorSpec


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trained network, how it reads a conversation, and what it says of itself: all that a forecast needs."""

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

    def save(self, folder: Path) -> None:
        """Write backbone, head, tokenizer.json and predictor.json."""
        self.network.save(folder)
        self.encoder.save(folder / TOKENIZER_FILE)
        self.spec.save(folder)

    def encode(self, rows: Sequence[LabelledRow]) -> list[EncodedConversation]:
        """Inputs of labelled rows."""
        return [self.encoder.encode(row.messages) for row in rows]

    def logits(self, encoded: Sequence[EncodedConversation]) -> np.ndarray:
        """(inputs, fine buckets) of the network, before temperature."""
        return predict_logits(self.network, encoded, self.spec.pad_token_id)

    def probabilities(self, rows: Sequence[LabelledRow]) -> np.ndarray:
        """(rows, fine buckets) probabilities, calibrated for the rows' source; all of one source."""
        encoded = self.encode(rows)
        calibration = self.spec.calibration_of(rows[0].source)
        groups = groups_of(encoded, calibration.prompt_edges_tokens)
        return calibration.apply(softmax(self.logits(encoded) / calibration.temperature), groups)


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
