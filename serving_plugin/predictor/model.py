"""The trained predictor at run time: tokenizer + ONNX Runtime session. Must not import torch or transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthForecast
from serving_plugin.predictor.calibration import group_of
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.encoding import ConversationEncoder, EncodedConversation, pad_batch
from serving_plugin.predictor.registry import ResolvedModel, resolve_model
from serving_plugin.predictor.spec import MODEL_FILE, SPEC_FILE, TOKENIZER_FILE, PredictorSpec
from serving_plugin.predictor.target import same_target

if TYPE_CHECKING:
    import onnxruntime

    from serving_plugin.predictor.rows import LabelledRow

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]


class LengthPredictor:
    """Conversations in, calibrated `LengthForecast`s out; none depends on its batch (to float rounding)."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        encoder: ConversationEncoder,
        spec: PredictorSpec,
        resolved: ResolvedModel,
        batch_size: int = 8,
    ) -> None:
        self._session, self._encoder, self._batch_size = session, encoder, batch_size
        # Quantised graphs have one scale for all activations of a run: rows of a batch would change each other, so
        # they run one by one.
        self.is_quantised = session.get_modelmeta().producer_name == "onnx.quantize"
        self.spec, self.resolved = spec, resolved

    @classmethod
    def load(
        cls,
        uri_or_folder: str,
        *,
        tracking_uri: str | None = None,
        num_threads: int = 1,
        batch_size: int = 8,
        resolve: Callable[[str, str | None], ResolvedModel] = resolve_model,
    ) -> LengthPredictor:
        """Load from `models:/NAME@ALIAS`, `models:/NAME/VERSION` or a folder.

        Raises:
            ConfigurationError: nothing usable lies there.
        """
        resolved = resolve(uri_or_folder, tracking_uri)
        folder = Path(resolved.path)
        spec = PredictorSpec.load(folder)
        encoder = ConversationEncoder.from_file(folder / TOKENIZER_FILE, spec.input)
        session = open_session(folder / MODEL_FILE, num_threads)
        width = session.get_outputs()[0].shape[-1]
        if isinstance(width, int) and width != spec.num_buckets:
            raise ConfigurationError(
                f"{folder / MODEL_FILE} has {width} buckets, {SPEC_FILE} {spec.num_buckets}: not of one model; "
                f"run `dvc repro`"
            )
        predictor = cls(session, encoder, spec, resolved, batch_size)
        logger.info(
            "length predictor %s version %s (target %s) runs on %s",
            resolved.name, resolved.version or "none", spec.target_model, predictor.provider,
        )  # fmt: skip
        return predictor

    @property
    def provider(self) -> str:
        """ONNX Runtime's execution provider in use, e.g. `CPUExecutionProvider`."""
        return str(self._session.get_providers()[0])

    def require_target(self, served_model: str) -> None:
        """Refuse to forecast for a model that this predictor was not trained on.

        Raises:
            ConfigurationError: the targets differ.
        """
        if not same_target(self.spec.target_model, served_model):
            raise ConfigurationError(
                f"predictor {self.resolved.uri} was trained for target {self.spec.target_model!r}, "
                f"not {served_model!r}; train one for it, or pass --allow-other-target"
            )

    def encode(self, messages: Sequence[Message]) -> EncodedConversation:
        """Tokenise a conversation so far; its last message is the one that will be answered."""
        return self._encoder.encode(messages)

    def predict(self, conversations: Sequence[Sequence[Message]]) -> list[LengthForecast]:
        """One forecast per conversation, in order."""
        return self.to_forecasts(self.probabilities([self.encode(messages) for messages in conversations]))

    def predict_texts(self, texts: Sequence[str]) -> list[LengthForecast]:
        """One forecast per prompt without roles, each taken as a user's first message."""
        return self.predict([(Message("user", text),) for text in texts])

    def to_forecasts(self, probabilities: FloatArray) -> list[LengthForecast]:
        """Rows of (batch, buckets) as forecasts over the model's fine buckets."""
        return [LengthForecast.from_weights(self.spec.edges_tokens, row.tolist()) for row in probabilities]

    def conversation_probabilities(self, rows: Sequence[LabelledRow]) -> FloatArray:
        """(rows, buckets) of labelled rows, calibrated for the source of each."""
        encoded = [self.encode(row.messages) for row in rows]
        return self._calibrated(self._raw(encoded), encoded, [row.source for row in rows])

    def probabilities(self, encoded: Sequence[EncodedConversation]) -> FloatArray:
        """(conversations, buckets), calibrated for the target's replies."""
        return self._calibrated(self._raw(encoded), encoded, [None] * len(encoded))

    def _raw(self, encoded: Sequence[EncodedConversation]) -> FloatArray:
        """(conversations, buckets) of the graph; batches hold inputs of like length, so that little is padding."""
        result = np.empty((len(encoded), self.spec.num_buckets), dtype=np.float32)
        by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids))
        for start in range(0, len(by_length), self._batch_size):
            rows = by_length[start : start + self._batch_size]
            result[rows] = self._run([encoded[i] for i in rows])
        return result

    def _calibrated(
        self, raw: FloatArray, encoded: Sequence[EncodedConversation], sources: Sequence[str | None]
    ) -> FloatArray:
        result = np.empty_like(raw)
        for source in set(sources):
            rows = [i for i, other in enumerate(sources) if other == source]
            calibration = self.spec.calibration_of(source)
            groups = groups_of([encoded[i] for i in rows], calibration.prompt_edges_tokens)
            result[rows] = calibration.apply(raw[rows], groups)
        return result

    def _run(self, encoded: Sequence[EncodedConversation]) -> FloatArray:
        """Probabilities after temperature, which the graph holds."""
        if self.is_quantised:
            return np.concatenate([run_session(self._session, [one], self.spec.pad_token_id) for one in encoded])
        return run_session(self._session, encoded, self.spec.pad_token_id)


def groups_of(encoded: Sequence[EncodedConversation], prompt_edges_tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """(conversations,) calibration groups."""
    return group_of(
        prompt_edges_tokens,
        np.asarray([one.num_tokens for one in encoded], dtype=np.int64),
        np.asarray([one.num_earlier_replies for one in encoded], dtype=np.int64),
    )


def run_session(
    session: onnxruntime.InferenceSession, encoded: Sequence[EncodedConversation], pad_token_id: int
) -> FloatArray:
    """(batch, buckets) of one batch."""
    input_ids, attention_mask = pad_batch([one.ids for one in encoded], pad_token_id)
    features = np.asarray([one.features for one in encoded], dtype=np.float32)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "features": features}
    return np.asarray(session.run(["probabilities"], inputs)[0], dtype=np.float32)


def open_session(path: Path, num_threads: int) -> onnxruntime.InferenceSession:
    """Session with CUDA where this build and machine offer it, else CPU; its threads sleep while there is no work.

    Raises:
        ConfigurationError: the file is missing or not a model, or `num_threads` is below 1.
    """
    import onnxruntime

    if num_threads < 1:
        raise ConfigurationError(f"--num-threads {num_threads} is below 1")
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing; run `dvc repro`")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # ONNX Runtime's threads spin by default: on few cores they would starve the engine beside them
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    offered = onnxruntime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in offered]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # the binding's own exception classes share no base but Exception
        raise ConfigurationError(f"{path} cannot be loaded ({str(error).splitlines()[0]}); run `dvc repro`") from None
