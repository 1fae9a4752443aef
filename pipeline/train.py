"""Stage train: fine-tune a sequence classifier on prompt -> bucket of the reply's length (TetriInfer 3.3.2).

Differences from the paper: the head has finer buckets than the published granularity (coarser ones are sums of them),
so that one model serves 100, 200 and 400 tokens; labels may be smoothed over near buckets and the expected length may
join the loss (both off: the paper's plain cross-entropy); a long prompt keeps head and tail.

Writes `models/predictor/checkpoint`: the Hugging Face model, tokenizer.json, predictor.json and run.json.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.backbone import find_backbone, load_classifier, load_tokenizer
from pipeline.files import progress, run_stage
from pipeline.params import Params, load_params
from pipeline.tracking import save_run_id, tracked_run
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.encoding import PromptEncoder, pad_batch
from serving_plugin.predictor.registry import default_tracking_uri
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import TOKENIZER_FILE, PredictorSpec
from serving_plugin.predictor.target import target_name

if TYPE_CHECKING:
    import datasets
    import torch

LABELLED = Path("data/labelled")
CHECKPOINT = Path("models/predictor/checkpoint")
MAX_THREADS = 8  # more do not help a model of this size, and the machine may serve others
PATIENCE_EPOCHS = 2


def train(params: Params, labelled: Path, checkpoint: Path, tracking_uri: str) -> PredictorSpec:
    """Train, keep the epoch with the best validation loss, write the checkpoint folder whole or not at all."""
    import torch
    from transformers import set_seed

    rows = read_rows(labelled / "train.jsonl")[: params.train.max_train_rows]
    validation_rows = read_rows(labelled / "validation.jsonl")
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=".training-") as name:
        scratch = Path(name)
        path = find_backbone(params.train.backbone, scratch, [row.prompt for row in rows], params.seed)
        encoder = PromptEncoder(load_tokenizer(path), params.train.max_input_tokens, params.train.head_tokens)
        edges = edges_up_to(params.label.max_length_tokens, params.train.fine_granularity_tokens)
        set_seed(params.seed)  # the classification head is drawn here
        model = load_classifier(path, num_labels=len(edges) - 1)
        spec = make_spec(params, encoder, edges, rows, model.config)
        progress(f"train: {len(rows)} rows, {spec.num_buckets} buckets of {edges[1]} tokens, backbone {spec.backbone}")
        with tracked_run(tracking_uri, name=f"{params.profile}-seed{params.seed}") as run_id:
            _fit(params, model, spec, to_dataset(rows, encoder), to_dataset(validation_rows, encoder), scratch)
            out = scratch / "checkpoint"
            model.save_pretrained(out)
            encoder.save(out / TOKENIZER_FILE)
            spec.save(out)
            save_run_id(out, run_id)
        if checkpoint.exists():
            shutil.rmtree(checkpoint)
        out.replace(checkpoint)
    return spec


def edges_up_to(max_length_tokens: int, width_tokens: int) -> tuple[int, ...]:
    """`0, width, 2 * width, ...`: the last bucket holds `max_length_tokens`."""
    return tuple(range(0, (max_length_tokens // width_tokens + 1) * width_tokens + 1, width_tokens))


def fine_buckets(lengths_tokens: Sequence[int], edges_tokens: Sequence[int]) -> np.ndarray:
    """Index of each length's fine bucket; beyond the last edge, the last."""
    buckets: np.ndarray = np.minimum(np.asarray(lengths_tokens) // edges_tokens[1], len(edges_tokens) - 2)
    return buckets


def make_spec(
    params: Params, encoder: PromptEncoder, edges: tuple[int, ...], rows: Sequence[LabelledRow], config: Any
) -> PredictorSpec:
    """What the model folder will say of itself.

    Raises:
        ConfigurationError: the input is longer than the backbone's positions.
    """
    limit = int(config.max_position_embeddings)
    if encoder.max_input_tokens > limit:
        raise ConfigurationError(
            f"train.max_input_tokens {encoder.max_input_tokens} is over the {limit} positions of backbone "
            f"{params.train.backbone}; lower it"
        )
    counts = np.bincount(fine_buckets([row.output_tokens for row in rows], edges), minlength=len(edges) - 1)
    sources = {row.source for row in rows}
    return PredictorSpec(
        edges_tokens=edges,
        granularity_tokens=params.label.granularity_tokens,
        target_model=target_name(params.target.location),
        backbone=params.train.backbone,
        head_tokens=encoder.head_tokens,
        tail_tokens=encoder.tail_tokens,
        max_input_tokens=encoder.max_input_tokens,
        pad_token_id=int(config.pad_token_id),
        source=sources.pop() if len(sources) == 1 else "mixed",
        train_counts=tuple(counts.tolist()),
    )


def to_dataset(rows: Sequence[LabelledRow], encoder: PromptEncoder) -> datasets.Dataset:
    """Columns `input_ids` and `labels` (output length in tokens)."""
    from datasets import Dataset

    held = Dataset.from_dict({"prompt": [row.prompt for row in rows], "labels": [row.output_tokens for row in rows]})

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"input_ids": [list(prompt.ids) for prompt in encoder.encode_batch(batch["prompt"])]}

    # A fingerprint is given since a closure over a tokenizer does not hash; nothing is cached on disk.
    return held.map(
        encode, batched=True, remove_columns=["prompt"], keep_in_memory=True, new_fingerprint="encoded", desc="tokenise"
    )


