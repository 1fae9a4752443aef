"""Stage export: the checkpoint as ONNX, proven equal to PyTorch over several shapes, its latency measured.

Writes the model folder `models/predictor/export` (model.onnx, tokenizer.json, predictor.json) and
`metrics/export.json`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.backbone import load_classifier
from pipeline.files import progress, run_stage, write_json
from pipeline.params import ExportParams, load_params
from pipeline.tracking import load_run_id, tracked_run
from pipeline.train import CHECKPOINT
from serving_plugin.core.errors import TetriError
from serving_plugin.predictor.model import open_session
from serving_plugin.predictor.registry import default_tracking_uri
from serving_plugin.predictor.spec import MODEL_FILE, TOKENIZER_FILE, PredictorSpec

if TYPE_CHECKING:
    import onnxruntime
    import torch

EXPORT = Path("models/predictor/export")
METRICS = Path("metrics/export.json")
PARITY_BATCHES = (1, 2, 7)
NUM_WARM_UP_RUNS = 3


class ParityError(TetriError):
    """The exported graph does not compute what the PyTorch model computes."""


def export(settings: ExportParams, checkpoint: Path, out: Path, metrics: Path, tracking_uri: str) -> dict[str, Any]:
    """Export, check, measure; `out` is written whole or not at all. Returns what `metrics` holds.

    Raises:
        ParityError: some shape's probabilities differ by more than the tolerance, or its argmax.
    """
    spec = PredictorSpec.load(checkpoint)
    model = with_probabilities(load_classifier(str(checkpoint)))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as name:
        folder = Path(name) / "export"
        folder.mkdir()
        progress(f"export: ONNX opset {settings.opset}")
        write_onnx(model, folder / MODEL_FILE, spec.pad_token_id, settings.opset)
        session = open_session(folder / MODEL_FILE, num_threads=1)
        report: dict[str, Any] = {
            "parity_max_abs_error": check_parity(model, session, spec, settings.tolerance),
            "parity_tolerance": settings.tolerance,
            "onnx_bytes": (folder / MODEL_FILE).stat().st_size,
        }
        progress(
            f"export: equal to PyTorch within {report['parity_max_abs_error']:.1e}; measuring latency on one thread"
        )
        report["latency_ms"] = measure_latency(session, spec, settings.num_latency_runs)
        shutil.copyfile(checkpoint / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        spec.save(folder)
        if out.exists():
            shutil.rmtree(out)
        folder.replace(out)
    write_json(metrics, report)
    _log(report, load_run_id(checkpoint), tracking_uri)
    return report


def with_probabilities(classifier: Any) -> torch.nn.Module:
    """A module (input_ids, attention_mask), both (batch, length) int64 -> probabilities (batch, buckets) float32."""
    import torch

    class Probabilities(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            logits = self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits
            return torch.softmax(logits, dim=-1)

    # `eval` of the wrapper too: the exporter puts back the mode it found, and that would switch dropout on
    return Probabilities().eval()


def write_onnx(model: torch.nn.Module, path: Path, pad_token_id: int, opset: int) -> None:
    """Trace with free batch and length. The example has a padded row and no size of 1, which would be fixed."""
    import torch

    input_ids, attention_mask = random_inputs(2, 9, pad_token_id, vocabulary=pad_token_id + 16, seed=0)
    free = {0: "batch", 1: "length"}
    with warnings.catch_warnings():
        _expect_tracing_warnings()
        torch.onnx.export(
            model,
            (torch.from_numpy(input_ids), torch.from_numpy(attention_mask)),
            str(path),
            input_names=["input_ids", "attention_mask"],
            output_names=["probabilities"],
            dynamic_axes={"input_ids": free, "attention_mask": free, "probabilities": {0: "batch"}},
            opset_version=opset,
            dynamo=False,  # the other exporter needs onnxscript, one more dependency
        )


def _expect_tracing_warnings() -> None:
    """Silence what tracing says of every transformers model; `check_parity` proves that none of it came true."""
    from torch.jit._trace import TracerWarning

    warnings.filterwarnings("ignore", category=TracerWarning)
    warnings.filterwarnings("ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning)
    warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning, module=r"torch\.onnx")
    warnings.filterwarnings("ignore", "Exporting aten::index operator of advanced indexing", UserWarning)


def random_inputs(
    batch: int, length: int, pad_token_id: int, vocabulary: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random ids without the padding token; every row but the first is shorter and padded."""
    rng = np.random.default_rng(seed)
    choices = np.asarray([token for token in range(vocabulary) if token != pad_token_id])
    input_ids = rng.choice(choices, (batch, length)).astype(np.int64)
    attention_mask = np.ones((batch, length), dtype=np.int64)
    for row in range(1, batch):
        kept = max(1, length - 3 * row)
        input_ids[row, kept:] = pad_token_id
        attention_mask[row, kept:] = 0
    return input_ids, attention_mask


def check_parity(
    model: torch.nn.Module, session: onnxruntime.InferenceSession, spec: PredictorSpec, tolerance: float
) -> float:
    """Largest |difference| of a probability over all shapes.

    Raises:
        ParityError: it is over `tolerance`, or an argmax differs where the two likeliest buckets are further apart.
    """
    import torch

    vocabulary = int(model.classifier.config.vocab_size)  # type: ignore[union-attr,arg-type]
    worst = 0.0
    for batch in PARITY_BATCHES:
        for length in sorted({1, 17, spec.max_input_tokens}):
            inputs = random_inputs(batch, length, spec.pad_token_id, vocabulary, seed=batch * 1000 + length)
            with torch.inference_mode():
                expected = model(*(torch.from_numpy(array) for array in inputs)).numpy()
            (actual,) = session.run(["probabilities"], dict(zip(("input_ids", "attention_mask"), inputs, strict=True)))
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
    for length in sorted({16, 64, spec.max_input_tokens}):
        input_ids, attention_mask = random_inputs(1, length, spec.pad_token_id, spec.pad_token_id + 16, seed=length)
        times_ms = []
        for _ in range(num_runs + NUM_WARM_UP_RUNS):
            start = time.perf_counter()
            session.run(["probabilities"], {"input_ids": input_ids, "attention_mask": attention_mask})
            times_ms.append((time.perf_counter() - start) * 1000)
        p50, p99 = np.percentile(times_ms[NUM_WARM_UP_RUNS:], [50, 99])
        result[f"length_{length}"] = {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
    return result


def _log(report: dict[str, Any], run_id: str, tracking_uri: str) -> None:
    with tracked_run(tracking_uri, run_id):
        import mlflow

        mlflow.log_metric("export.parity_max_abs_error", report["parity_max_abs_error"])
        for length, latency in report["latency_ms"].items():
            mlflow.log_metrics({f"export.{length}.{name}_ms": value for name, value in latency.items()})


def main() -> None:
    """Entry point."""
    export(load_params().export, CHECKPOINT, EXPORT, METRICS, default_tracking_uri())


if __name__ == "__main__":
    run_stage(main)
