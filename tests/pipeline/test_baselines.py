"""The baselines: distributions, that they learn what there is to learn, and the file that they leave."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.baselines import BASELINES, Split, Task, plain_cross_entropy, run
from pipeline.lexical import LEXICAL_NAMES, NUM_LEXICAL, lexical_features, lexical_table
from pipeline.params import Params, load_profile
from pipeline.train import edges_up_to
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.evaluation.baselines import read_baselines, write_baselines
from serving_plugin.predictor.rows import LabelledRow

EDGES = edges_up_to(599, 50)


def make_rows(num_rows: int, seed: int, prefix: str) -> list[LabelledRow]:
    """Essays are long, sums short: a word of the prompt tells."""
    rng = random.Random(seed)
    rows = []
    for i in range(num_rows):
        kind, low, high = rng.choice((("write an essay", 420, 580), ("add the numbers", 5, 60)))
        text = f"{kind} about {rng.choice(('rivers', 'bridges', 'clocks'))}"
        rows.append(LabelledRow(f"{prefix}{i}:1", f"{prefix}{i}", "recorded", (Message("user", text),),
                                rng.randint(low, high), False))  # fmt: skip
    return rows


def make_split(rows: list[LabelledRow]) -> Split:
    table = lexical_table([row.prompt for row in rows])
    return Split(rows, table, np.zeros((len(rows), 2), dtype=np.float32))


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(EDGES, *(make_split(make_rows(n, i, f"s{i}-")) for i, n in enumerate((200, 60, 40))), seed=0)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_gives_distributions_over_the_fine_buckets(name: str, task: Task) -> None:
    found = BASELINES[name](task)
    assert found.shape == (40, len(EDGES) - 1)
    assert np.all(found >= 0)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("name", ["tfidf_linear", "gradient_boosting_prompt", "gradient_boosting"])
def test_what_words_tell_is_learnt(name: str, task: Task) -> None:
    bucket = np.asarray([row.output_tokens // 50 for row in task.test.rows])
    rows = np.arange(len(bucket))
    assert np.log(BASELINES[name](task)[rows, bucket]).mean() > np.log(task.marginal[bucket]).mean() + 0.3


def test_marginal_is_the_same_for_all(task: Task) -> None:
    found = BASELINES["marginal"](task)
    assert np.all(found == found[0])
    np.testing.assert_allclose(found[0] * 200, np.bincount(task.fine, minlength=len(EDGES) - 1))


def test_prompt_length_tells_long_prompts_from_short_ones(task: Task) -> None:
    longer = [replace(row, messages=(Message("user", "x" * 500),), output_tokens=590) for row in task.train.rows]
    both = Task(EDGES, make_split([*task.train.rows, *longer]), task.validation, make_split(longer[:1]), 0)
    assert BASELINES["prompt_length"](both)[0, -1] > 3 * both.marginal[-1] * 0.5


def test_one_class_alone_falls_back_to_the_marginal_distribution(task: Task) -> None:
    same = make_split([replace(row, output_tokens=20) for row in task.train.rows])
    one = Task(EDGES, same, same, task.test, 0)
    for name in ("tfidf_linear", "gradient_boosting"):
        assert BASELINES[name](one)[:, 0].tolist() == [1.0] * 40


def test_lexical_features_by_hand() -> None:
    found = dict(zip(LEXICAL_NAMES, lexical_features("Write a 500 word essay.\n- short\nIs it OK?"), strict=True))
    assert found["log_words"] == pytest.approx(np.log1p(10))
    assert found["asked_words"] == pytest.approx(np.log1p(500))
    assert (found["question_marks"], found["ends_with_question"], found["bullets"]) == (1.0, 1.0, 1.0)
    assert (found["has_write"], found["has_long_form"], found["has_code"]) == (1.0, 1.0, 0.0)
    assert (found["starts_with_write"], found["starts_with_which"]) == (1.0, 0.0)
    for text in ("", "\ud800", "x" * 100_000):
        assert np.isfinite(lexical_features(text)).all()
    assert lexical_table([]).shape == (0, NUM_LEXICAL)


def write_rows(path: Path, rows: list[LabelledRow]) -> None:
    lines = [{"id": row.id, "prompt": row.prompt, "output_tokens": row.output_tokens} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def params() -> Params:
    params = load_profile("ci")
    return replace(
        params,
        label=replace(params.label, max_length_tokens=599),
        baselines=replace(params.baselines, plain_cross_entropy=False),
    )


def test_stage_writes_what_evaluation_reads(params: Params, tmp_path: Path) -> None:
    for name, (num_rows, seed) in {"train": (80, 1), "validation": (30, 2), "test": (20, 3)}.items():
        write_rows(tmp_path / f"{name}.jsonl", make_rows(num_rows, seed, name))
    target = make_rows(5, 4, "target")
    write_rows(tmp_path / "target_replies.jsonl", [*target, *target])
    path = tmp_path / "out" / "predictions.npz"
    report = run(params, tmp_path, path)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["num_train_rows"], report["num_replies"]) == (80, 25)
    ids = ["target3:1", "test5:1"]
    held = read_baselines(path, [row_id.removesuffix(":1") + ":1" for row_id in ids], EDGES)
    assert list(held) == list(BASELINES)
    assert all(values.shape == (2, len(EDGES) - 1) and values.dtype == np.float32 for values in held.values())


def test_plain_cross_entropy_sees_the_prompt_alone(params: Params) -> None:
    """The paper's method: an earlier reply changes nothing, and every row gets a distribution."""
    small = replace(params, train=replace(params.train, epochs=0.5))
    rows, asked = make_rows(16, 1, "train"), make_rows(2, 3, "test")
    before = (Message("user", "hello"), Message("assistant", "a long reply " * 50))
    later = [replace(row, messages=(*before, *row.messages)) for row in asked]
    found = plain_cross_entropy(small, rows, make_rows(8, 2, "validation"), [*asked, *later])
    assert found.shape == (4, len(EDGES) - 1)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    np.testing.assert_allclose(found[:2], found[2:], atol=1e-5)


def test_file_of_other_data_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    write_baselines(path, ["a", "b"], EDGES, {"marginal": np.ones((2, len(EDGES) - 1))})
    first = path.read_bytes()
    write_baselines(path, ["a", "b"], EDGES, {"marginal": np.ones((2, len(EDGES) - 1))})
    assert path.read_bytes() == first
    with pytest.raises(ConfigurationError, match=r"lacks 1 of 2 rows \(c"):
        read_baselines(path, ["a", "c"], EDGES)
    with pytest.raises(ConfigurationError, match="buckets up to 600"):
        read_baselines(path, ["a"], (0, 600))
    with pytest.raises(ConfigurationError, match="dvc repro baselines"):
        read_baselines(tmp_path / "none.npz", ["a"], EDGES)
    path.write_bytes(b"PK")
    with pytest.raises(ConfigurationError, match="dvc repro baselines"):
        read_baselines(path, ["a"], EDGES)
    write_baselines(path, ["a"], EDGES, {"marginal": np.ones((1, 2))})
    with pytest.raises(ConfigurationError, match=r"marginal has shape \(1, 2\)"):
        read_baselines(path, ["a"], EDGES)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ConfigurationError, match="holds no baselines"):
        read_baselines(path, ["a"], EDGES)
