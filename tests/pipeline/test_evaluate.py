"""The evaluate stage: what it writes, and that it agrees with itself and with the exported model."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.evaluate import Outputs, evaluate, score, score_target_replies, write_plots
from pipeline.tracking import load_run_id
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.evaluation.metrics import score_split
from serving_plugin.predictor.evaluation.scores import Truth
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.rows import read_rows

BASELINES = (
    "modal", "marginal", "prompt_length", "tfidf_linear", "gradient_boosting_prompt", "gradient_boosting",
)  # fmt: skip


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_predictor_that_can_learn_beats_the_modal_bucket(trained: Any) -> None:
    for width in (100, 200, 400):
        assert trained.evaluation[f"accuracy_{width}"] > trained.evaluation[f"modal_accuracy_{width}"]
    assert trained.evaluation["mae_tokens"] < trained.evaluation["prior_median_mae_tokens"]
    assert trained.evaluation["auroc_heavy"] > 0.9


def test_metrics_file_holds_what_was_returned(trained: Any) -> None:
    written = json.loads((trained.metrics / "evaluate.json").read_text())
    assert written == trained.evaluation
    assert [name for name, value in written.items() if isinstance(value, dict | list)] == ["baselines"]


def test_every_baseline_is_scored_on_the_same_rows_with_an_interval(trained: Any) -> None:
    assert tuple(trained.evaluation["baselines"]) == BASELINES
    for name, scores in trained.evaluation["baselines"].items():
        gain = scores["gain"]["accuracy_200"]
        assert gain["low"] <= gain["value"] <= gain["high"], name
        assert gain["value"] == pytest.approx(trained.evaluation["accuracy_200"] - scores["accuracy_200"], abs=2e-4)
    assert (
        trained.evaluation["baselines"]["gradient_boosting"]["accuracy_200"] > trained.evaluation["modal_accuracy_200"]
    )


def test_confusion_table_gives_the_accuracy(trained: Any) -> None:
    lines = read_csv(trained.plots / "confusion.csv")
    assert len(lines) == trained.evaluation["num_rows"]
    hits = sum(line["actual"] == line["predicted"] for line in lines)
    assert hits / len(lines) == pytest.approx(trained.evaluation["accuracy_200"], abs=1e-4)


def test_accuracy_table_has_every_model_at_every_granularity(trained: Any) -> None:
    lines = read_csv(trained.plots / "accuracy.csv")
    assert [line["granularity_tokens"] for line in lines] == [
        width for width in ("100", "200", "400") for _ in range(1 + len(BASELINES))
    ]
    assert {"predictor", "modal bucket", "TF-IDF + linear"} < {line["model"] for line in lines}


@pytest.mark.parametrize("cap_tokens", [None, 300])
def test_reliability_and_coverage_tables_describe_the_test_rows(
    cap_tokens: int | None, trained: Any, tmp_path: Path
) -> None:
    folder, report = trained.plots, trained.evaluation
    if cap_tokens is not None:
        folder, report = tmp_path, write_plots_of_cut_rows(trained, cap_tokens, tmp_path)
        assert report["num_censored"] > 0
        assert 0 < report["coverage_judged"] < 1
    bins = read_csv(folder / "reliability.csv")
    assert sum(int(line["num_rows"]) for line in bins) == report["num_rows"]
    came = sum(int(line["num_rows"]) * float(line["came"]) for line in bins) / report["num_rows"]
    assert came == pytest.approx(report["accuracy_200"], abs=1e-3)
    at_nominal = [
        line for line in read_csv(folder / "coverage.csv")
        if line["model"] == "predictor" and float(line["level"]) == report["coverage_nominal"]
    ]  # fmt: skip
    assert [float(line["covered"]) for line in at_nominal] == [report["coverage"]]


def write_plots_of_cut_rows(trained: Any, cap_tokens: int, folder: Path) -> dict[str, Any]:
    """The plots of the test rows as if replies were cut at `cap_tokens`; returns their report."""
    rows = [
        replace(row, output_tokens=min(row.output_tokens, cap_tokens), censored=row.output_tokens > cap_tokens)
        for row in read_rows(trained.labelled / "test.jsonl")
    ]
    loaded, truth = LengthPredictor.load(str(trained.export)), Truth.of(rows)
    probabilities = loaded.conversation_probabilities(rows)
    report = score(trained.params, loaded.spec, probabilities, rows, {})
    write_plots(folder, report, loaded.spec, truth.forecasts(loaded.spec.edges_tokens, probabilities), truth, {})
    return report


@pytest.mark.parametrize("name", ["predicted_lengths.png", "reliability.png", "coverage.png"])
def test_plot_is_a_picture(name: str, trained: Any) -> None:
    assert (trained.plots / name).read_bytes().startswith(b"\x89PNG")


def test_predictions_file_gives_the_scores_row_by_row(trained: Any) -> None:
    rows = read_rows(trained.labelled / "test.jsonl")
    with np.load(trained.predictions, allow_pickle=False) as held:
        assert held["ids"].tolist() == [row.id for row in rows]
        assert held["roots"].tolist() == [row.root_id for row in rows]
        assert held["lengths_tokens"].tolist() == [row.output_tokens for row in rows]
        assert held["hit_200"].dtype == bool
        assert held["hit_200"].mean() == pytest.approx(trained.evaluation["accuracy_200"], abs=1e-4)
        assert held["crps_tokens"].mean() == pytest.approx(trained.evaluation["crps_tokens"], abs=1e-3)
        assert set(held) == {"ids", "roots", "lengths_tokens", "hit_200", "crps_tokens"}


def test_target_replies_are_scored_beside_their_ceiling(trained: Any, tmp_path: Path) -> None:
    line = {"root_id": "test0", "source": "generated", "messages": [{"role": "user", "content": "essay about rivers"}]}
    others = [{**line, "root_id": f"test{i}"} for i in range(1, 4)]
    lengths = [(480, 500), (300,), (20,), (10,)]
    lines = [
        {**one, "replies": [{"turn": 1, "output_tokens": n, "censored": n == 500} for n in found]}
        for one, found in zip((line, *others), lengths, strict=True)
    ]
    path = tmp_path / "target_replies.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    loaded = LengthPredictor.load(str(trained.export))
    report = score_target_replies(trained.params, loaded, path, trained.baselines)
    assert (report["target_num_rows"], report["target_num_censored"], report["target_cap_tokens"]) == (5, 1, 500)
    assert {"modal", "own_modal", "gradient_boosting"} < set(report["target_baselines"])
    assert report["target_baselines"]["own_modal"]["accuracy_200"] == 0.4
    assert report["target_oracle"]["num_replies"] == 1
    assert report["target_oracle"]["mae_tokens"] == 20.0
    assert score_target_replies(trained.params, loaded, tmp_path / "none.jsonl", None) == {}


def test_baselines_of_other_data_stop_the_stage(trained: Any, tmp_path: Path) -> None:
    params = replace(trained.params, evaluate=replace(trained.params.evaluate, num_bootstrap=0))
    outputs = Outputs(tmp_path / "evaluate.json", tmp_path / "plots", tmp_path / "predictions.npz")
    with pytest.raises(ConfigurationError, match="run `dvc repro baselines`"):
        evaluate(
            params, trained.labelled, trained.export, tmp_path / "none.npz", outputs, load_run_id(trained.checkpoint),
            trained.tracking_uri,
        )  # fmt: skip


def test_exported_model_scores_alike(trained: Any) -> None:
    """Alike and not the same: the exported weights may be 8-bit ones."""
    predictor = LengthPredictor.load(str(trained.export))
    rows = read_rows(trained.labelled / "test.jsonl")
    report = score_split(predictor.spec, predictor.conversation_probabilities(rows), rows, num_resamples=0)
    for name in ("accuracy_100", "accuracy_200", "accuracy_400", "kendall_tau", "auroc_heavy"):
        assert trained.evaluation[name] == pytest.approx(report[name], abs=0.05), name
    for name in ("mae_tokens", "crps_tokens"):
        assert trained.evaluation[name] == pytest.approx(report[name], abs=3.0), name
