"""From a conversation to ids: parts and budgets, special tokens, padding; the same in training and serving."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import MAX_MESSAGES, Message, heard_by_predictor, messages_of
from serving_plugin.predictor.encoding import ConversationEncoder, InputRule, keep_head_and_tail, pad_batch

WORDS = ("<pad>", "[CLS]", "[SEP]", "[UNK]", "</s>", "a", "b", "c", "d", "e", "f", "g", "h")
PAD, CLS, SEP, UNK, END, A, B, C, D, E, F, G, H = range(len(WORDS))
RULE = InputRule(max_tokens=16, opening_tokens=2, reply_tokens=3, head_share=0.5)
SENTENCES = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle and answers it.",
    "Explain how a computer keeps the things that it has to remember, and what it does when there is no room left.",
    "What is the difference between a process and a thread? Answer in two sentences, then show an example.",
)


def words_tokenizer(frame: str) -> Tokenizer:
    """One id a word, framed as `frame` says, with a truncation and a padding of its own as MiniLM's file has."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "[CLS]", "[SEP]", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP), ("</s>", END)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12, pad_id=PAD, pad_token="<pad>")
    return tokenizer


def bert_like(rule: InputRule = RULE) -> ConversationEncoder:
    return ConversationEncoder(words_tokenizer("[CLS] $A [SEP]"), rule)


def opt_like(rule: InputRule = RULE) -> ConversationEncoder:
    return ConversationEncoder(words_tokenizer("</s> $A"), rule)


def frameless(rule: InputRule = RULE) -> ConversationEncoder:
    return ConversationEncoder(words_tokenizer("$A"), rule)


def byte_level() -> Tokenizer:
    """A byte-level BPE, as OPT's: pieces of words, and any text at all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    return tokenizer


def chat(*contents: str, first: str = "user") -> tuple[Message, ...]:
    """Messages of alternating roles."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return tuple(Message(roles[i % 2], content) for i, content in enumerate(contents))


CHAT = chat("a b c", "d e f g h", "h", "b c d e f", "g h a b c d e f g h a b")


# Layout


