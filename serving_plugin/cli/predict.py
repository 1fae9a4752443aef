"""`tetri predict` and `tetri evaluate`: ask a trained predictor, and score it on labelled rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving_plugin.core.errors import ConfigurationError

if TYPE_CHECKING:
    from serving_plugin.core.forecast import LengthForecast
    from serving_plugin.predictor.model import LengthPredictor

DEFAULT_MODEL_URI = "models:/length-predictor@champion"

ModelOption = Annotated[
    str, typer.Option("--model", help="models:/NAME@ALIAS, models:/NAME/VERSION or a predictor folder.")
]
TrackingOption = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri", help="MLflow registry; default: MLFLOW_TRACKING_URI, else sqlite:///mlruns/mlflow.db."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("predict")(predict)
    app.command("evaluate")(evaluate)


def predict(
    text: Annotated[str | None, typer.Argument(help="A prompt.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Prompts, one a line; empty lines are skipped.")] = None,
    model: ModelOption = DEFAULT_MODEL_URI,
    tracking_uri: TrackingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast how many tokens the target LLM will answer with.

    Examples:  tetri predict "Write a haiku about rain"  |  tetri predict --file prompts.txt --json
    """
    prompts = _read_prompts(text, file)
    predictor = _load(model, tracking_uri)
    forecasts = predictor.predict(prompts)
    described = [_describe(prompt, f, predictor) for prompt, f in zip(prompts, forecasts, strict=True)]
    if as_json:
        for line in described:
            typer.echo(json.dumps(line, ensure_ascii=False))
        return
    _print_forecasts(described, predictor)


def evaluate(
    model: Annotated[
        str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION or a folder.")
    ] = DEFAULT_MODEL_URI,
    data: Annotated[Path, typer.Option("--data", help="Labelled rows, JSON lines.")] = Path("data/labelled/test.jsonl"),
    tracking_uri: TrackingOption = None,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples for the intervals; 0: none.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Score a predictor on labelled rows, beside always naming the modal bucket.

    Examples:  tetri evaluate  |  tetri evaluate models/predictor/export --data data/labelled/validation.jsonl --json
    """
    import numpy as np

    from serving_plugin.predictor.metrics import score_split
    from serving_plugin.predictor.rows import read_rows

    rows = read_rows(data)
    predictor = _load(model, tracking_uri)
    probabilities = predictor.probabilities(predictor.encode([row.prompt for row in rows]))
    report = score_split(predictor.spec, np.asarray(probabilities), rows, num_resamples=resamples)
    report = {"model": predictor.resolved.uri, "version": predictor.resolved.version, "data": str(data), **report}
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    _print_scores(report)


def _load(model: str, tracking_uri: str | None) -> LengthPredictor:
    from serving_plugin.predictor.model import LengthPredictor

    return LengthPredictor.load(model, tracking_uri=tracking_uri)


def _read_prompts(text: str | None, file: Path | None) -> list[str]:
    if (text is None) == (file is None):
        raise ConfigurationError(
            'give one prompt (tetri predict "...") or a file of prompts (--file prompts.txt), not both'
        )
    if text is not None:
        prompts = [text]
    else:
        assert file is not None
        try:
            prompts = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error.reason}"
            raise ConfigurationError(
                f"prompts {file} cannot be read ({reason}); give a text file, one prompt a line"
            ) from None
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ConfigurationError(
            f"no prompt in {file if file is not None else 'the argument'}; give at least one that is not empty"
        )
    return prompts


def _describe(prompt: str, forecast: LengthForecast, predictor: LengthPredictor) -> dict[str, Any]:
    coarse = forecast.regrouped(predictor.spec.granularity_tokens)
    bucket = coarse.argmax_bucket()
    return {
        "prompt": prompt,
        "bucket": [bucket.low_tokens, bucket.high_tokens],
        "probability": round(max(coarse.probabilities), 4),
        "median_tokens": forecast.quantile(0.5),
        "p90_tokens": forecast.quantile(0.9),
        "is_heavy": forecast.is_heavy(),
    }


def _print_forecasts(described: list[dict[str, Any]], predictor: LengthPredictor) -> None:
    from rich.console import Console
    from rich.table import Table

    resolved = predictor.resolved
    version = f" version {resolved.version}" if resolved.version else ""
    table = Table(title=f"{resolved.name}{version}: output tokens of {predictor.spec.target_model}")
    for column in ("prompt", "bucket", "probability", "median", "p90", "decode"):
        table.add_column(column, justify="left" if column == "prompt" else "right", no_wrap=column != "prompt")
    for line in described:
        low, high = line["bucket"]
        heavy = "heavy" if line["is_heavy"] else "light"
        figures = (f"{line['probability']:.2f}", str(line["median_tokens"]), str(line["p90_tokens"]))
        table.add_row(_shortened(line["prompt"]), f"[{low}, {high})", *figures, heavy)
    Console(file=sys.stdout, markup=False).print(table)


def _shortened(prompt: str, limit: int = 60) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _print_scores(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    version = f" version {report['version']}" if report["version"] else ""
    table = Table(title=f"{report['model']}{version} on {report['num_rows']} rows of {report['data']}")
    for column in ("metric", "predictor", "95 %", "baseline"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    widths = [
        int(name.rsplit("_", 1)[1]) for name in report if name.startswith("modal_accuracy_") and name[-1].isdigit()
    ]
    lines = [(f"accuracy at {width}", f"accuracy_{width}", f"modal_accuracy_{width}") for width in widths]
    lines.append(("MAE of the median, tokens", "mae_tokens", "prior_median_mae_tokens"))
    lines += [("Kendall tau", "kendall_tau", ""), ("AUROC heavy/light", "auroc_heavy", "")]
    for label, key, baseline in lines:
        low, high = report.get(f"{key}_low"), report.get(f"{key}_high")
        interval = "" if low is None else f"{_number(low)} - {_number(high)}"
        table.add_row(label, _number(report[key]), interval, _number(report[baseline]) if baseline else "")
    console = Console(file=sys.stdout, markup=False)
    console.print(table)
    console.print("baseline: the training split's modal bucket or median")
    if report["num_censored"]:
        console.print(f"{report['num_censored']} censored rows count at the length where they were cut")


def _number(value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
