"""The page of `tetri evaluate --report`, its tables of numbers, and the reading of a report in words."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from serving_plugin.cli import predict
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import identity
from serving_plugin.predictor.conversation import FEATURE_NAMES, Message
from serving_plugin.predictor.encoding import InputRule
from serving_plugin.predictor.evaluation import plots, summary, tables
from serving_plugin.predictor.evaluation.ceiling import resample_oracle
from serving_plugin.predictor.evaluation.metrics import score_split
from serving_plugin.predictor.evaluation.report import Evaluated, render_html, write_report
from serving_plugin.predictor.evaluation.scores import Forecasts, Truth
from serving_plugin.predictor.rows import LabelledRow
from serving_plugin.predictor.spec import PredictorSpec

EDGES = (0, 100, 200, 300, 400)
SPEC = PredictorSpec(
    edges_tokens=EDGES,
    granularity_tokens=200,
    target_model="the <target>",
    backbone="b",
    input=InputRule(16, 2, 2, 0.5),
    feature_names=FEATURE_NAMES,
    pad_token_id=0,
    source="generated",
    train_counts=(3, 1, 2, 4),
    calibration=identity(),
)
NASTY = "<script>alert('x')</script>"


def make_row(number: int, length: int, *, replies: int = 0, prompt: str = NASTY, censored: bool = False) -> LabelledRow:
    before = (Message("user", "q"), Message("assistant", "a")) * replies
    return LabelledRow(
        f"{number}:{2 * replies + 1}",
        f"root{number}",
        "generated",
        (*before, Message("user", prompt)),
        length,
        censored,
    )


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    rng = random.Random(0)
    rows = [
        make_row(
            i // 2, rng.randrange(400), replies=rng.choice((0, 0, 1, 4, 12)), prompt=NASTY * rng.choice((1, 3, 40))
        )
        for i in range(120)
    ]
    truth = np.asarray([row.output_tokens // 100 for row in rows])
    good, blind = np.eye(4)[truth] + 0.2, np.random.default_rng(0).dirichlet(np.ones(4), size=len(rows))
    report = score_split(SPEC, good, rows, baselines={NASTY: blind}, num_resamples=40)
    facts = {"model": f"models:/{NASTY}@champion", "version": "3", "data": NASTY}
    oracle = resample_oracle(rows, num_resamples=40)
    return Evaluated(SPEC, good, rows, report, {NASTY: blind}, oracle, facts, [f"note {NASTY}"], 40)


class Tags(HTMLParser):
    """Checks that tags are closed in order and collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "!doctype"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_holds_all_parts(evaluated: Evaluated) -> None:
    page = render_html(evaluated)
    for heading in (
        "How good, against what", "Do the probabilities mean what they say?", "Error by prompt length",
        "Error by role in the conversation", "Confusion at 200 tokens", "What was evaluated",
    ):  # fmt: skip
        assert f"<h2>{heading}</h2>" in page
    for text in ("first turn", "later turns", "after 1 reply<", "after 10 and more replies", "modal bucket",
                 "version 3", "marginal distribution", "120 replies of 60 conversations"):  # fmt: skip
        assert text in page
    assert summary.ORACLE in page


def test_page_is_well_formed_asks_nobody_and_runs_nothing(evaluated: Evaluated) -> None:
    page = render_html(evaluated)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not [tag for tag, _ in tags.seen if tag in ("script", "link", "img", "iframe", "object")]
    assert not [attrs for _, attrs in tags.seen if "src" in attrs or str(attrs.get("href", "#"))[:1] != "#"]
    assert not re.search(r"url\((?!#)|@import", page)
    assert NASTY not in page
    ids = [attrs["id"] for _, attrs in tags.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert "lang=" in page
    assert 'role="img" aria-label="Reliability diagram' in page
    assert "prefers-color-scheme:dark" in page


def test_page_is_the_same_each_time(evaluated: Evaluated) -> None:
    assert render_html(evaluated) == render_html(evaluated)


def test_page_that_cannot_be_written_is_one_line(evaluated: Evaluated, tmp_path: Path) -> None:
    write_report(evaluated, tmp_path / "new" / "page.html")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="give another --report"):
        write_report(evaluated, tmp_path / "file" / "page.html")
    for folder in (Path(), Path("/"), tmp_path):
        with pytest.raises(ConfigurationError, match="is a folder; give another --report"):
            write_report(evaluated, folder)


def test_reliability_and_coverage_by_hand() -> None:
    rows = [make_row(i, length) for i, length in enumerate((50, 150, 250, 350))]
    truth = Truth.of(rows)
    forecasts = Forecasts.from_weights(EDGES, np.asarray([[0.4, 0.45, 0.1, 0.05]] * 4))
    (one,) = tables.reliability(forecasts, truth, 200)
    assert (one.low, one.high, one.num_rows, one.accuracy) == (0.8, 0.9, 4, 0.5)
    assert one.confidence == pytest.approx(0.85)
    (point,) = tables.coverage_curve(forecasts, truth, [0.85])  # the quantile is 199
    assert (point.level, point.coverage, point.over_reserved_tokens) == (0.85, 0.5, (149 + 49) / 4)
    assert tables.confusion(forecasts, truth, 200).tolist() == [[2, 0], [2, 0]]


