"""An evaluation report in words: tables for the stage, `tetri evaluate` and the page. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_VALUE = "–"
PREDICTOR, ORACLE = "predictor", "another sample of the reply (ceiling)"
PREDICTOR_AT_CEILING = "predictor on the replies of the ceiling"
TITLES = {
    "modal": "modal bucket",
    "own_modal": "modal bucket of these rows",
    "marginal": "marginal distribution",
    "prompt_length": "prompt length alone",
    "tfidf_linear": "TF-IDF + linear",
    "gradient_boosting_prompt": "gradient boosting, prompt",
    "gradient_boosting": "gradient boosting, conversation",
    "plain_cross_entropy": "plain cross-entropy",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A metric of the report as it is shown. `is_share`: in per cent, gains in points."""

    metric: str
    title: str
    is_share: bool = False

    @property
    def _digits(self) -> int:
        return 1 if self.is_share or self.metric.endswith("tokens") else 3

    @property
    def _factor(self) -> float:
        return 100.0 if self.is_share else 1.0

    def show(self, value: float | None) -> str:
        """A value with its unit."""
        if value is None:
            return NO_VALUE
        return f"{self._factor * value:.{self._digits}f}{' %' if self.is_share else ''}"

    def show_interval(self, low: float | None, high: float | None) -> str:
        """`[low, high]` without the unit; empty when not known."""
        if low is None or high is None:
            return ""
        return f"[{self._factor * low:.{self._digits}f}, {self._factor * high:.{self._digits}f}]"

    def show_gain(self, gain: Mapping[str, float | None] | None) -> str:
        """A signed gain with its interval, shares in points."""
        if gain is None or gain["value"] is None:
            return NO_VALUE
        shown = f"{self._factor * gain['value']:+.{self._digits}f}"
        return f"{shown} {self.show_interval(gain['low'], gain['high'])}".rstrip()


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """Aligned plain text."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]


def columns_of(report: Mapping[str, Any]) -> list[Column]:
    """The metrics that are shown, with the granularities that the report has."""
    nominal = f"{100 * report['coverage_nominal']:g} %"
    return [
        *(Column(f"accuracy_{width}", f"accuracy at {width}", True) for width in widths_of(report)),
        Column("mae_tokens", "MAE"),
        Column("kendall_tau", "Kendall tau"),
        Column("auroc_heavy", "AUROC heavy"),
        Column("crps_tokens", "CRPS"),
        Column("ece", "ECE", True),
        Column("coverage", f"covered at {nominal}", True),
        Column("over_reserved_at_coverage_tokens", f"over-reserved at {nominal} covered"),
    ]


def widths_of(report: Mapping[str, Any]) -> list[int]:
    """Granularities in tokens, rising."""
    prefix = "modal_accuracy_"
    ends = (name.removeprefix(prefix) for name in report if name.startswith(prefix))
    return sorted(int(end) for end in ends if end.isdigit())


def title_of(baseline: str) -> str:
    """A baseline's name for readers."""
    return TITLES.get(baseline, baseline.replace("_", " "))


def score_table(report: Mapping[str, Any], oracle: Mapping[str, Any] | None = None) -> Table:
    """The predictor with intervals, every baseline, and the noise ceiling if there is one."""
    columns = columns_of(report)
    rows = [(PREDICTOR, *(_with_interval(column, report) for column in columns))]
    for name, scores in report["baselines"].items():
        rows.append((title_of(name), *(column.show(scores.get(column.metric)) for column in columns)))
    if oracle is not None:
        rows.append((ORACLE, *(_with_interval(column, oracle) for column in columns)))
        if "predictor" in oracle:
            rows.append((PREDICTOR_AT_CEILING, *(_with_interval(column, oracle["predictor"]) for column in columns)))
    return Table(("", *(column.title for column in columns)), tuple(rows))


def gain_table(report: Mapping[str, Any]) -> Table:
    """What the predictor adds to each baseline, with 95 % intervals: above zero is better in every column."""
    columns = columns_of(report)
    rows = [
        (title_of(name), *(column.show_gain(scores["gain"].get(column.metric)) for column in columns))
        for name, scores in report["baselines"].items()
    ]
    return Table(("gain over", *(column.title for column in columns)), tuple(rows))


def not_beaten(report: Mapping[str, Any], metric: str) -> list[str]:
    """Titles of the baselines that the predictor does not beat for certain (95 % interval of the gain above zero)."""
    gains = {name: scores["gain"].get(metric) for name, scores in report["baselines"].items()}
    return [title_of(name) for name, gain in gains.items() if gain is not None and not (gain["low"] or 0.0) > 0]


def verdict(report: Mapping[str, Any], granularity_tokens: int) -> str:
    """One sentence: is every baseline beaten at the published granularity?"""
    metric = f"accuracy_{granularity_tokens}"
    if all(scores["gain"].get(metric, {}).get("low") is None for scores in report["baselines"].values()):
        return "no intervals were asked for: whether a baseline is beaten is not decided"
    left = not_beaten(report, metric)
    if not left:
        return f"every baseline is beaten at {granularity_tokens} tokens: all 95 % intervals of the gain lie above zero"
    return f"not beaten for certain at {granularity_tokens} tokens: {', '.join(left)}"


def cut_replies(report: Mapping[str, Any]) -> str:
    """What is to be known of the replies that were cut."""
    if not report["num_censored"]:
        return "none"
    early, cap = report["num_cut_early"], report["cap_tokens"]
    if cap is None:
        return f"{early}, below the length of whole ones, counted where they were cut; forecasts are not cut"
    shown = f"{report['num_censored']} at {cap} tokens ({report['cap_rate']:.1%}); forecasts are cut there too"
    return f"{shown}; {early} of them earlier, counted where they were cut" if early else shown


def _with_interval(column: Column, scores: Mapping[str, Any]) -> str:
    low, high = (scores.get(f"{column.metric}_{end}") for end in ("low", "high"))
    return f"{column.show(scores.get(column.metric))} {column.show_interval(low, high)}".rstrip()
