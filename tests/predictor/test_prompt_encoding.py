"""From text to ids: head and tail, special tokens, padding; the same in training and serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.encoding import PromptEncoder, keep_head_and_tail, pad_batch

WORDS = ("<pad>", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e")
PAD, CLS, SEP, UNK, A, B, C, D, E = range(len(WORDS))


def bert_like() -> Tokenizer:
    """Words to ids, framed like BERT's, with a truncation and a padding of its own as MiniLM's file has."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(WORDS[:3]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12, pad_id=PAD, pad_token="<pad>")
    return tokenizer


@given(ids=st.lists(st.integers(0, 99), max_size=40), head=st.integers(0, 15), tail=st.integers(0, 15))
def test_head_and_tail_keep_both_ends_and_the_order(ids: list[int], head: int, tail: int) -> None:
    kept = keep_head_and_tail(ids, head, tail)
    assert len(kept) == min(len(ids), head + tail)
    if len(ids) <= head + tail:
        assert kept == ids
    else:
        assert kept[:head] == ids[:head]
        assert kept[head:] == ids[len(ids) - tail :]


def test_long_prompt_is_framed_and_counted_whole() -> None:
    encoded = PromptEncoder(bert_like(), max_input_tokens=6, head_tokens=1).encode("a b c d e a b c")
    assert encoded.ids == (CLS, A, A, B, C, SEP)
    assert encoded.num_tokens == 8


def test_empty_prompt_is_its_frame() -> None:
    encoded = PromptEncoder(bert_like(), max_input_tokens=6, head_tokens=1).encode("")
    assert encoded.ids == (CLS, SEP)
    assert encoded.num_tokens == 0


def test_prompt_that_spells_special_tokens_does_not_smuggle_them_in() -> None:
    encoded = PromptEncoder(bert_like(), max_input_tokens=8, head_tokens=4).encode("a [SEP] <pad>")
    assert PAD not in encoded.ids
    assert encoded.ids.count(SEP) == 1


def test_lone_surrogate_is_a_question_mark_not_a_crash() -> None:
    assert PromptEncoder(bert_like(), 8, 4).encode("a \ud83d b").num_tokens == 3


@given(st.lists(st.text(alphabet="abc de", max_size=30), min_size=1, max_size=6))
def test_batch_is_each_alone(texts: list[str]) -> None:
    encoder = PromptEncoder(bert_like(), 6, 2)
    assert encoder.encode_batch(texts) == [encoder.encode(text) for text in texts]


def test_file_round_trip_encodes_alike(tmp_path: Path) -> None:
    encoder = PromptEncoder(bert_like(), 6, 2)
    encoder.save(tmp_path / "tokenizer.json")
    again = PromptEncoder.from_file(tmp_path / "tokenizer.json", 6, 2)
    text = "a b c d e a <pad> b"
    assert again.encode(text) == encoder.encode(text)


@pytest.mark.parametrize(("max_input", "head"), [(2, 0), (5, 4), (8, -1)])
def test_no_room_for_the_text_is_refused(max_input: int, head: int) -> None:
    with pytest.raises(ConfigurationError, match="special tokens"):
        PromptEncoder(bert_like(), max_input, head)


@pytest.mark.parametrize("content", [None, "not a tokenizer"])
def test_bad_tokenizer_file_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json") as caught:
        PromptEncoder.from_file(path, 8, 4)
    assert "\n" not in str(caught.value)


def test_padding_is_on_the_right_and_masked() -> None:
    input_ids, attention_mask = pad_batch([(5, 6, 7), (8,)], pad_token_id=1)
    assert input_ids.tolist() == [[5, 6, 7], [8, 1, 1]]
    assert attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_training_data_holds_what_serving_would_feed(trained: Any) -> None:
    from pipeline.train import to_dataset
    from serving_plugin.predictor.model import LengthPredictor
    from serving_plugin.predictor.rows import read_rows

    rows = read_rows(trained.labelled / "test.jsonl")
    encoder = PromptEncoder.from_file(trained.checkpoint / "tokenizer.json", 24, 12)
    served = LengthPredictor.load(str(trained.export)).encode([row.prompt for row in rows])
    assert [tuple(ids) for ids in to_dataset(rows, encoder)["input_ids"]] == [prompt.ids for prompt in served]
