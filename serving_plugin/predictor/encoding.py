"""From a prompt's text to the predictor's input ids: one code path for training, evaluation and serving.

A long prompt keeps its first `head_tokens` and last `tail_tokens`: instructions stand at either end (TetriInfer does
not say how it truncates; ours). Must not import torch or transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from serving_plugin.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`ids` with special tokens, cut to the input limit; `num_tokens` of the whole prompt without special tokens."""

    ids: tuple[int, ...]
    num_tokens: int


def keep_head_and_tail(ids: Sequence[int], head_tokens: int, tail_tokens: int) -> list[int]:
    """First `head_tokens` and last `tail_tokens` of `ids`; all of it when it is no longer than both together."""
    if len(ids) <= head_tokens + tail_tokens:
        return list(ids)
    return [*ids[:head_tokens], *ids[len(ids) - tail_tokens :]]


class PromptEncoder:
    """Tokenises prompts to at most `max_input_tokens`, special tokens included.

    A prompt that spells a special token (`<pad>`, `[SEP]`) does not smuggle it in.
    """

    def __init__(self, tokenizer: Tokenizer, max_input_tokens: int, head_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()  # tokenizer.json may carry a limit and a padding of its own
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._prefix, self._suffix = _special_tokens(tokenizer)
        num_special = len(self._prefix) + len(self._suffix)
        self.max_input_tokens, self.head_tokens = max_input_tokens, head_tokens
        self.tail_tokens = max_input_tokens - num_special - head_tokens
        if head_tokens < 0 or self.tail_tokens < 0 or head_tokens + self.tail_tokens < 1:
            raise ConfigurationError(
                f"max_input_tokens {max_input_tokens} has no room for head_tokens {head_tokens} "
                f"and {num_special} special tokens; raise it or lower head_tokens"
            )

    @classmethod
    def from_file(cls, path: Path, max_input_tokens: int, head_tokens: int) -> PromptEncoder:
        """Read a `tokenizer.json`.

        Raises:
            ConfigurationError: the file is missing or not a tokenizer.
        """
        if not path.is_file():
            raise ConfigurationError(f"{path} is missing; run `dvc repro`")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust binding raises a bare Exception
            raise ConfigurationError(f"{path} is not a tokenizer ({error}); run `dvc repro`") from None
        return cls(tokenizer, max_input_tokens, head_tokens)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`, which `from_file` reads."""
        self._tokenizer.save(str(path))

    def encode(self, text: str) -> EncodedPrompt:
        """Encode one prompt."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[EncodedPrompt]:
        """Encode prompts, each as it would be alone."""
        # JSON may carry lone surrogates, which no tokenizer takes
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        encodings = self._tokenizer.encode_batch(clean, add_special_tokens=False)
        return [EncodedPrompt(self._wrap(encoding.ids), len(encoding.ids)) for encoding in encodings]

    def _wrap(self, ids: Sequence[int]) -> tuple[int, ...]:
        return (*self._prefix, *keep_head_and_tail(ids, self.head_tokens, self.tail_tokens), *self._suffix)


def _special_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer's post-processor puts before and behind a text (BERT: [CLS], [SEP]; OPT: </s>, nothing)."""
    probe = "a"
    bare = tokenizer.encode(probe, add_special_tokens=False).ids
    full = tokenizer.encode(probe, add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ConfigurationError(
        f"the tokenizer turns {probe!r} into {bare} alone but {full} with special tokens: no frame to use"
    )


def pad_batch(ids: Sequence[Sequence[int]], pad_token_id: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Right-padded `(input_ids, attention_mask)`, both (batch, longest) int64."""
    longest = max(len(row) for row in ids)
    input_ids = np.full((len(ids), longest), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros((len(ids), longest), dtype=np.int64)
    for i, row in enumerate(ids):
        input_ids[i, : len(row)] = row
        attention_mask[i, : len(row)] = 1
    return input_ids, attention_mask
