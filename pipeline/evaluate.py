"""Stage evaluate: score the checkpoint on the test split, beside the modal bucket and with bootstrap intervals.

Writes `metrics/evaluate.json` (flat) and the plots `confusion.csv`, `accuracy.csv` and `predicted_lengths.png`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.backbone import load_classifier
from pipeline.files import progress, run_stage, write_json, write_text
from pipeline.label import TARGET_REPLIES_FILE
from pipeline.params import Params, load_params
from pipeline.tracking import load_run_id, tracked_run
from pipeline.train import CHECKPOINT, LABELLED
from serving_plugin.predictor.encoding import PromptEncoder, pad_batch
from serving_plugin.predictor.metrics import bucket_of, regroup, score_split
from serving_plugin.predictor.registry import default_tracking_uri
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import TOKENIZER_FILE, PredictorSpec

if TYPE_CHECKING:
    from serving_plugin.predictor.encoding import EncodedPrompt

METRICS = Path("metrics/evaluate.json")
PLOTS = Path("plots")
BATCH_SIZE = 32


def evaluate(
    params: Params, labelled: Path, checkpoint: Path, metrics: Path, plots: Path, tracking_uri: str
) -> dict[str, Any]:
    """Score the checkpoint; returns what `metrics` holds."""
    spec = PredictorSpec.load(checkpoint)
    rows = read_rows(labelled / "test.jsonl")
    encoder = PromptEncoder.from_file(checkpoint / TOKENIZER_FILE, spec.max_input_tokens, spec.head_tokens)
    progress(f"evaluate: {len(rows)} rows of the test split")
    model = load_classifier(str(checkpoint))
    probabilities = torch_probabilities(model, encoder.encode_batch([row.prompt for row in rows]), spec)
    settings = params.evaluate
    widths = sorted({*settings.granularities_tokens, spec.granularity_tokens})
    report = score_split(
        spec,
        probabilities,
        rows,
        granularities_tokens=widths,
        heavy_over_tokens=settings.heavy_over_tokens,
        num_resamples=settings.num_bootstrap,
        seed=params.seed,
    )
    report["source"] = spec.source
    report |= score_target_replies(params, spec, model, encoder, labelled / TARGET_REPLIES_FILE)
    write_json(metrics, report)
    write_text(plots / "accuracy.csv", accuracy_table(report, widths))
    write_text(plots / "confusion.csv", confusion_table(spec, probabilities, rows))
    _plot_lengths(plots / "predicted_lengths.png", spec, probabilities, rows)
    _log(report, load_run_id(checkpoint), tracking_uri)
    width = spec.granularity_tokens
    progress(
        f"evaluate: accuracy_{width} {report[f'accuracy_{width}']:.3f}, modal {report[f'modal_accuracy_{width}']:.3f}"
    )
    return report


def score_target_replies(
    params: Params, spec: PredictorSpec, model: Any, encoder: PromptEncoder, path: Path
) -> dict[str, Any]:
    """How a predictor of recorded replies serves the target: `target_...` metrics on the target's own replies.

    Many of them are cut at generate.max_tokens, so what counts is AUROC and rank correlation; {} without such rows.
    """
    rows = read_rows(path) if path.exists() and path.stat().st_size else []
    if not rows:
        return {}
    report = score_split(
        spec,
        torch_probabilities(model, encoder.encode_batch([row.prompt for row in rows]), spec),
        rows,
        granularities_tokens=[spec.granularity_tokens],
        heavy_over_tokens=params.evaluate.heavy_over_tokens,
        num_resamples=params.evaluate.num_bootstrap,
        seed=params.seed,
    )
    kept = ("num_rows", "num_censored", "kendall_tau", "auroc_heavy")
    return {f"target_{name}": value for name, value in report.items() if name.startswith(kept)}


def torch_probabilities(model: Any, prompts: Sequence[EncodedPrompt], spec: PredictorSpec) -> np.ndarray:
    """(prompts, fine buckets) from the PyTorch model, on the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    result = np.empty((len(prompts), spec.num_buckets), dtype=np.float32)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    with torch.inference_mode():
        for start in range(0, len(prompts), BATCH_SIZE):
            chosen = by_length[start : start + BATCH_SIZE]
            input_ids, attention_mask = pad_batch([prompts[i].ids for i in chosen], spec.pad_token_id)
            logits = model(
                input_ids=torch.from_numpy(input_ids).to(device),
                attention_mask=torch.from_numpy(attention_mask).to(device),
            ).logits
            result[chosen] = torch.softmax(logits.float(), dim=-1).cpu().numpy()
    model.to("cpu")
    return result


def accuracy_table(report: dict[str, Any], granularities_tokens: Sequence[int]) -> str:
    """CSV: granularity, model, accuracy."""
    lines = [
        (width, model, report[f"{key}_{width}"])
        for width in granularities_tokens
        for model, key in (("predictor", "accuracy"), ("modal bucket", "modal_accuracy"))
    ]
    return _csv(("granularity_tokens", "model", "accuracy"), lines)


def confusion_table(spec: PredictorSpec, probabilities: np.ndarray, rows: Sequence[LabelledRow]) -> str:
    """CSV: one line per test row, actual and predicted bucket at the published granularity."""
    width = spec.granularity_tokens
    coarse = regroup(spec.edges_tokens, probabilities, width)
    actual = bucket_of(np.asarray([row.output_tokens for row in rows]), width, coarse.shape[1])
    names = [f"{i * width:05d}-{(i + 1) * width:05d}" for i in range(coarse.shape[1])]  # zeros: DVC sorts as text
    lines = [(names[a], names[p]) for a, p in zip(actual, coarse.argmax(axis=1), strict=True)]
    return _csv(("actual", "predicted"), lines)


def _csv(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def _plot_lengths(path: Path, spec: PredictorSpec, probabilities: np.ndarray, rows: Sequence[LabelledRow]) -> None:
    """Actual against expected length, one dot per test row."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    edges = np.asarray(spec.edges_tokens)
    expected = probabilities @ ((edges[:-1] + edges[1:] - 1) / 2)
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter([row.output_tokens for row in rows], expected, s=4, alpha=0.4)
    axes.plot([0, edges[-1]], [0, edges[-1]], color="black", linewidth=0.8)
    axes.set(
        xlabel="actual output length, tokens",
        ylabel="expected output length, tokens",
        xlim=(0, edges[-1]),
        ylim=(0, edges[-1]),
    )
    figure.savefig(path, dpi=120)


def _log(report: dict[str, Any], run_id: str, tracking_uri: str) -> None:
    with tracked_run(tracking_uri, run_id):
        import mlflow

        mlflow.log_metrics(
            {f"test.{name}": float(value) for name, value in report.items() if isinstance(value, int | float)}
        )


def main() -> None:
    """Entry point."""
    evaluate(load_params(), LABELLED, CHECKPOINT, METRICS, PLOTS, default_tracking_uri())


if __name__ == "__main__":
    run_stage(main)
