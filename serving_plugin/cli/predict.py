"""`tetri predict` and `tetri evaluate`: ask a trained predictor, and score it on labelled rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import Message, messages_of
from serving_plugin.predictor.registry import DEFAULT_MODEL_URI

if TYPE_CHECKING:
    from serving_plugin.core.forecast import LengthForecast
    from serving_plugin.predictor.model import LengthPredictor

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
    conversation: Annotated[
        Path | None, typer.Option("--conversation", help="A chat so far as JSON: OpenAI's messages, the question last.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL_URI,
    tracking_uri: TrackingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast how many tokens the target LLM will answer with.

    Examples:  tetri predict "Write a haiku about rain"  |  tetri predict --file prompts.txt --json
               tetri predict --conversation chat.json
    """
    chats = [_read_conversation(conversation)] if conversation is not None and text is None and file is None else None
    if chats is None:
        chats = [(Message("user", prompt),) for prompt in _read_prompts(text, file, conversation)]
    predictor = _load(model, tracking_uri)
    forecasts = predictor.predict(chats)
    described = [_describe(chat[-1].content, f, predictor) for chat, f in zip(chats, forecasts, strict=True)]
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
    baselines: Annotated[
        Path | None,
        typer.Option(
            help="Forecasts of other methods for these rows; default: what `dvc repro baselines` left, if it fits."
        ),
    ] = None,
    report_path: Annotated[
        Path | None, typer.Option("--report", help="Also write a self-contained HTML page.", metavar="PATH.html")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a predictor on labelled rows, beside always naming the modal bucket and other baselines.

    Examples:  tetri evaluate --report page.html  |  tetri evaluate models/predictor/export --data rows.jsonl --json
    """
    from serving_plugin.predictor.evaluation.ceiling import resample_oracle
    from serving_plugin.predictor.evaluation.metrics import score_split
    from serving_plugin.predictor.rows import read_rows

    if report_path is not None:
        from serving_plugin.bench.console import require_writable

        require_writable(report_path)
    rows = read_rows(data)
    predictor = _load(model, tracking_uri)
    spec = predictor.spec
    rivals, notes = _read_baselines(baselines, [row.id for row in rows], spec.edges_tokens)
    probabilities = predictor.conversation_probabilities(rows)
    scores = score_split(
        spec,
        probabilities,
        rows,
        baselines=rivals,
        num_resamples=resamples,
        own_modal=any(row.source != spec.source for row in rows),
    )
    oracle = resample_oracle(rows, num_resamples=resamples, predictor=(spec, probabilities))
    facts = {"model": predictor.resolved.uri, "version": predictor.resolved.version, "data": str(data)}
    if report_path is not None:
        from serving_plugin.predictor.evaluation.report import Evaluated, write_report

        write_report(Evaluated(spec, probabilities, rows, scores, rivals, oracle, facts, notes, resamples), report_path)
    if as_json:
        more = {} if oracle is None else {"oracle": oracle}
        typer.echo(json.dumps({**facts, **scores, **more, "notes": notes}, indent=2))
        return
    _print_scores({**facts, **scores}, spec.granularity_tokens)
    for note in notes:
        typer.echo(note)
    if report_path is not None:
        typer.echo(f"page: {report_path}")


def _read_baselines(path: Path | None, ids: list[str], edges_tokens: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Baselines by name and what to say of them; the default file is left out where it does not fit.

    Raises:
        ConfigurationError: a file that was named does not fit.
    """
    from serving_plugin.predictor.evaluation.baselines import DEFAULT_PREDICTIONS, read_baselines

    if path is not None:
        return read_baselines(path, ids, edges_tokens), []
    reason = f"{DEFAULT_PREDICTIONS} does not exist; run `dvc repro baselines`"
    if DEFAULT_PREDICTIONS.is_file():
        try:
            return read_baselines(DEFAULT_PREDICTIONS, ids, edges_tokens), []
        except ConfigurationError as error:
            reason = str(error)
    return {}, [f"compared with the modal bucket and the marginal distribution only: {reason}"]


def _load(model: str, tracking_uri: str | None) -> LengthPredictor:
    from serving_plugin.predictor.model import LengthPredictor

    return LengthPredictor.load(model, tracking_uri=tracking_uri)


def _read_conversation(path: Path) -> tuple[Message, ...]:
    """Messages from a JSON file: a list of them, or an object with `messages` such as a request's body.

    Raises:
        ConfigurationError: the file cannot be read or holds no messages.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        messages = messages_of(content["messages"] if isinstance(content, dict) else content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # JSON may be nested too deeply
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f'{path} is no conversation ({reason}); give JSON such as [{{"role": "user", "content": "Hello"}}]'
        ) from None
    if not messages or messages[-1].role == "assistant" or not messages[-1].content.strip():
        raise ConfigurationError(f"{path} ends without a question; its last message must be a user's, with content")
    return messages


def _read_prompts(text: str | None, file: Path | None, conversation: Path | None) -> list[str]:
    if conversation is not None or (text is None) == (file is None):
        raise ConfigurationError(
            'give one of: a prompt (tetri predict "..."), a file of prompts (--file prompts.txt), '
            "a chat (--conversation chat.json)"
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
        "prompt": prompt.encode("utf-8", "replace").decode(),  # JSON may hold half a surrogate pair
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


def _print_scores(report: dict[str, Any], granularity_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from serving_plugin.predictor.evaluation import summary

    version = f" version {report['version']}" if report["version"] else ""
    table = Table(title=f"{report['model']}{version} on {report['num_rows']} rows of {report['data']}")
    for column in ("metric", "predictor", "95 %", "baseline"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    lines = [
        (f"accuracy at {width}", f"accuracy_{width}", f"modal_accuracy_{width}") for width in summary.widths_of(report)
    ]
    lines += [
        ("MAE of the median, tokens", "mae_tokens", "prior_median_mae_tokens"),
        ("Kendall tau", "kendall_tau", ""),
        ("AUROC heavy/light", "auroc_heavy", ""),
        ("CRPS, tokens", "crps_tokens", ""),
        ("ECE", "ece", ""),
        (f"covered by the {report['coverage_nominal']:.0%} quantile", "coverage", ""),
        ("over-reserved by it, tokens", "over_reserved_tokens", ""),
        ("over-reserved at exactly that coverage", "over_reserved_at_coverage_tokens", ""),
    ]
    for label, key, baseline in lines:
        low, high = report.get(f"{key}_low"), report.get(f"{key}_high")
        interval = "" if low is None else f"{_number(low)} - {_number(high)}"
        table.add_row(label, _number(report[key]), interval, _number(report[baseline]) if baseline else "")
    console = Console(file=sys.stdout, markup=False)
    console.print(table)
    console.print("baseline: the training split's modal bucket or median")
    console.print(_gains_table(report, granularity_tokens))
    console.print(summary.verdict(report, granularity_tokens))
    if report["num_censored"]:
        console.print(f"cut replies: {summary.cut_replies(report)}")


def _gains_table(report: dict[str, Any], granularity_tokens: int) -> Any:
    from rich.table import Table

    from serving_plugin.predictor.evaluation.summary import Column, title_of

    columns = [
        Column(f"accuracy_{granularity_tokens}", f"accuracy at {granularity_tokens}", True),
        Column("mae_tokens", "MAE"), Column("kendall_tau", "Kendall tau"), Column("crps_tokens", "CRPS"),
    ]  # fmt: skip
    table = Table(title="what the predictor adds, above zero is better")
    for name in ("baseline", *(column.title for column in columns)):
        table.add_column(name, justify="left" if name == "baseline" else "right")
    for name, scores in report["baselines"].items():
        table.add_row(title_of(name), *(column.show_gain(scores["gain"].get(column.metric)) for column in columns))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "undefined"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
