"""Targets: folders that plain transformers loads, made once, the same for the same seed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pipeline.target import SMOLLM2, TINY_OPT, load_tokenizer, make_target
from serving_plugin.core.errors import ConfigurationError


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def greedy(folder: Path, text: str, num_tokens: int) -> tuple[list[int], str]:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer: Any = load_tokenizer(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    new = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return new, tokenizer.decode(new)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(TINY_OPT, tmp_path_factory.mktemp("target") / "tiny-opt", seed=3)


def test_the_same_seed_makes_the_same_files(tiny: Path, tmp_path: Path) -> None:
    assert digests(make_target(TINY_OPT, tmp_path / "again", seed=3)) == digests(tiny)
    other = digests(make_target(TINY_OPT, tmp_path / "other", seed=4))
    assert other["model.safetensors"] != digests(tiny)["model.safetensors"]


def test_transformers_generates_and_the_text_depends_on_the_prompt(tiny: Path) -> None:
    one, text = greedy(tiny, "Explain a computer", 16)
    two, _ = greedy(tiny, "Give me ten ideas", 16)
    assert len(one) == 16
    assert one != two
    assert len(set(one)) > 2
    assert text


def test_the_tokenizer_puts_the_end_token_in_front_and_keeps_any_text(tiny: Path) -> None:
    tokenizer: Any = load_tokenizer(str(tiny))
    text = "Explain: naïve 東京 \U0001d11e\n  two spaces"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_making_it_again_leaves_it_alone(tiny: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    make_target(TINY_OPT, tiny, seed=3)
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


def test_another_target_replaces_it_whole(tmp_path: Path) -> None:
    out = make_target(TINY_OPT, tmp_path / "t", seed=0)
    before = digests(out)
    make_target(TINY_OPT, out, texts=["other words for other merges " * 20], seed=0)
    assert digests(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["t"]  # no scratch left


def test_a_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="choose another folder"):
        make_target(TINY_OPT, tmp_path / "mine")
    assert (tmp_path / "mine/config.json").read_text() == "{}"


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="known: SmolLM2-135M-Instruct, tiny-opt"):
        make_target("gpt-5", tmp_path / "t")


def test_a_missing_tokenizer_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dvc repro target") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_smollm2_from_its_package_answers_a_question(tmp_path: Path) -> None:
    folder = make_target(SMOLLM2, tmp_path / SMOLLM2)
    tokenizer: Any = load_tokenizer(str(folder))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    _, text = greedy(folder, prompt, 12)
    assert "Paris" in text
    assert (folder / "generation_config.json").is_file()