@pytest.mark.parametrize(
    ("encoder", "ids"),
    [
        # 16 less 2 of the frame, 2 + 1 of the opening, 3 + 1 of the reply: 7 are left, round(3.5) = 4 for the head
        (bert_like(), (CLS, A, B, SEP, D, E, F, SEP, G, H, A, B, H, A, B, SEP)),
        # 16 - 1, 3, 4: 8 are left
        (opt_like(), (END, A, B, END, D, E, F, END, G, H, A, B, G, H, A, B)),
        # 16, 2, 3: 11 are left, round(5.5) = 6
        (frameless(), (A, B, D, E, F, G, H, A, B, C, D, F, G, H, A, B)),
    ],
    ids=["bert", "opt", "no frame"],
)
def test_opening_reply_and_question_in_their_order(encoder: ConversationEncoder, ids: tuple[int, ...]) -> None:
    encoded = encoder.encode(CHAT)
    assert encoded.ids == ids
    assert encoded.num_tokens == 12
    assert encoded.num_earlier_replies == 2


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        # the question alone: both ends in all the room, 7 + 7
        (chat("a b c d e f g h a b c d e f g h"), (CLS, A, B, C, D, E, F, G, B, C, D, E, F, G, H, SEP)),
        # no reply yet: its 3 + 1 go to the question, round(5.5) = 6 and 5
        (
            (Message("tool", "a b c"), Message("user", "a b c d e f g h a b c d e f g h")),
            (CLS, A, B, SEP, A, B, C, D, E, F, D, E, F, G, H, SEP),
        ),
        # a greeting is the opening, not a reply as well
        (chat("a b c", "d", first="assistant"), (CLS, A, B, SEP, D, SEP)),
        # parts shorter than their budget leave the rest to the question: 14 - 2 - 2 = 10
        (chat("a", "b", "c d e f g h a b c d e f"), (CLS, A, SEP, B, SEP, C, D, E, F, G, B, C, D, E, F, SEP)),
        # all that fits is there once and whole
        (chat("a b", "c d", "e f"), (CLS, A, B, SEP, C, D, SEP, E, F, SEP)),
        # the last message is the question, whoever wrote it
        (chat("a", "b"), (CLS, A, SEP, B, SEP)),
        (chat(""), (CLS, SEP)),
        ((), (CLS, SEP)),
    ],
)  # fmt: skip
def test_a_part_that_is_missing_or_short_leaves_its_room_to_the_question(
    messages: tuple[Message, ...], ids: tuple[int, ...]
) -> None:
    assert bert_like().encode(messages).ids == ids


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"opening_tokens": 0}, (CLS, D, E, F, SEP, G, H, A, B, F, G, H, A, B, SEP)),
        ({"reply_tokens": 0}, (CLS, A, B, SEP, G, H, A, B, C, F, G, H, A, B, SEP)),
        ({"opening_tokens": 0, "reply_tokens": 0}, (CLS, G, H, A, B, C, D, E, F, G, H, A, B, SEP)),
        ({"head_share": 0.0}, (CLS, A, B, SEP, D, E, F, SEP, D, E, F, G, H, A, B, SEP)),
        ({"head_share": 1.0}, (CLS, A, B, SEP, D, E, F, SEP, G, H, A, B, C, D, E, SEP)),
    ],
)
def test_budgets_and_share_do_what_they_say(changes: dict[str, Any], ids: tuple[int, ...]) -> None:
    rule = replace(RULE, **{"max_tokens": 15 if "head_share" not in changes else 16, **changes})
    assert bert_like(rule).encode(CHAT).ids == ids


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_and_tool_calls_change_nothing(role: str) -> None:
    """Training conversations have none of them: a model would read them as something else."""
    plain = chat("a b c", "d e", "f g")
    question, reply, last = plain
    told = Message(role, "a b c d e f g h")
    seen = bert_like().encode((told, question, Message("assistant", ""), reply, told, last))
    assert seen == bert_like().encode(plain)
    assert bert_like().encode((told,)) == bert_like().encode(())


def test_of_a_very_long_conversation_the_first_and_the_last_messages_are_read() -> None:
    texts = ["a", "b"] * MAX_MESSAGES
    long, short = chat(*texts, "c"), chat(*texts[: MAX_MESSAGES - 1], "c")
    assert len(heard_by_predictor(long)) == MAX_MESSAGES
    assert heard_by_predictor(long)[0] == long[0]
    assert heard_by_predictor(long)[1:] == list(long[1 - MAX_MESSAGES :])
    assert heard_by_predictor(short) == list(short)


@given(
    contents=st.lists(st.text(alphabet="abc ", max_size=60), max_size=6),
    first=st.sampled_from(["user", "assistant"]),
    opening=st.integers(0, 9),
    reply=st.integers(0, 9),
    room=st.integers(1, 20),
    share=st.floats(0, 1),
    frame=st.sampled_from([("[CLS] $A [SEP]", 2, 1), ("</s> $A", 1, 1), ("$A", 0, 0)]),
)
def test_the_limit_holds_and_the_frame_is_there(
    contents: list[str], first: str, opening: int, reply: int, room: int, share: float, frame: tuple[str, int, int]
) -> None:
    template, num_special, num_separator = frame
    limit = num_special + opening + reply + 2 * num_separator + room
    encoder = ConversationEncoder(words_tokenizer(template), InputRule(limit, opening, reply, share))
    encoded = encoder.encode(chat(*contents, first=first))
    assert num_special <= len(encoded.ids) <= limit
    heard = heard_by_predictor(chat(*contents, first=first))
    words = [message.content.split() for message in heard]
    if words and len(words[-1]) >= limit:
        assert len(encoded.ids) == limit  # room is not wasted
    assert encoded.num_tokens == (len(words[-1]) if words else 0)
    if num_special == 2:
        assert (encoded.ids[0], encoded.ids[-1]) == (CLS, SEP)
    if num_special == 1:
        assert encoded.ids[0] == END


