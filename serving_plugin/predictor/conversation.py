"""A conversation as the predictor sees it: messages, and what their lengths alone tell of the next reply.

How long the earlier replies were is the best single sign of the next one's length, and no window of the text shows it:
it goes to the model as numbers (`FEATURE_NAMES`). Must not import torch or transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INSTRUCTION_ROLES = ("system", "developer")
MAX_MESSAGES = 256

_WORD = re.compile(r"\w+")
_COMPARED_CHARS = 2000  # the beginning decides whether two questions are fillings of one template
_SIMILARITY_SHARPNESS = 8.0
_RECENCY_PER_REPLY = 0.3

FEATURE_NAMES = (
    "last_message_tokens",
    "last_message_bytes",
    "has_earlier_reply",
    "num_earlier_replies",
    "reply_1_back_tokens",
    "reply_2_back_tokens",
    "reply_3_back_tokens",
    "replies_mean_log_tokens",
    "replies_log_mean_tokens",
    "replies_max_tokens",
    "replies_min_tokens",
    "replies_spread",
    "message_before_tokens",
    "conversation_tokens",
    "most_similar_question",
    "most_similar_question_reply_tokens",
    "similar_questions_reply_tokens",
)
NUM_FEATURES = len(FEATURE_NAMES)
_LOG_SCALE = 8.0  # log1p(3000 tokens): features stay within about [0, 1.5]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. `role` is a chat template's word: system, user, assistant, tool ..."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of a message besides its text: sizes, and the words that tell whether two questions are alike."""

    role: str
    num_tokens: int
    num_bytes: int
    words: frozenset[str]


def messages_of(raw: Any) -> tuple[Message, ...]:
    """Messages from OpenAI's JSON (`role`, `content` as text or as a list of parts); other keys are ignored.

    Raises:
        TypeError: not a list of such objects.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise TypeError(f"messages are a {type(raw).__name__}, not a list")
    return tuple(_message_of(item) for item in raw)


def _message_of(raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise TypeError(f"a message is a {type(raw).__name__}, not an object")
    content = raw.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(part) for part in content)
    return Message(str(raw.get("role", "user")), content if isinstance(content, str) else "")


def _part_text(part: Any) -> str:
    """Text of one part of a message's content; a picture or sound has none."""
    if isinstance(part, Mapping):
        part = part.get("text")
    return part if isinstance(part, str) else ""


def heard_by_predictor(messages: Sequence[Message]) -> list[Message]:
    """The messages that a forecast is made from: what the users and the assistant said, and what tools returned.

    Left out: instructions (system, developer), of which the training conversations have none, so that a model could
    only misread them (as a question, an opening), and the assistant's empty messages (tool calls), which are no reply.
    Of a very long conversation the first and the last `MAX_MESSAGES` - 1 are read.
    """
    heard = [
        message
        for message in messages
        if message.role not in INSTRUCTION_ROLES and not (message.role == "assistant" and not message.content)
    ]
    return heard if len(heard) <= MAX_MESSAGES else [heard[0], *heard[len(heard) - MAX_MESSAGES + 1 :]]


def words_of(text: str) -> frozenset[str]:
    """Distinct words of the beginning of a message, in lower case."""
    return frozenset(_WORD.findall(text[:_COMPARED_CHARS].lower()))


def features_of(messages: Sequence[Measured]) -> tuple[float, ...]:
    """`FEATURE_NAMES` of a conversation whose next message is the reply to forecast; about [0, 1.5] each.

    The last message is the question, whatever its role. Lengths enter as logarithms: replies vary by factors.
    """
    if not messages:
        return (0.0,) * NUM_FEATURES
    last, earlier = messages[-1], messages[:-1]
    replies = [_scaled(m.num_tokens) for m in earlier if m.role == "assistant"]
    questions = [m for m in earlier if m.role != "assistant"]
    total = _scaled(sum(m.num_tokens for m in messages))
    sizes = (_scaled(last.num_tokens), _scaled(last.num_bytes))
    before = _scaled(questions[-1].num_tokens) if questions else 0.0
    if not replies:
        return (*sizes, *(0.0,) * 10, before, total, 0.0, 0.0, 0.0)
    mean = sum(replies) / len(replies)
    log_mean = _scaled(sum(m.num_tokens for m in earlier if m.role == "assistant") / len(replies))
    spread = math.sqrt(sum((value - mean) ** 2 for value in replies) / len(replies))
    recent = [*reversed(replies[-3:]), 0.0, 0.0][:3]
    return (
        *sizes,
        1.0,
        math.log1p(len(replies)) / 3,
        *recent,
        mean,
        log_mean,
        max(replies),
        min(replies),
        spread,
        before,
        total,
        *_similar_questions(last, earlier),
    )


def _similar_questions(last: Measured, earlier: Sequence[Measured]) -> tuple[float, float, float]:
    """Similarity (Jaccard of words) of the most similar earlier question, its reply's length, and the mean length of
    all replies weighted by the similarity of their questions: chats often repeat one template."""
    best, best_reply, weight_sum, weighted = -1.0, 0.0, 0.0, 0.0
    for position in range(len(earlier) - 1):
        question, reply = earlier[position], earlier[position + 1]
        if question.role == "assistant" or reply.role != "assistant":
            continue
        union = len(question.words | last.words)
        similarity = len(question.words & last.words) / union if union else 0.0
        length = _scaled(reply.num_tokens)
        if similarity >= best:
            best, best_reply = similarity, length
        weight = math.exp(_SIMILARITY_SHARPNESS * similarity + _RECENCY_PER_REPLY * (position - len(earlier)) / 2)
        weight_sum, weighted = weight_sum + weight, weighted + weight * length
    return (best, best_reply, weighted / weight_sum) if weight_sum else (0.0, 0.0, 0.0)


def _scaled(num: float) -> float:
    return math.log1p(num) / _LOG_SCALE