@dataclass(frozen=True, slots=True)
class Collator:
    """Rows to padded tensors with the very function that serving pads with."""

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        input_ids, attention_mask = pad_batch([row["input_ids"] for row in rows], self.pad_token_id)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


@dataclass(frozen=True, slots=True)
class LengthLoss:
    """Cross-entropy over fine buckets (+ weighted error of the expected length, in units of the granularity).

    `smoothing_tokens` is the standard deviation with which a label's mass spreads over near buckets; 0: none.
    """

    edges_tokens: tuple[int, ...]
    granularity_tokens: int
    smoothing_tokens: float
    expected_value_weight: float

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        import torch
        from torch.nn.functional import cross_entropy

        logits = outputs["logits"].float()
        edges = torch.tensor(self.edges_tokens, dtype=torch.float32, device=logits.device)
        middles = (edges[:-1] + edges[1:] - 1) / 2
        lengths = labels.to(logits.device).float().clamp(max=self.edges_tokens[-1] - 1)
        if self.smoothing_tokens > 0:
            distance = (middles[None, :] - lengths[:, None]) / self.smoothing_tokens
            loss = cross_entropy(logits, torch.softmax(-0.5 * distance**2, dim=-1))
        else:
            loss = cross_entropy(logits, (lengths // self.edges_tokens[1]).long())
        if self.expected_value_weight > 0:
            expected = torch.softmax(logits, dim=-1) @ middles
            loss = loss + self.expected_value_weight * (expected - lengths).abs().mean() / self.granularity_tokens
        return loss


def _fit(
    params: Params, model: Any, spec: PredictorSpec, rows: datasets.Dataset, validation: datasets.Dataset, scratch: Path
) -> None:
    """Run the Trainer; `model` holds the best epoch's weights afterwards."""
    import mlflow
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    settings = params.train
    arguments = TrainingArguments(
        output_dir=str(scratch / "epochs"),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=2 * settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_share,  # below 1 it is a share of all steps
        # Not "group_by_length": prompts of like length have replies of like length, so sorted batches are lopsided
        # (MiniLM, 1,500 rows: validation loss 2.644 against 2.587; larger batches or steps fell to the modal bucket).
        train_sampling_strategy="random",
        remove_unused_columns=False,  # the collator picks what the model takes
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        logging_steps=20,
        seed=params.seed,
        report_to=["mlflow"],
        dataloader_pin_memory=False,
    )
    mlflow.log_params({f"{section}.{key}": value for section in ("label", "train", "target")
                       for key, value in params.to_plain()[section].items()})  # fmt: skip
    mlflow.log_param("profile", params.profile)
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=Collator(spec.pad_token_id),
        train_dataset=rows,
        eval_dataset=validation,
        compute_loss_func=LengthLoss(
            spec.edges_tokens, spec.granularity_tokens, settings.label_smoothing_tokens, settings.expected_value_weight
        ),
        compute_metrics=_validation_metrics(spec),
        callbacks=[EarlyStoppingCallback(PATIENCE_EPOCHS)],
    )
    trainer.train()
    model.eval().cpu()


def _validation_metrics(spec: PredictorSpec) -> Any:
    from serving_plugin.predictor.metrics import BucketAccuracy, bucket_of, regroup

    width = spec.granularity_tokens
    metric = BucketAccuracy(keep_in_memory=True)

    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions.astype(np.float64)
        coarse = regroup(spec.edges_tokens, np.exp(logits - logits.max(axis=1, keepdims=True)), width)
        truth = bucket_of(prediction.label_ids, width, coarse.shape[1])
        result = metric.compute(predictions=coarse.argmax(axis=1), references=truth)
        return {f"accuracy_{width}": result["accuracy"]}

    return compute


def main() -> None:
    """Entry point."""
    train(load_params(), LABELLED, CHECKPOINT, default_tracking_uri())


if __name__ == "__main__":
    run_stage(main)