@given(ids=st.lists(st.integers(0, 99), max_size=40), head=st.integers(0, 15), tail=st.integers(0, 15))
def test_head_and_tail_keep_both_ends_and_the_order(ids: list[int], head: int, tail: int) -> None:
    kept = keep_head_and_tail(ids, head, tail)
    assert len(kept) == min(len(ids), head + tail)
    if len(ids) <= head + tail:
        assert kept == ids
    else:
        assert kept[:head] == ids[:head]
        assert kept[head:] == ids[len(ids) - tail :]


# Text that is not plain


@pytest.mark.parametrize(("encoder", "special"), [(bert_like(), [CLS, SEP, SEP, SEP]), (opt_like(), [END] * 3)])
def test_text_that_spells_special_tokens_does_not_smuggle_them_in(
    encoder: ConversationEncoder, special: list[int]
) -> None:
    spelt = "[SEP] <pad> </s> [CLS]"
    ids = encoder.encode(chat(spelt, spelt, spelt)).ids
    assert [token for token in ids if token in (PAD, CLS, SEP, END)] == special
    assert ids.count(UNK) == len(ids) - len(special)  # brackets and names in vain


def test_lone_surrogate_is_a_question_mark_not_a_crash() -> None:
    encoder = ConversationEncoder(byte_level(), RULE)
    assert encoder.encode(chat("a \ud83d b")) == encoder.encode(chat("a ? b"))


def test_very_long_message_is_estimated_and_keeps_its_ends() -> None:
    rng = random.Random(3)
    vocabulary = " ".join(SENTENCES).split()
    text = " ".join(rng.choice(vocabulary) for _ in range(30_000))[:100_000]
    true = byte_level().encode(text, add_special_tokens=False).ids
    encoder = ConversationEncoder(byte_level(), replace(RULE, max_tokens=64))
    encoded = encoder.encode(chat(text))
    assert encoded.num_tokens == pytest.approx(len(true), rel=0.03)
    assert encoded.ids == (1, *true[:32], *true[-31:])  # round(63 / 2) = 32
    replied = encoder.encode(chat("hello", text, "and?"))
    assert replied.ids[-2 - 3 - len(_ids("and?")) :][:5] == (1, *true[-3:], 1)


