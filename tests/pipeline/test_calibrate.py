"""The calibrate stage: what it fits, what it leaves out, and the file it writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.calibrate import MIN_TARGET_ROWS, calibrate, fit
from pipeline.checkpoint import Checkpoint, read_calibrations
from pipeline.network import predict_logits
from pipeline.params import CalibrateParams
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import fit_temperature, identity, pit_values, softmax
from serving_plugin.predictor.encoding import EncodedConversation
from serving_plugin.predictor.evaluation.scores import Forecasts
from serving_plugin.predictor.model import groups_of
from serving_plugin.predictor.rows import read_rows

EDGES = tuple(range(0, 1001, 50))
NUM_BUCKETS = len(EDGES) - 1
BOTH = CalibrateParams(temperature=True, conformal=True, target=True, prompt_edges_tokens=(64,))


def draw(num_rows: int, scale: float) -> tuple[np.ndarray, np.ndarray, list[EncodedConversation]]:
    """Logits too sharp by `scale`, the lengths that came, and first turns of 10 and 100 tokens in turn."""
    rng = np.random.default_rng(0)
    centres = rng.uniform(2, NUM_BUCKETS - 2, (num_rows, 1))
    logits = -0.5 * ((np.arange(NUM_BUCKETS) - centres) / 3.0) ** 2
    buckets = (softmax(logits).cumsum(axis=1) < rng.random((num_rows, 1))).sum(axis=1)
    lengths = np.minimum(buckets, NUM_BUCKETS - 1) * 50 + rng.integers(0, 50, num_rows)
    return scale * logits, lengths, [EncodedConversation((1,), (), (10, 100)[i % 2], 0) for i in range(num_rows)]


def no_one(num_rows: int) -> np.ndarray:
    return np.zeros(num_rows, dtype=bool)


def test_both_parts_are_fitted_one_on_top_of_the_other() -> None:
    logits, lengths, encoded = draw(6000, scale=2.0)
    fitted = fit(BOTH, EDGES, logits, lengths, no_one(6000), encoded)
    assert fitted.temperature == pytest.approx(2.0, rel=0.1)
    assert fitted.prompt_edges_tokens == (64,)
    # temperature has put the scale right, so there is little left for the knots
    np.testing.assert_allclose(fitted.knots, np.tile(np.linspace(0, 1, 101), (4, 1)), atol=0.05)


def test_without_temperature_the_knots_do_all_the_work() -> None:
    logits, lengths, encoded = draw(6000, scale=2.0)
    fitted = fit(CalibrateParams(False, True, True, (64,)), EDGES, logits, lengths, no_one(6000), encoded)
    assert fitted.temperature == 1.0
    assert np.max(np.abs(np.asarray(fitted.knots) - np.linspace(0, 1, 101))) > 0.05
    pits = pit_values(EDGES, fitted.apply(softmax(logits), groups_of(encoded, (64,))), lengths)
    np.testing.assert_allclose(np.quantile(pits, (0.1, 0.5, 0.9)), (0.1, 0.5, 0.9), atol=0.02)


def test_without_conformal_only_the_temperature_is_left() -> None:
    logits, lengths, encoded = draw(2000, scale=2.0)
    fitted = fit(CalibrateParams(True, False, True, (64,)), EDGES, logits, lengths, no_one(2000), encoded)
    assert fitted.temperature == pytest.approx(2.0, rel=0.1)
    assert (fitted.knots, fitted.prompt_edges_tokens) == (identity().knots, ())
    neither = fit(CalibrateParams(False, False, True, ()), EDGES, logits, lengths, no_one(2000), encoded)
    assert neither == identity()


def test_replies_cut_at_random_calibrate_like_whole_ones() -> None:
    logits, lengths, encoded = draw(12_000, scale=1.0)
    logits = logits + np.linspace(-2, 2, NUM_BUCKETS)  # forecasts are too long
    plain = CalibrateParams(False, True, True, ())
    whole = np.asarray(fit(plain, EDGES, logits, lengths, no_one(12_000), encoded).knots[0])
    cuts = np.random.default_rng(1).integers(0, 1400, 12_000)
    censored, seen = cuts < lengths, np.minimum(cuts, lengths)
    assert 0.25 < censored.mean() < 0.6
    known = np.asarray(fit(plain, EDGES, logits, seen, censored, encoded).knots[0])
    naive = np.asarray(fit(plain, EDGES, logits, seen, no_one(12_000), encoded).knots[0])
    assert np.max(np.abs(known - whole)[:91]) < 0.03
    assert np.max(np.abs(naive - whole)[:91]) > 0.08


def test_temperature_takes_a_cut_reply_as_at_least() -> None:
    logits, lengths, encoded = draw(6000, scale=2.0)
    cuts = np.random.default_rng(1).integers(0, 1400, 6000)
    censored, seen = cuts < lengths, np.minimum(cuts, lengths)
    settings = CalibrateParams(True, False, True, ())
    assert fit(settings, EDGES, logits, seen, censored, encoded).temperature == pytest.approx(2.0, rel=0.1)


def test_a_reply_cut_in_the_last_bucket_is_known_to_lie_there() -> None:
    logits, lengths, encoded = draw(1000, scale=1.0)
    at_cap = lengths >= 950
    assert at_cap.sum() > 10
    plain = CalibrateParams(False, True, True, ())
    found = [fit(plain, EDGES, logits, lengths, censored, encoded) for censored in (no_one(1000), at_cap)]
    assert found[0] == found[1]


def test_lengths_beyond_the_last_edge_are_of_the_last_bucket() -> None:
    logits, lengths, encoded = draw(1000, scale=1.0)
    beyond = np.where(lengths >= 950, 9999, lengths)
    temperature = fit(CalibrateParams(True, False, True, ()), EDGES, logits, beyond, no_one(1000), encoded).temperature
    assert temperature == pytest.approx(fit_temperature(logits, np.eye(NUM_BUCKETS, dtype=bool)[lengths // 50]))


# The stage


def test_the_stage_writes_what_it_fitted(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    fitted = calibrate(trained.params.calibrate, trained.labelled, trained.checkpoint, out)
    assert read_calibrations(out) == fitted == read_calibrations(trained.calibration)
    own, target = fitted
    assert own.temperature != 1.0
    assert own.prompt_edges_tokens == trained.params.calibrate.prompt_edges_tokens
    assert target is None  # there are no replies of a target
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def test_a_checkpoint_forecasts_with_the_calibration_it_is_given(trained: Any) -> None:
    rows = read_rows(trained.labelled / "test.jsonl")
    plain = Checkpoint.load(trained.checkpoint)
    calibrated = Checkpoint.load(trained.checkpoint, trained.calibration)
    assert plain.spec.calibration == identity()
    calibration, _ = read_calibrations(trained.calibration)
    assert calibrated.spec == plain.spec.calibrated(calibration)
    encoded = plain.encode(rows)
    logits = predict_logits(plain.network, encoded, plain.spec.pad_token_id)
    np.testing.assert_allclose(plain.probabilities(rows), softmax(logits), atol=1e-6)
    expected = calibration.apply(
        softmax(logits / calibration.temperature), groups_of(encoded, calibration.prompt_edges_tokens)
    )
    np.testing.assert_allclose(calibrated.probabilities(rows), expected, atol=1e-6)
    assert np.abs(calibrated.probabilities(rows) - plain.probabilities(rows)).max() > 0.01


def labelled_with_target_replies(trained: Any, folder: Path, num_rows: int, factor: float) -> Path:
    """The fixture's labelled data, and replies of a target that answers `factor` times as long."""
    shutil.copytree(trained.labelled, folder)
    lines = (folder / "calibration.jsonl").read_text().splitlines() * 10
    for name in ("target_calibration.jsonl", "target_replies.jsonl"):
        rows = [json.loads(line) for line in lines[:num_rows]]
        for number, row in enumerate(rows):
            row["source"], row["root_id"] = "generated", f"target{number}"
            row["replies"][0]["output_tokens"] = round(factor * row["replies"][0]["output_tokens"])
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_serving_uses_is_calibrated_on_the_targets_replies(trained: Any, tmp_path: Path) -> None:
    labelled, out = labelled_with_target_replies(trained, tmp_path / "labelled", 200, 0.95), tmp_path / "out.json"
    own, target = calibrate(trained.params.calibrate, labelled, trained.checkpoint, out)
    assert target is not None
    assert target.temperature == own.temperature
    loaded = Checkpoint.load(trained.checkpoint, out)
    rows = read_rows(labelled / "target_replies.jsonl")
    assert loaded.spec.calibration_of("generated") == loaded.spec.calibration_of() == target
    assert loaded.spec.calibration_of("recorded") == own

    def covered(calibration: Any) -> float:
        spec = loaded.spec.calibrated(calibration)
        shares = Checkpoint(loaded.network, loaded.encoder, spec).probabilities(rows)
        upper = Forecasts.from_weights(spec.edges_tokens, shares).quantiles(0.6)
        return float(np.mean([row.output_tokens <= high for row, high in zip(rows, upper, strict=True)]))

    # the very rows that it was fitted on, five of each: ties round up
    assert abs(covered(target) - 0.6) <= 0.1 < abs(covered(own) - 0.6)


