"""Stage export: the calibrated checkpoint as ONNX, proven equal to PyTorch over several shapes, its latency measured.

With `export.int8` the weights are quantised to 8 bits as well, and that model is the one kept if its accuracy and its
coverage on the validation split stay within `export.int8_max_loss` of the float model's. Writes the model folder
`models/predictor/export` (model.onnx, tokenizer.json, predictor.json) and `metrics/export.json`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.calibrate import CALIBRATION
from pipeline.checkpoint import Checkpoint
from pipeline.files import progress, run_stage, write_json
from pipeline.params import ExportParams, load_params
from pipeline.tracking import load_run_id, tracked_run
from pipeline.train import CHECKPOINT, LABELLED
from serving_plugin.core.errors import TetriError
from serving_plugin.predictor.calibration import softmax
from serving_plugin.predictor.conversation import NUM_FEATURES
from serving_plugin.predictor.evaluation.scores import Truth, row_scores, share_covered
from serving_plugin.predictor.model import groups_of, open_session, run_session
from serving_plugin.predictor.registry import default_tracking_uri
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import MODEL_FILE, TOKENIZER_FILE, PredictorSpec

if TYPE_CHECKING:
    import onnxruntime
    import torch

EXPORT = Path("models/predictor/export")
METRICS = Path("metrics/export.json")
PARITY_BATCHES = (1, 2, 7)
NUM_WARM_UP_RUNS = 3
MAX_COMPARED_ROWS = 1000  # of the validation split, for the accuracy that quantisation costs


class ParityError(TetriError):
    """The exported graph does not compute what the PyTorch model computes."""


def export(
    settings: ExportParams,
    checkpoint: Path,
    calibration: Path,
    labelled: Path,
    out: Path,
    metrics: Path,
    tracking_uri: str,
    *,
    coverage: float,
) -> dict[str, Any]:
    """Export, check, quantise, measure; `out` is written whole or not at all. Returns what `metrics` holds.

    `coverage` is the quantile whose coverage 8-bit weights must keep.

    Raises:
        ParityError: some shape's probabilities differ by more than the tolerance, or its argmax.
    """
    loaded = Checkpoint.load(checkpoint, calibration)
    spec = loaded.spec
    model = with_probabilities(loaded.network, spec.calibration.temperature)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as name:
        folder = Path(name) / "export"
        folder.mkdir()
        progress(f"export: ONNX opset {settings.opset}")
        exact = Path(name) / "float32.onnx"
        write_onnx(model, exact, spec.pad_token_id, settings.opset)
        session = open_session(exact, num_threads=1)
        report: dict[str, Any] = {
            "parity_max_abs_error": check_parity(model, session, spec, settings.tolerance),
            "parity_tolerance": settings.tolerance,
            "latency_ms": measure_latency(session, spec, settings.num_latency_runs),
            "onnx_bytes": exact.stat().st_size,
            "served": "float32",
        }
        progress(f"export: equal to PyTorch within {report['parity_max_abs_error']:.1e}")
        kept = exact
        if settings.int8:
            small = Path(name) / "int8.onnx"
            quantise(exact, small)
            rows = read_rows(labelled / "validation.jsonl")[:MAX_COMPARED_ROWS]
            report["int8"] = compare_int8(loaded, open_session(small, num_threads=1), rows, settings, coverage)
            report["int8"]["onnx_bytes"] = small.stat().st_size
            if max(report["int8"][key] for key in ("accuracy_loss", "coverage_change")) <= settings.int8_max_loss:
                kept, report["served"] = small, "int8"
        shutil.move(kept, folder / MODEL_FILE)
        shutil.copyfile(checkpoint / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        spec.save(folder)
        if out.exists():
            shutil.rmtree(out)
        folder.replace(out)
    write_json(metrics, report)
    _say(report, spec)
    _log(report, load_run_id(checkpoint), tracking_uri)
    return report


def with_probabilities(network: Any, temperature: float) -> torch.nn.Module:
    """A module (input_ids, attention_mask), both (batch, length) int64, and features (batch, NUM_FEATURES) float32 ->
    probabilities (batch, buckets) float32, after temperature."""
    import torch

    class Probabilities(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, features: torch.Tensor
        ) -> torch.Tensor:
            logits = self.network(input_ids, attention_mask, features)["logits"]
            return torch.softmax(logits / temperature, dim=-1)

    # `eval` of the wrapper too: the exporter puts back the mode it found, and that would switch dropout on
    return Probabilities().eval()


def write_onnx(model: torch.nn.Module, path: Path, pad_token_id: int, opset: int) -> None:
    """Trace with free batch and length. The example has a padded row and no size of 1, which would be fixed."""
    import torch

    example = random_inputs(2, 9, pad_token_id, vocabulary=pad_token_id + 16, seed=0)
    free = {0: "batch", 1: "length"}
    with warnings.catch_warnings():
        _expect_tracing_warnings()
        torch.onnx.export(
            model,
            tuple(torch.from_numpy(array) for array in example.values()),
            str(path),
            input_names=list(example),
            output_names=["probabilities"],
            dynamic_axes={
                "input_ids": free,
                "attention_mask": free,
                "features": {0: "batch"},
                "probabilities": {0: "batch"},
            },
            opset_version=opset,
            dynamo=False,  # the other exporter needs onnxscript, one more dependency
        )


def quantise(source: Path, target: Path) -> None:
    """Dynamic quantisation: 8-bit weights of the matrix products, activations quantised as they come.

    `reduce_range` leaves weights 7 of the 8 bits, since sums of products saturate on x86 without it: the largest error
    of a probability fell from 0.146 to 0.041 (profile `cpu_full`, 1,000 validation rows), at the same speed.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)


