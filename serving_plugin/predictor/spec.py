"""`predictor.json`: all that turns an ONNX file and a tokenizer into a length predictor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.files import write_json

FORMAT = 1
MODEL_FILE = "model.onnx"
TOKENIZER_FILE = "tokenizer.json"
SPEC_FILE = "predictor.json"
MODEL_FOLDER_FILES = (MODEL_FILE, TOKENIZER_FILE, SPEC_FILE)


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """What was trained, on what, for which target, and how a prompt becomes its input.

    `edges_tokens` are the fine buckets of the model's head; `granularity_tokens` is the width it is published at.
    `train_counts` are the training split's rows per fine bucket: the modal baseline needs no second file.
    """

    edges_tokens: tuple[int, ...]
    granularity_tokens: int
    target_model: str
    backbone: str
    head_tokens: int
    tail_tokens: int
    max_input_tokens: int
    pad_token_id: int
    source: str
    train_counts: tuple[int, ...]

    @property
    def num_buckets(self) -> int:
        """Number of fine buckets, i.e. of the model's outputs."""
        return len(self.edges_tokens) - 1

    def save(self, folder: Path) -> None:
        """Write `predictor.json` atomically."""
        write_json(folder / SPEC_FILE, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> PredictorSpec:
        """Read `predictor.json`.

        Raises:
            ConfigurationError: it is missing, not JSON, of another format, or lacks a key.
        """
        path = folder / SPEC_FILE
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigurationError(
                f"{folder} is no predictor folder ({SPEC_FILE} is missing); run `dvc repro`"
            ) from None
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{path} is not JSON ({error}); run `dvc repro`") from None
        if content.get("format") != FORMAT:
            raise ConfigurationError(
                f"{path} has format {content.get('format')!r}, this version reads {FORMAT}; run `dvc repro`"
            )
        missing = sorted(field.name for field in fields(cls) if field.name not in content)
        if missing:
            raise ConfigurationError(f"{path} lacks {', '.join(missing)}; run `dvc repro`")
        values = {field.name: content[field.name] for field in fields(cls)}
        values["edges_tokens"] = tuple(values["edges_tokens"])
        values["train_counts"] = tuple(values["train_counts"])
        return cls(**values)
