"""Settings: strict keys, one-line errors with the cure, profiles that are complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.generate import engine_environment, vllm_arguments
from pipeline.params import PROFILES, load_params, load_profile, parse_params, use_profile, with_tiny_models
from serving_plugin.core.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def changed(key: str, value: Any, profile: str = "cpu") -> dict[str, Any]:
    plain = load_profile(profile).to_plain()
    section = plain
    *path, name = key.split(".")
    for part in path:
        section = section[part]
    section[name] = value
    return plain


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_complete_and_survives_a_round_trip(name: str) -> None:
    params = load_profile(name)
    assert params.profile == name
    assert parse_params(yaml.safe_load(yaml.safe_dump(params.to_plain())), "x") == params


def test_the_committed_params_are_the_cpu_profile() -> None:
    shown = subprocess.run(["git", "show", "HEAD:params.yaml"], cwd=ROOT, capture_output=True, text=True)
    text = shown.stdout if shown.returncode == 0 else (ROOT / "params.yaml").read_text()
    assert parse_params(yaml.safe_load(text), "params.yaml") == load_profile("cpu")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.epoch", 3, "unknown key train.epoch: did you mean train.epochs"),
        ("sed", 3, "unknown key sed: did you mean seed"),
        ("seed", "zero", "seed is 'zero', expected a whole number"),
        ("seed", True, "seed is True, expected a whole number"),
        ("seed", -1, "seed is -1: must be at least 0"),
        ("train.learning_rate", "1e-5", "write 1.0e-5"),
        ("train", None, "train is None, expected keys with values"),
        ("generate.temperature", 9.0, "generate.temperature is 9.0: must be from 0 to 2"),
        ("generate.splits", ["tset"], "generate.splits names tset: known are train"),
        ("generate.splits", "test", "expected a list such as"),
        ("generate.max_tokens", 4096, "leaves no room for a prompt"),
        ("label.source", "guessed", "choose one of recorded, generated"),
        ("label.source", "generated", "generate.splits lacks some of"),
        ("label.granularity_tokens", 150, "choose one of 50, 100, 200, 400"),
        ("prepare.shares.train", 0.9, "prepare.shares sum to 1.2, must sum to 1"),
        ("prepare.near_duplicate_similarity", 0.1, "must be from 0.3 to 1"),
        ("input.reply_tokens", 60, "leave less than 8 of input.max_tokens 64 for the last message"),
        ("calibrate.prompt_edges_tokens", [128, 16], "must rise"),
        ("train.fine_granularity_tokens", 400, "multiples of train.fine_granularity_tokens 400"),
        ("evaluate.granularities_tokens", [], "expected a list such as [100, 200]"),
        ("evaluate.granularities_tokens", [75], "must be multiples of train.fine_granularity_tokens"),
        ("profile", "gpu", "choose one of ci, cpu, cpu_full, paper"),
        ("register.allow_worse", "no", "expected true or false"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_key_and_the_cure(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_params(changed(key, value), "params.yaml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named() -> None:
    plain = load_profile("cpu").to_plain()
    del plain["generate"]["top_p"]
    with pytest.raises(ConfigurationError, match=r"key generate.top_p is missing"):
        parse_params(plain, "params.yaml")


def test_use_writes_the_file_whole_and_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    assert use_profile("ci", path=path) == load_params(path) == load_profile("ci")
    assert path.read_text() == (ROOT / "pipeline/profiles/ci.yaml").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["params.yaml"]


def test_changes_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    params = use_profile("ci", path=path, **{"train.epochs": 2.0, "seed": 5})
    assert (params.train.epochs, params.seed) == (2.0, 5)
    before = path.read_text()
    with pytest.raises(ConfigurationError, match="seed is -5"):
        use_profile("ci", path=path, seed=-5)
    assert path.read_text() == before


def test_the_profile_key_alone_selects_nothing_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(changed("profile", "ci")))
    with pytest.raises(ConfigurationError, match=r"python -m pipeline.params use ci"):
        load_params(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is missing: run `python -m pipeline.params use cpu`"), ("a: [", "is not YAML"), ("- 1", "expected keys")],
)
def test_a_stage_without_right_params_exits_with_2_and_no_traceback(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "params.yaml").write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.prepare"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_paper_is_the_papers_setting() -> None:
    params = load_profile("paper")
    assert params.target.location == "facebook/opt-13b"
    assert params.train.backbone == "facebook/opt-125m"
    assert (params.generate.turns, params.generate.num_prompts) == ("first", 75_000)
    loss = params.train
    assert (loss.use_features, loss.label_smoothing_tokens, loss.expected_value_weight) == (False, 0.0, 0.0)
    assert params.label.source == "generated"
    arguments = vllm_arguments(
        {"target": "facebook/opt-13b", "dtype": "float16", "seed": 0}, params.generate, on_gpu=True
    )
    assert arguments["tensor_parallel_size"] == 2
    assert "enforce_eager" not in arguments
    assert "HF_HUB_OFFLINE" not in engine_environment("facebook/opt-13b", params.generate, on_gpu=True)


def test_the_dry_run_changes_models_and_sizes_and_nothing_else() -> None:
    paper, tiny = load_profile("paper").to_plain(), with_tiny_models(load_profile("paper")).to_plain()
    flat = {
        f"{section}.{key}"
        for section, keys in paper.items()
        if isinstance(keys, dict)
        for key in keys
        if keys[key] != tiny[section][key]
    }
    assert flat == {
        "target.name",
        "target.path",
        "target.dtype",
        "prepare.max_conversations",
        "generate.num_prompts",
        "generate.num_resampled",
        "generate.max_tokens",
        "generate.max_num_seqs",
        "generate.shard_size",
        "generate.tensor_parallel_size",
        "generate.kv_cache_gib",
        "label.max_length_tokens",
        "train.backbone",
        "train.epochs",
        "register.allow_worse",
    }