def compare_int8(
    loaded: Checkpoint,
    session: onnxruntime.InferenceSession,
    rows: Sequence[LabelledRow],
    settings: ExportParams,
    coverage: float,
) -> dict[str, Any]:
    """What 8 bits cost and bring beside the float model: accuracy at the published granularity, coverage of the
    `coverage` quantile (the calibration was fitted on the float model), latency."""
    spec, encoded = loaded.spec, loaded.encode(rows)
    exact = softmax(loaded.logits(encoded) / spec.calibration.temperature)
    # one at a time, as quantised graphs are served
    small = np.concatenate([run_session(session, [one], spec.pad_token_id) for one in encoded])
    groups = groups_of(encoded, spec.calibration.prompt_edges_tokens)
    truth = Truth.of(rows)
    figures: dict[str, float] = {}
    for name, shares in (("float32", exact), ("int8", small)):
        forecasts = truth.forecasts(spec.edges_tokens, spec.calibration.apply(shares, groups))
        scores = row_scores(forecasts, truth.lengths_tokens, (spec.granularity_tokens,), coverage)
        figures[f"accuracy_{name}"] = float(scores[f"accuracy_{spec.granularity_tokens}"].mean())
        upper = forecasts.quantiles(coverage)
        # 0 where no row is judged: equal if so for both, else far apart
        figures[f"coverage_{name}"] = share_covered(truth.lengths_tokens, upper, truth.cap_tokens) or 0.0
    return {
        "num_rows": len(rows),
        **{name: round(value, 4) for name, value in figures.items()},
        "accuracy_loss": round(figures["accuracy_float32"] - figures["accuracy_int8"], 4),
        "coverage_change": round(abs(figures["coverage_float32"] - figures["coverage_int8"]), 4),
        "max_abs_error": round(float(np.abs(small - exact).max()), 4),
        "latency_ms": measure_latency(session, spec, settings.num_latency_runs),
    }


def _expect_tracing_warnings() -> None:
    """Silence what tracing says of every transformers model; `check_parity` proves that none of it came true."""
    from torch.jit._trace import TracerWarning

    warnings.filterwarnings("ignore", category=TracerWarning)
    warnings.filterwarnings("ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning)
    warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning, module=r"torch\.onnx")
    warnings.filterwarnings("ignore", "Exporting aten::index operator of advanced indexing", UserWarning)