def test_coverage_is_judged_below_the_cap_only() -> None:
    """Lengths 150 (cut), 20 and 95; upper quantiles the cap, 89 and 89: two are judged, one is covered."""
    rows = [make_row(0, 150, censored=True), make_row(1, 20), make_row(2, 95)]
    truth = Truth.of(rows)
    forecasts = truth.forecasts(EDGES, np.asarray([[0, 0, 1.0, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]]))
    (point,) = tables.coverage_curve(forecasts, truth, [0.9])
    assert (point.coverage, point.over_reserved_tokens) == (0.5, 69 / 3)
    groups = [("all", np.ones(3, dtype=bool)), ("cut", np.asarray([True, False, False]))]
    everyone, cut = tables.group_errors(groups, forecasts, truth, 0, 100, coverage=0.9, num_resamples=0)
    assert (everyone.coverage, cut.coverage) == (0.5, None)
    only_cut = truth.forecasts(EDGES, np.asarray([[0, 0, 1.0, 0]] * 3))
    assert tables.coverage_curve(only_cut, truth, [0.9]) == []


def test_groups_by_role_and_prompt_length() -> None:
    rows = [make_row(i, 50, replies=n, prompt="x" * (10 + 100 * n)) for i, n in enumerate((0, 0, 1, 2, 3, 5, 30))]
    assert [(label, int(mask.sum())) for label, mask in tables.by_role(rows)] == [
        ("first turn", 2), ("later turns", 5), ("after 1 reply", 1), ("after 2 replies", 1),
        ("after 3 to 4 replies", 1), ("after 5 to 9 replies", 1), ("after 10 and more replies", 1),
    ]  # fmt: skip
    groups = {label: int(mask.sum()) for label, mask in tables.by_prompt_length(rows)}
    assert groups == {"0 to 49": 2, "50 to 149": 1, "150 to 499": 2, "500 to 1999": 1, "2000 and more": 1}


def test_group_errors_by_hand() -> None:
    rows = [make_row(0, 50), make_row(1, 150), make_row(2, 350)]
    forecasts = Forecasts.from_weights(EDGES, np.asarray([[1.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0]]))
    groups = [("all", np.ones(3, dtype=bool)), ("last", np.asarray([False, False, True])), ("none", np.zeros(3, bool))]
    first, last = tables.group_errors(groups, forecasts, Truth.of(rows), 0, 100, coverage=0.9, num_resamples=10)
    assert first.num_rows == 3
    assert first.accuracy.value == pytest.approx(2 / 3)
    assert first.modal_accuracy == pytest.approx(1 / 3)
    assert first.mae_tokens.value == pytest.approx((1 + 101 + 1) / 3)  # medians 49, 49, 349
    assert (last.label, last.num_rows, last.bias_tokens) == ("last", 1, -0.5)
    assert last.coverage == 1.0


def test_verdict_names_who_is_not_beaten(evaluated: Evaluated) -> None:
    assert summary.verdict(evaluated.report, 200).startswith("every baseline is beaten at 200 tokens")
    gain = {"value": 0.01, "low": -0.01, "high": 0.03}
    report = {"baselines": {"tfidf_linear": {"gain": {"accuracy_200": gain}}}}
    assert summary.verdict(report, 200) == "not beaten for certain at 200 tokens: TF-IDF + linear"
    report["baselines"]["tfidf_linear"]["gain"]["accuracy_200"]["low"] = None  # type: ignore[assignment]
    assert "not decided" in summary.verdict(report, 200)


def test_tables_in_words() -> None:
    share, tokens = summary.Column("accuracy_200", "accuracy", True), summary.Column("mae_tokens", "MAE")
    assert share.show_gain({"value": 0.1234, "low": 0.1, "high": 0.15}) == "+12.3 [10.0, 15.0]"
    assert tokens.show_gain({"value": -3.21, "low": None, "high": None}) == "-3.2"
    assert (share.show(None), tokens.show(120.04), share.show(0.5)) == ("–", "120.0", "50.0 %")
    assert summary.Table(("", "a"), (("row", "1"), ("longer", "23"))).lines() == [
        "         a",
        "row      1",
        "longer  23",
    ]


def test_png_is_a_picture() -> None:
    points = [tables.CoveragePoint(0.5, 0.4, 10.0), tables.CoveragePoint(0.9, 0.9, 50.0)]
    assert plots.png(plots.draw_coverage(points), plots.draw_cost_of_coverage({"a": points, "b": points})).startswith(
        b"\x89PNG"
    )


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    predict.register(app)
    return CliRunner().invoke(app, ["evaluate", *arguments], env={"COLUMNS": "160"})


def test_command_writes_the_page_beside_the_baselines(trained: Any, tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", str(trained.labelled / "test.jsonl")
    arguments = (str(trained.export), "--data", data, "--resamples", "10", "--report", str(page))
    shown = invoke(*arguments, "--baselines", str(trained.baselines))
    assert shown.exit_code == 0, shown.output
    assert "TF-IDF + linear" in shown.output
    assert "gradient boosting, conversation" in page.read_text()


def test_command_says_that_baselines_are_missing(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, data = tmp_path / "page.html", str(trained.labelled / "test.jsonl")
    arguments = (str(trained.export), "--data", data, "--resamples", "0", "--report", str(page))
    monkeypatch.chdir(tmp_path)
    report = json.loads(invoke(*arguments, "--json").output)
    assert set(report["baselines"]) == {"modal", "marginal"}
    assert "run `dvc repro baselines`" in report["notes"][0]
    assert "compared with the modal bucket and the marginal distribution only" in page.read_text()
    other = tmp_path / "rows.jsonl"
    other.write_text('{"id": "new", "prompt": "text", "output_tokens": 5}\n')
    refused = invoke(str(trained.export), "--data", str(other), "--baselines", str(trained.baselines))
    assert isinstance(refused.exception, ConfigurationError)
    assert "lacks 1 of 1 rows (new" in str(refused.exception)
