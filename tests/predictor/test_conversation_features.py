"""What the lengths of a conversation tell of the next reply."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from serving_plugin.predictor.conversation import FEATURE_NAMES, NUM_FEATURES, Measured, features_of, words_of
from serving_plugin.predictor.encoding import ConversationEncoder, InputRule
from serving_plugin.predictor.rows import read_rows

MAX_TOKENS = 100_000


def message(role: str, num_tokens: int, words: str = "", num_bytes: int | None = None) -> Measured:
    return Measured(role, num_tokens, 4 * num_tokens if num_bytes is None else num_bytes, words_of(words))


def named(*messages: Measured) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, features_of(messages), strict=True))


def f(num: float) -> float:
    return math.log1p(num) / 8


def test_values_by_hand() -> None:
    found = named(
        message("user", 10, "write code"),
        message("assistant", 100),
        message("user", 20, "thanks"),
        message("assistant", 50),
        message("user", 5, "write code, thanks", num_bytes=25),
    )
    near, far = math.exp(8 * 2 / 3 - 0.6), math.exp(8 * 1 / 3 - 0.3)  # Jaccard 2/3 and 1/3; 4 and 2 messages back
    assert found == pytest.approx(
        {
            "last_message_tokens": f(5),
            "last_message_bytes": f(25),
            "has_earlier_reply": 1.0,
            "num_earlier_replies": math.log(3) / 3,
            "reply_1_back_tokens": f(50),
            "reply_2_back_tokens": f(100),
            "reply_3_back_tokens": 0.0,
            "replies_mean_log_tokens": (f(100) + f(50)) / 2,
            "replies_log_mean_tokens": f(75),
            "replies_max_tokens": f(100),
            "replies_min_tokens": f(50),
            "replies_spread": (f(100) - f(50)) / 2,
            "message_before_tokens": f(20),
            "conversation_tokens": f(185),
            "most_similar_question": 2 / 3,
            "most_similar_question_reply_tokens": f(100),
            "similar_questions_reply_tokens": (near * f(100) + far * f(50)) / (near + far),
        },
        abs=1e-12,
    )


def test_the_three_last_replies_by_their_age() -> None:
    turns = [one for n in (11, 22, 33, 44) for one in (message("user", 1), message("assistant", n))]
    found = named(*turns, message("user", 1))
    assert [found[f"reply_{i}_back_tokens"] for i in (1, 2, 3)] == pytest.approx([f(44), f(33), f(22)])


@pytest.mark.parametrize("system", [False, True])
def test_a_first_turn_knows_its_sizes_only(system: bool) -> None:
    found = named(*([message("system", 30)] if system else []), message("user", 7, "hello", num_bytes=31))
    sizes = {
        "last_message_tokens": f(7),
        "last_message_bytes": f(31),
        "conversation_tokens": f(37 if system else 7),
        "message_before_tokens": f(30) if system else 0.0,
    }
    assert found == pytest.approx({**dict.fromkeys(FEATURE_NAMES, 0.0), **sizes})


def test_no_messages_are_zeros() -> None:
    assert features_of([]) == (0.0,) * NUM_FEATURES


def test_the_most_similar_question_names_its_own_reply() -> None:
    turns = [
        message("user", 5, "translate the sentence about cats"), message("assistant", 12),
        message("user", 5, "write an essay about rivers"), message("assistant", 800),
        message("user", 5, "translate the sentence about dogs"), message("assistant", 14),
    ]  # fmt: skip
    essay = named(*turns, message("user", 5, "write an essay about bridges"))
    assert essay["most_similar_question"] == pytest.approx(4 / 6)
    assert essay["most_similar_question_reply_tokens"] == pytest.approx(f(800))
    # weights exp(8 * 4/6 ...) against exp(8 * 1/9 ...): the essay's reply outweighs two newer or older ones
    assert essay["similar_questions_reply_tokens"] > 0.9 * f(800)
    line = named(*turns, message("user", 5, "translate the sentence about cows"))
    assert line["most_similar_question_reply_tokens"] == pytest.approx(f(14))  # two are as similar: the newer one
    assert f(12) < line["similar_questions_reply_tokens"] < f(30)


def test_a_question_without_a_reply_of_its_own_is_not_compared() -> None:
    found = named(
        message("user", 5, "same words"), message("user", 5, "others"), message("assistant", 60),
        message("user", 5, "same words"),
    )  # fmt: skip
    assert found["most_similar_question"] == 0.0
    assert found["most_similar_question_reply_tokens"] == pytest.approx(f(60))


def test_questions_without_words_are_not_alike() -> None:
    assert named(message("user", 1), message("assistant", 9), message("user", 1))["most_similar_question"] == 0.0


def test_words_are_lower_case_and_of_the_beginning() -> None:
    assert words_of("The CAT, the c-a-t!") == {"the", "cat", "c", "a", "t"}
    assert words_of("x " * 1500 + "late") == {"x"}


MESSAGES = st.builds(
    message,
    st.sampled_from(["system", "user", "assistant", "tool", "?"]),
    st.integers(0, MAX_TOKENS),
    st.text(alphabet="ab c", max_size=12),
)


@given(st.lists(MESSAGES, max_size=30))
def test_features_are_finite_bounded_and_in_order(messages: list[Measured]) -> None:
    values = features_of(messages)
    assert len(values) == NUM_FEATURES
    assert all(math.isfinite(value) and 0.0 <= value < 2.0 for value in values)
    found = dict(zip(FEATURE_NAMES, values, strict=True))
    low, high = found["replies_min_tokens"], found["replies_max_tokens"]
    mean, log_mean = found["replies_mean_log_tokens"], found["replies_log_mean_tokens"]
    slack = 1e-9
    assert low - slack <= mean <= log_mean + slack <= high + 2 * slack  # the mean logarithm is below that of the mean
    assert found["replies_spread"] <= (high - low) / 2 + slack
    if found["similar_questions_reply_tokens"]:
        assert low - slack <= found["similar_questions_reply_tokens"] <= high + slack
    if messages:
        assert found["conversation_tokens"] >= found["last_message_tokens"]


def test_a_conversation_of_thousands_of_turns_stays_finite() -> None:
    turns = [message("user", 3, "go on"), message("assistant", 40)] * 5000
    values = features_of([*turns, message("user", 3, "go on")])
    assert all(math.isfinite(value) for value in values)
    assert dict(zip(FEATURE_NAMES, values, strict=True))["similar_questions_reply_tokens"] == pytest.approx(f(40))


def test_nothing_depends_on_the_reply_or_what_follows(tmp_path: Path) -> None:
    """Two files that differ only from the reply on give the same inputs."""
    asked = [
        {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}, {"role": "user", "content": "a"},
    ]  # fmt: skip
    futures = (
        [],
        [{"role": "assistant", "content": "b " * 500}],
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a b c d"}],
    )
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{w: i for i, w in enumerate("abcde", 1)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = ConversationEncoder(tokenizer, InputRule(16, 2, 2, 0.5))
    encoded = []
    for i, future in enumerate(futures):
        line = {
            "root_id": "r", "source": "recorded", "messages": asked + future,
            "replies": [{"turn": 3, "output_tokens": len(future), "censored": False}],
        }  # fmt: skip
        path = tmp_path / f"{i}.jsonl"
        path.write_text(json.dumps(line))
        (row,) = read_rows(path)
        encoded.append(encoder.encode(row.messages))
    assert encoded[0] == encoded[1] == encoded[2]
    assert encoded[0].ids == (1, 2, 4, 5, 1)
    assert encoded[0].features[4] == pytest.approx(f(3))