def random_inputs(batch: int, length: int, pad_token_id: int, vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """The graph's inputs by name: random ids without the padding token; every row but the first is shorter, padded."""
    rng = np.random.default_rng(seed)
    choices = np.asarray([token for token in range(vocabulary) if token != pad_token_id])
    input_ids = rng.choice(choices, (batch, length)).astype(np.int64)
    attention_mask = np.ones((batch, length), dtype=np.int64)
    for row in range(1, batch):
        kept = max(1, length - 3 * row)
        input_ids[row, kept:] = pad_token_id
        attention_mask[row, kept:] = 0
    features = rng.random((batch, NUM_FEATURES)).astype(np.float32)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "features": features}


def check_parity(
    model: torch.nn.Module, session: onnxruntime.InferenceSession, spec: PredictorSpec, tolerance: float
) -> float:
    """Largest |difference| of a probability over all shapes.

    Raises:
        ParityError: it is over `tolerance`, or an argmax differs where the two likeliest buckets are further apart.
    """
    import torch

    vocabulary = int(model.network.backbone.config.vocab_size)  # type: ignore[union-attr,arg-type]
    worst = 0.0
    for batch in PARITY_BATCHES:
        for length in sorted({1, 17, spec.input.max_tokens}):
            inputs = random_inputs(batch, length, spec.pad_token_id, vocabulary, seed=batch * 1000 + length)
            with torch.inference_mode():
                expected = model(*(torch.from_numpy(array) for array in inputs.values())).numpy()
            (actual,) = session.run(["probabilities"], inputs)
            error = float(np.abs(actual - expected).max())
            worst = max(worst, error)
            margin = np.diff(np.sort(expected, axis=1)[:, -2:], axis=1)[:, 0]  # a tie may fall either way
            flipped = (actual.argmax(axis=1) != expected.argmax(axis=1)) & (margin > tolerance)
            if error > tolerance or flipped.any():
                raise ParityError(
                    f"ONNX differs from PyTorch at batch {batch}, length {length}: error {error:.2e} "
                    f"(export.tolerance {tolerance:.0e}), {int(flipped.sum())} other argmax; try another export.opset"
                )
    return worst


def measure_latency(session: onnxruntime.InferenceSession, spec: PredictorSpec, num_runs: int) -> dict[str, Any]:
    """p50 and p99 in ms of one prompt on one thread, by input length."""
    result: dict[str, Any] = {}
    for length in sorted({16, 64, spec.input.max_tokens}):
        inputs = random_inputs(1, length, spec.pad_token_id, spec.pad_token_id + 16, seed=length)
        times_ms = []
        for _ in range(num_runs + NUM_WARM_UP_RUNS):
            start = time.perf_counter()
            session.run(["probabilities"], inputs)
            times_ms.append((time.perf_counter() - start) * 1000)
        p50, p99 = np.percentile(times_ms[NUM_WARM_UP_RUNS:], [50, 99])
        result[f"length_{length}"] = {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
    return result


def _say(report: dict[str, Any], spec: PredictorSpec) -> None:
    key = f"length_{spec.input.max_tokens}"
    progress(f"export: {report['latency_ms'][key]['p50']:.1f} ms for {spec.input.max_tokens} tokens on one thread")
    if "int8" in report:
        small = report["int8"]
        progress(
            f"export: 8-bit weights: {small['latency_ms'][key]['p50']:.1f} ms, accuracy {small['accuracy_int8']:.3f} "
            f"against {small['accuracy_float32']:.3f}; {report['served']} is served"
        )


def _log(report: dict[str, Any], run_id: str, tracking_uri: str) -> None:
    with tracked_run(tracking_uri, run_id):
        import mlflow

        mlflow.log_metric("export.parity_max_abs_error", report["parity_max_abs_error"])
        for kind, measured in (("float32", report), ("int8", report.get("int8"))):
            for length, latency in (measured or {}).get("latency_ms", {}).items():
                mlflow.log_metrics({f"export.{kind}.{length}.{name}_ms": value for name, value in latency.items()})


def main() -> None:
    """Entry point."""
    params = load_params()
    places = (CHECKPOINT, CALIBRATION, LABELLED, EXPORT, METRICS)
    export(params.export, *places, default_tracking_uri(), coverage=params.evaluate.coverage)


if __name__ == "__main__":
    run_stage(main)