def _ids(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return ids


def test_very_long_message_of_few_tokens_keeps_them_all() -> None:
    text = "a b c d e" + " " * 20_000 + "f g h a b"
    encoded = bert_like().encode(chat(text))
    assert encoded.ids == (CLS, A, B, C, D, E, F, G, H, A, B, SEP)
    assert bert_like().encode(chat(" " * 100_000)).ids == (CLS, SEP)


def test_estimate_is_continuous_where_messages_begin_to_be_cut() -> None:
    encoder = ConversationEncoder(byte_level(), RULE)
    whole, cut = (encoder.encode(chat("word " * n)).num_tokens for n in (16_384 // 5, 16_384 // 5 + 1))
    assert 0 <= cut - whole <= 0.01 * whole


# The cache


def test_what_was_encoded_before_changes_nothing() -> None:
    rng = random.Random(0)
    chats = [chat(*(" ".join(rng.choices("abcdefgh", k=rng.randint(0, 12))) for _ in range(rng.randint(1, 6))))
             for _ in range(600)]  # fmt: skip
    assert len({message.content for one in chats for message in one}) > 1100  # more than are remembered
    used = bert_like()
    first = [used.encode(one) for one in chats]
    assert [used.encode(one) for one in reversed(chats)] == first[::-1]
    assert [bert_like().encode(one) for one in chats[:100]] == first[:100]


def test_roles_are_not_remembered_with_the_text() -> None:
    encoder = bert_like()
    encoder.encode(chat("a", "b", "c"))
    swapped = encoder.encode((Message("user", "a"), Message("user", "b"), Message("user", "c")))
    assert swapped.ids == (CLS, A, SEP, C, SEP)
    assert swapped.num_earlier_replies == 0


# Messages


def test_messages_of_openai_json() -> None:
    raw = [
        {"role": "system", "content": "be brief", "name": "x"},
        {"role": "user", "content": [
            {"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "u"}}, "stray",
            {"type": "text", "text": None}, {"type": "text", "text": "here"},
        ]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": ""},
        {"role": "developer"},
        {"content": "no role"},
        {"role": "user", "content": 5},
    ]  # fmt: skip
    assert messages_of(raw) == (
        Message("system", "be brief"),
        Message("user", "look\n\nstray\n\nhere"),
        Message("assistant", ""),
        Message("tool", ""),
        Message("developer", ""),
        Message("user", "no role"),
        Message("user", ""),
    )
    assert messages_of([]) == ()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("hello", "messages are a str"),
        (b"hello", "messages are a bytes"),
        ({"role": "user"}, "messages are a dict"),
        (None, "messages are a NoneType"),
        (["hello"], "a message is a str"),
        ([None], "a message is a NoneType"),
        ([[]], "a message is a list"),
    ],
)
def test_what_is_no_list_of_messages_is_a_type_error(raw: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        messages_of(raw)


# Files and settings


def test_file_round_trip_encodes_alike(tmp_path: Path) -> None:
    bert_like().save(tmp_path / "tokenizer.json")
    again = ConversationEncoder.from_file(tmp_path / "tokenizer.json", RULE)
    spelt = chat("a <pad> b", "c [SEP]", "d " * 30)
    assert again.encode(spelt) == bert_like().encode(spelt)


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (InputRule(2, 0, 0, 0.5), -2),
        (InputRule(4, 0, 0, 0.5), 0),
        (InputRule(16, 6, 6, 0.5), 0),
    ],
)
def test_no_room_for_the_question_is_refused(rule: InputRule, left: int) -> None:
    message = rf"input\.max_tokens {rule.max_tokens} leaves {left} tokens"
    with pytest.raises(ConfigurationError, match=message) as caught:
        bert_like(rule)
    assert "\n" not in str(caught.value)
    bert_like(replace(rule, max_tokens=rule.max_tokens + 1 - left))  # one token is enough


@pytest.mark.parametrize("wrong", [{"opening_tokens": -1}, {"reply_tokens": -1}, {"head_share": 1.1}])
def test_a_rule_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="input rule"):
        replace(RULE, **wrong)


@pytest.mark.parametrize("content", [None, "not a tokenizer"])
def test_bad_tokenizer_file_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json") as caught:
        ConversationEncoder.from_file(path, RULE)
    assert "\n" not in str(caught.value)


def test_padding_is_on_the_right_and_masked() -> None:
    input_ids, attention_mask = pad_batch([(5, 6, 7), (8,)], pad_token_id=1)
    assert input_ids.tolist() == [[5, 6, 7], [8, 1, 1]]
    assert attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_training_data_holds_what_serving_would_feed(trained: Any) -> None:
    from pipeline.checkpoint import Checkpoint
    from pipeline.train import to_examples
    from serving_plugin.predictor.model import LengthPredictor
    from serving_plugin.predictor.rows import read_rows

    rows = read_rows(trained.labelled / "test.jsonl")
    more = chat("essay about rivers", "once upon a time", "list about clocks")
    rows.append(replace(rows[0], messages=more))
    predictor = LengthPredictor.load(str(trained.export))
    served = [predictor.encode(row.messages) for row in rows]
    examples = to_examples(rows, Checkpoint.load(trained.checkpoint).encoder)
    assert [example.encoded for example in examples] == served
    assert served[-1].features[2] == 1.0