@pytest.mark.parametrize(("num_rows", "is_asked"), [(MIN_TARGET_ROWS - 1, True), (200, False)])
def test_few_replies_of_the_target_or_none_asked_for(
    trained: Any, tmp_path: Path, num_rows: int, is_asked: bool
) -> None:
    labelled = labelled_with_target_replies(trained, tmp_path / "labelled", num_rows, 0.5)
    settings = replace(trained.params.calibrate, target=is_asked)
    assert calibrate(settings, labelled, trained.checkpoint, tmp_path / "out.json")[1] is None


def test_samples_of_one_reply_are_one_row(trained: Any, tmp_path: Path) -> None:
    labelled = labelled_with_target_replies(trained, tmp_path / "labelled", 200, 0.5)
    once = calibrate(trained.params.calibrate, labelled, trained.checkpoint, tmp_path / "once.json")
    for name in ("calibration.jsonl", "target_calibration.jsonl"):
        rows = [json.loads(line) for line in (labelled / name).read_text().splitlines()]
        for row in rows[: len(rows) // 4]:
            row["replies"] *= 5
        (labelled / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert calibrate(trained.params.calibrate, labelled, trained.checkpoint, tmp_path / "often.json") == once


@pytest.mark.parametrize("content", [None, "{", "[]", '{"temperature": 1.0}', json.dumps({"labelled": {"knots": []}})])
def test_an_unusable_file_names_the_stage(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"calibration\.json cannot be used .*dvc repro calibrate") as caught:
        read_calibrations(path)
    assert "\n" not in str(caught.value)


def test_without_rows_nothing_is_written(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"calibration\.jsonl cannot be read"):
        calibrate(BOTH, tmp_path, trained.checkpoint, tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []
