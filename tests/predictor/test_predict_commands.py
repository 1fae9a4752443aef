"""`tetri predict` and `tetri evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from serving_plugin.cli import predict
from serving_plugin.core.errors import ConfigurationError


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    predict.register(app)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_one_prompt_from_the_registry(trained: Any) -> None:
    result = invoke("predict", "essay about rivers", "--tracking-uri", trained.tracking_uri)
    assert result.exit_code == 0, result.output
    assert "length-predictor version 1" in result.output
    assert "essay about rivers" in result.output
    assert "heavy" in result.output


def test_file_of_prompts_as_json_lines(trained: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("essay about rivers\n\nsum about clocks\n")
    result = invoke("predict", "--file", str(path), "--model", str(trained.export), "--json")
    essay, brief = (json.loads(line) for line in result.output.splitlines())
    assert essay["prompt"] == "essay about rivers"
    assert essay["bucket"] == [400, 600]
    assert brief["bucket"] == [0, 200]
    assert brief["median_tokens"] <= brief["p90_tokens"] < essay["median_tokens"]


def test_a_conversation_is_one_forecast_of_its_next_reply(trained: Any, tmp_path: Path) -> None:
    from serving_plugin.predictor.conversation import messages_of
    from serving_plugin.predictor.model import LengthPredictor

    messages = [
        {"role": "user", "content": "sum about clocks"}, {"role": "assistant", "content": "four " * 50},
        {"role": "user", "content": "essay about rivers"},
    ]  # fmt: skip
    path = tmp_path / "chat.json"
    (expected,) = LengthPredictor.load(str(trained.export)).predict([messages_of(messages)])
    for content in (messages, {"model": "m", "messages": messages}):
        path.write_text(json.dumps(content))
        result = invoke("predict", "--conversation", str(path), "--model", str(trained.export), "--json")
        assert result.exit_code == 0, result.output
        (line,) = (json.loads(one) for one in result.output.splitlines())
        assert line["prompt"] == "essay about rivers"
        assert (line["median_tokens"], line["p90_tokens"]) == (expected.quantile(0.5), expected.quantile(0.9))


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_half_a_surrogate_pair_is_printed_as_a_question_mark(
    trained: Any, tmp_path: Path, as_json: tuple[str, ...]
) -> None:
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user", "content": "half \\ud83d"}]')
    result = invoke("predict", "--conversation", str(path), "--model", str(trained.export), *as_json)
    assert result.exit_code == 0, result.output
    assert "half ?" in result.output


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "5", '{"text": "hello"}', '["hello"]', "[" * 100_000,
        '[{"role": "user"}]', '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]',
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    result = invoke("predict", "--conversation", str(path))
    assert isinstance(result.exception, ConfigurationError)
    assert "chat.json" in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of"),
        (("text", "--file", "x.txt"), "give one of"),
        (("text", "--conversation", "x.json"), "give one of"),
        (("--file", "x.txt", "--conversation", "x.json"), "give one of"),
        (("--conversation", "/no/such/chat.json"), "is no conversation"),
        (("--file", "/no/such/prompts.txt"), "cannot be read"),
        (("  ",), "no prompt"),
        (("text", "--model", "/no/such/model"), "does not exist"),
    ],
)
def test_wrong_use_names_the_cure(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("predict", *arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert message in str(result.exception)


def test_evaluate_prints_the_baseline_beside_the_predictor(trained: Any) -> None:
    data = str(trained.labelled / "test.jsonl")
    shown = invoke("evaluate", str(trained.export), "--data", data, "--resamples", "20")
    assert shown.exit_code == 0, shown.output
    assert "accuracy at 200" in shown.output
    assert "baseline" in shown.output
    report = json.loads(invoke("evaluate", str(trained.export), "--data", data, "--resamples", "0", "--json").output)
    assert report["accuracy_200"] == pytest.approx(trained.evaluation["accuracy_200"], abs=2e-3)
    assert report["modal_accuracy_200"] == trained.evaluation["modal_accuracy_200"]


def test_evaluate_without_data_names_the_stage(trained: Any, tmp_path: Path) -> None:
    result = invoke("evaluate", str(trained.export), "--data", str(tmp_path / "none.jsonl"))
    assert isinstance(result.exception, ConfigurationError)
    assert "dvc repro label" in str(result.exception)
