"""From a conversation to the predictor's input: one code path for training, evaluation and serving.

Ids, in the order of the conversation, with the tokenizer's separator between the parts:

    [opening: head of the first message] [reply: tail of the last reply] [question: head and tail of the last message]

A part that does not exist takes no room; what the first two leave belongs to the question, so a single prompt keeps its
first and last tokens. The chat template's own text is left out: it is the same in every request and tells nothing; so
are instructions (`conversation.heard_by_predictor`).
Lengths of the whole conversation go beside the ids as numbers (`conversation.features_of`). Must not import torch or
transformers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import Measured, Message, features_of, heard_by_predictor, words_of

_WHOLE_CHARS = 16_384  # a longer message is tokenised at both ends only and its length estimated from them
_REMEMBERED_MESSAGES = 4096  # a chat's earlier messages come again with every turn; about 5 kB each


@dataclass(frozen=True, slots=True)
class InputRule:
    """How a conversation is cut to the model's input, in the backbone's tokens.

    `max_tokens` bounds the whole input, special tokens included. `opening_tokens` and `reply_tokens` bound the first
    message and the last reply. Of what is left for the last message, `head_share` goes to its beginning.
    """

    max_tokens: int
    opening_tokens: int
    reply_tokens: int
    head_share: float

    def __post_init__(self) -> None:
        if self.opening_tokens < 0 or self.reply_tokens < 0 or not 0 <= self.head_share <= 1:
            raise ConfigurationError(
                f"input rule {self}: opening_tokens and reply_tokens must be 0 or more, head_share from 0 to 1"
            )


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """`ids` with special tokens, cut to the input limit; `features` as `conversation.FEATURE_NAMES` names them.

    `num_tokens` is the length of the last message, `num_earlier_replies` how often the assistant has spoken.
    """

    ids: tuple[int, ...]
    features: tuple[float, ...]
    num_tokens: int
    num_earlier_replies: int


def keep_head_and_tail(ids: Sequence[int], head_tokens: int, tail_tokens: int) -> list[int]:
    """First `head_tokens` and last `tail_tokens` of `ids`; all of it when it is no longer than both together."""
    if len(ids) <= head_tokens + tail_tokens:
        return list(ids)
    return [*ids[:head_tokens], *ids[len(ids) - tail_tokens :]]


class ConversationEncoder:
    """Tokenises conversations to at most `rule.max_tokens`.

    A message that spells a special token (`<pad>`, `[SEP]`) does not smuggle it in: it stays text.
    """

    def __init__(self, tokenizer: Tokenizer, rule: InputRule) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()  # tokenizer.json may carry a limit and a padding of its own
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._prefix, self._suffix = _special_tokens(tokenizer)
        self._separator = self._suffix or self._prefix
        self.rule = rule
        room = rule.max_tokens - len(self._prefix) - len(self._suffix)
        least = room - rule.opening_tokens - rule.reply_tokens - 2 * len(self._separator)
        if least < 1:
            raise ConfigurationError(
                f"input.max_tokens {rule.max_tokens} leaves {least} tokens for the last message beside opening_tokens "
                f"{rule.opening_tokens}, reply_tokens {rule.reply_tokens} and the special tokens; raise the first or "
                f"lower the others"
            )
        self._room = room
        self._remembered: OrderedDict[bytes, _Tokenised] = OrderedDict()  # by digest: the texts may be megabytes

    @classmethod
    def from_file(cls, path: Path, rule: InputRule) -> ConversationEncoder:
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
        return cls(tokenizer, rule)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`, which `from_file` reads."""
        self._tokenizer.save(str(path))

    def encode(self, messages: Sequence[Message]) -> EncodedConversation:
        """Encode the conversation so far; its last message is the one that will be answered."""
        messages = heard_by_predictor(messages)
        seen = [self._seen(message.content) for message in messages]
        measured = [
            Measured(message.role, one.num_tokens, one.num_bytes, one.words)
            for message, one in zip(messages, seen, strict=True)
        ]
        return EncodedConversation(
            ids=self._input_ids(messages, seen),
            features=features_of(measured),
            num_tokens=measured[-1].num_tokens if measured else 0,
            num_earlier_replies=sum(message.role == "assistant" for message in messages[:-1]),
        )

    def _input_ids(self, messages: Sequence[Message], seen: Sequence[_Tokenised]) -> tuple[int, ...]:
        parts: list[Sequence[int]] = []
        if len(messages) > 1 and self.rule.opening_tokens:
            parts.append(seen[0].head[: self.rule.opening_tokens])
        replies = [i for i in range(1, len(messages) - 1) if messages[i].role == "assistant"]
        if replies and self.rule.reply_tokens:
            parts.append(seen[replies[-1]].tail[-self.rule.reply_tokens :])
        left = self._room - sum(len(part) + len(self._separator) for part in parts)
        if messages:
            head = round(left * self.rule.head_share)
            parts.append(_cut(seen[-1], head, left - head))
        ids = [*self._prefix]
        for number, part in enumerate(parts):
            ids += [*self._separator, *part] if number else part
        # a tokenizer without special tokens leaves nothing of an empty message, and no model runs on nothing
        return (*ids, *self._suffix) or tuple(self._ids(".")[:1])

    def _seen(self, text: str) -> _Tokenised:
        """`_tokenise`, with a memory of the last messages."""
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        found = self._remembered.pop(key, None) or self._tokenise(text)
        self._remembered[key] = found
        if len(self._remembered) > _REMEMBERED_MESSAGES:
            self._remembered.popitem(last=False)
        return found

    def _tokenise(self, text: str) -> _Tokenised:
        # JSON may carry lone surrogates, which no tokenizer takes
        clean = text.encode("utf-8", "replace").decode("utf-8")
        num_bytes, keep = len(clean.encode("utf-8")), self.rule.max_tokens
        if len(clean) <= _WHOLE_CHARS:
            ids = self._ids(clean)
            return _Tokenised(tuple(ids[:keep]), tuple(ids[-keep:]), len(ids), num_bytes, words_of(clean))
        head, tail = self._ids(clean[: _WHOLE_CHARS // 2]), self._ids(clean[-_WHOLE_CHARS // 2 :])
        estimate = round((len(head) + len(tail)) * len(clean) / _WHOLE_CHARS)
        return _Tokenised(tuple(head[:keep]), tuple(tail[-keep:]), estimate, num_bytes, words_of(clean))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class _Tokenised:
    """A message's first and last ids (as many as an input holds) and its sizes."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    num_tokens: int
    num_bytes: int
    words: frozenset[str]


def _cut(message: _Tokenised, head_tokens: int, tail_tokens: int) -> list[int]:
    if message.num_tokens <= len(message.head):  # the head is the whole message
        return keep_head_and_tail(message.head, head_tokens, tail_tokens)
    # both ends of a very long message may have fewer tokens than there is room for
    return [*message.head[:head_tokens], *message.tail[max(0, len(message.tail) - tail_tokens) :]]


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
