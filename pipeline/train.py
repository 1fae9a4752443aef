"""Stage train: fine-tune a small pretrained model on conversation -> distribution of the reply's length.

Differences from the paper (TetriInfer 3.3.2): the input is the conversation so far, not the prompt alone; the head has
finer buckets than the published granularity (coarser ones are sums of them), so that one model serves 100, 200 and 400
tokens; the loss may know that buckets have an order (`pipeline.losses`). Profile `paper` switches all of it off.

Writes `models/predictor/checkpoint`: backbone, head, tokenizer.json, predictor.json and run.json.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.backbone import find_backbone, load_tokenizer
from pipeline.files import progress, run_stage
from pipeline.params import Params, TrainParams, load_params
from pipeline.tracking import save_run_id, tracked_run
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.calibration import identity, softmax
from serving_plugin.predictor.conversation import FEATURE_NAMES
from serving_plugin.predictor.encoding import ConversationEncoder, InputRule
from serving_plugin.predictor.evaluation.scores import Forecasts, bucket_of
from serving_plugin.predictor.registry import default_tracking_uri
from serving_plugin.predictor.rows import LabelledRow, read_rows
from serving_plugin.predictor.spec import PredictorSpec
from serving_plugin.predictor.target import target_name

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint import Checkpoint
    from pipeline.network import LengthNetwork
    from serving_plugin.predictor.encoding import EncodedConversation

LABELLED = Path("data/labelled")
CHECKPOINT = Path("models/predictor/checkpoint")
MAX_THREADS = 8  # more do not help a model of this size, and the machine may serve others
PATIENCE_EPOCHS = 2
MAX_WARM_UP_ROWS = 8000
WARM_UP_BATCH = 64


def train(params: Params, labelled: Path, checkpoint: Path, tracking_uri: str) -> PredictorSpec:
    """Train, keep the epoch with the best validation loss, write the checkpoint folder whole or not at all."""
    rows = training_rows(params, read_rows(labelled / "train.jsonl"))
    validation_rows = read_rows(labelled / "validation.jsonl")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=".training-") as name:
        with tracked_run(tracking_uri, name=f"{params.profile}-seed{params.seed}") as run_id:
            fitted = fit(params, rows, validation_rows, Path(name), is_tracked=True)
        spec = replace(fitted.spec, split=split_name(params, read_rows(labelled / "test.jsonl")))
        out = Path(name) / "checkpoint"
        out.mkdir()
        replace(fitted, spec=spec).save(out)
        save_run_id(out, run_id)
        if checkpoint.exists():
            shutil.rmtree(checkpoint)
        out.replace(checkpoint)
    return spec


def fit(
    params: Params,
    rows: Sequence[LabelledRow],
    validation_rows: Sequence[LabelledRow],
    scratch: Path,
    *,
    is_tracked: bool = False,
) -> Checkpoint:
    """A predictor trained on `rows`; the best epoch by the loss on (some of) `validation_rows` is kept.

    Args:
        scratch: folder for the backbone made on the spot and the epochs' weights.
        is_tracked: log to the MLflow run that is open.
    """
    import torch
    from transformers import set_seed

    from pipeline.checkpoint import Checkpoint
    from pipeline.network import new_network

    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    settings = params.train
    path = find_backbone(settings.backbone, scratch, (row.prompt for row in rows), params.seed)
    encoder = ConversationEncoder(load_tokenizer(path), InputRule(**params.to_plain()["input"]))
    edges = edges_up_to(params.label.max_length_tokens, settings.fine_granularity_tokens)
    set_seed(params.seed)  # the head is drawn here
    network = new_network(path, len(edges) - 1, settings.use_features, settings.head_dropout)
    spec = make_spec(params, encoder, edges, rows, network.backbone.config)
    examples = to_examples(rows, encoder)
    network.start_from(
        [count / sum(spec.train_counts) for count in spec.train_counts],
        torch.tensor([example.encoded.features for example in examples]),
    )
    progress(
        f"train: {len(rows)} replies of {len({row.root_id for row in rows})} conversations, {spec.num_buckets} "
        f"buckets of {edges[1]} tokens, backbone {spec.backbone}"
    )
    chosen = choose_rows(validation_rows, params.seed, max_rows=settings.max_validation_rows)
    _warm_up(params, network, spec, examples)
    _run_trainer(params, network, spec, examples, to_examples(chosen, encoder), scratch, is_tracked)
    return Checkpoint(network.eval().cpu(), encoder, spec)


def training_rows(params: Params, rows: Sequence[LabelledRow]) -> list[LabelledRow]:
    """The rows of the training split that training uses: `choose_rows` with the limits of `train.*`."""
    settings = params.train
    return choose_rows(
        rows, params.seed, max_rows=settings.max_train_rows, max_turns=settings.max_turns_per_conversation
    )


def choose_rows(
    rows: Sequence[LabelledRow], seed: int, *, max_rows: int | None = None, max_turns: int | None = None
) -> list[LabelledRow]:
    """At most `max_turns` replies of each conversation and `max_rows` in all, in file order; None: no limit.

    Chosen by a hash of the row's id, so a larger limit keeps what a smaller one chose. Turns of one chat are alike:
    more of them cost time and teach little.
    """
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(f"{seed}\x00{rows[i].id}".encode()).digest())
    if max_turns is not None:
        taken: dict[str, int] = {}
        kept = []
        for i in order:
            taken[rows[i].root_id] = taken.get(rows[i].root_id, 0) + 1
            if taken[rows[i].root_id] <= max_turns:
                kept.append(i)
        order = kept
    return [rows[i] for i in sorted(order[:max_rows])]


def edges_up_to(max_length_tokens: int, width_tokens: int) -> tuple[int, ...]:
    """`0, width, 2 * width, ...`: the last bucket holds `max_length_tokens`."""
    return tuple(range(0, (max_length_tokens // width_tokens + 1) * width_tokens + 1, width_tokens))


def fine_buckets(lengths_tokens: Sequence[int], edges_tokens: Sequence[int]) -> np.ndarray:
    """Index of each length's fine bucket; beyond the last edge, the last."""
    buckets: np.ndarray = np.minimum(np.asarray(lengths_tokens) // edges_tokens[1], len(edges_tokens) - 2)
    return buckets


def make_spec(
    params: Params, encoder: ConversationEncoder, edges: tuple[int, ...], rows: Sequence[LabelledRow], config: Any
) -> PredictorSpec:
    """What the model folder will say of itself.

    Raises:
        ConfigurationError: the input is longer than the backbone's positions.
    """
    limit = int(config.max_position_embeddings)
    if encoder.rule.max_tokens > limit:
        raise ConfigurationError(
            f"input.max_tokens {encoder.rule.max_tokens} is over the {limit} positions of backbone "
            f"{params.train.backbone}; lower it"
        )
    counts = np.bincount(fine_buckets([row.output_tokens for row in rows], edges), minlength=len(edges) - 1)
    sources = {row.source for row in rows}
    return PredictorSpec(
        edges_tokens=edges,
        granularity_tokens=params.label.granularity_tokens,
        target_model=target_name(params.target.location),
        backbone=params.train.backbone,
        input=encoder.rule,
        feature_names=FEATURE_NAMES,
        pad_token_id=int(config.pad_token_id),
        source=sources.pop() if len(sources) == 1 else "mixed",
        train_counts=tuple(counts.tolist()),
        calibration=identity(),
    )


def split_name(params: Params, test_rows: Sequence[LabelledRow]) -> str:
    """How conversations are dealt out, for the eye, and a digest of those held out, which decides.

    Settings alone do not: a source that has grown may join two groups of near-duplicates and move one of them.
    """
    shares = ", ".join(f"{name} {share:g}" for name, share in params.prepare.shares.as_dict().items())
    roots = sorted({row.root_id for row in test_rows})
    digest = hashlib.sha256("\x00".join(roots).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"seed {params.prepare.split_seed}: {shares}; {len(roots)} test conversations {digest}"


@dataclass(frozen=True, slots=True)
class Example:
    """One row ready for the network."""

    encoded: EncodedConversation
    output_tokens: int
    censored: bool


def to_examples(rows: Sequence[LabelledRow], encoder: ConversationEncoder) -> list[Example]:
    """Rows encoded in their order: those of one conversation stand together, so its messages are tokenised once."""
    return [Example(encoder.encode(row.messages), row.output_tokens, row.censored) for row in rows]


@dataclass(frozen=True, slots=True)
class Collator:
    """Examples to padded tensors with the very function that serving pads with; labels are (batch, 2)."""

    pad_token_id: int

    def __call__(self, rows: Sequence[Example]) -> dict[str, torch.Tensor]:
        import torch

        from pipeline.network import to_batch

        labels = torch.tensor([[row.output_tokens, int(row.censored)] for row in rows])
        return {**to_batch([row.encoded for row in rows], self.pad_token_id), "labels": labels}


def _warm_up(params: Params, network: LengthNetwork, spec: PredictorSpec, examples: Sequence[Example]) -> None:
    """Train the head alone for `head_epochs`, on the states of the untouched backbone.

    A random head would first spoil what the backbone knows ("linear probing then fine-tuning", Kumar et al., ICLR
    2022), and the states are computed once, so that an epoch takes a second.
    """
    import torch

    from pipeline.network import to_batch

    settings = params.train
    chosen = examples[:: -(-len(examples) // MAX_WARM_UP_ROWS)]  # evenly: rows of a conversation stand together
    if settings.head_epochs == 0:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network.to(device).eval()
    pooled, features = [], []
    with torch.inference_mode():
        for start in range(0, len(chosen), WARM_UP_BATCH):
            rows = [example.encoded for example in chosen[start : start + WARM_UP_BATCH]]
            batch = {name: value.to(device) for name, value in to_batch(rows, spec.pad_token_id).items()}
            pooled.append(network.pooled(batch["input_ids"], batch["attention_mask"]).float())
            features.append(batch["features"])
    states, numbers = torch.cat(pooled).clone(), torch.cat(features).clone()
    labels = torch.tensor([[example.output_tokens, int(example.censored)] for example in chosen], device=device)
    own = [value for name, value in network.named_parameters() if not name.startswith("backbone.")]
    loss_of = _loss(settings, spec)
    optimizer = torch.optim.AdamW(own, lr=settings.head_learning_rate, weight_decay=settings.weight_decay)
    steps_per_epoch = -(-len(chosen) // WARM_UP_BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, settings.head_epochs * steps_per_epoch)
    network.features.train()
    network.head.train()
    loss = torch.zeros(())
    for _ in range(settings.head_epochs):
        for rows_chosen in torch.split(torch.randperm(len(chosen), device=device), WARM_UP_BATCH):
            optimizer.zero_grad()
            loss = loss_of(
                {"logits": network.logits_of(states[rows_chosen], numbers[rows_chosen])}, labels[rows_chosen]
            )
            loss.backward()
            optimizer.step()
            schedule.step()
    progress(
        f"train: head warmed up on {len(chosen)} replies, {settings.head_epochs} epochs, last loss {loss.item():.3f}"
    )


def _loss(settings: TrainParams, spec: PredictorSpec) -> Any:
    from pipeline.losses import LengthLoss

    return LengthLoss(
        spec.edges_tokens,
        spec.granularity_tokens,
        settings.label_smoothing_tokens,
        settings.expected_value_weight,
    )


def _run_trainer(
    params: Params,
    network: LengthNetwork,
    spec: PredictorSpec,
    rows: list[Example],
    validation: list[Example],
    scratch: Path,
    is_tracked: bool,
) -> None:
    """Run the Trainer; `network` holds the best epoch's weights afterwards."""
    import torch
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    settings = params.train
    arguments = TrainingArguments(
        output_dir=str(scratch / "epochs"),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=4 * settings.batch_size,
        warmup_steps=settings.warmup_share,  # below 1 it is a share of all steps
        use_cpu=not torch.cuda.is_available(),
        bf16=settings.dtype == "bfloat16",
        # Not "group_by_length": prompts of like length have replies of like length, so sorted batches are lopsided
        # (MiniLM, 1,500 rows: validation loss 2.644 against 2.587; larger batches or steps fell to the modal bucket).
        train_sampling_strategy="random",
        remove_unused_columns=False,  # the collator picks what the network takes
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        logging_steps=50,
        seed=params.seed,
        report_to=["mlflow"] if is_tracked else "none",
        dataloader_pin_memory=False,
        label_names=["labels"],
    )
    if is_tracked:
        import mlflow

        plain = params.to_plain()
        mlflow.log_params({f"{section}.{key}": value for section in ("label", "input", "train", "target")
                           for key, value in plain[section].items()})  # fmt: skip
        mlflow.log_param("profile", params.profile)
    trainer = Trainer(
        model=network,
        args=arguments,
        data_collator=Collator(spec.pad_token_id),
        train_dataset=rows,
        eval_dataset=validation,
        compute_loss_func=_loss(settings, spec),
        compute_metrics=_validation_metrics(spec),
        callbacks=[EarlyStoppingCallback(PATIENCE_EPOCHS)],
        optimizers=(torch.optim.AdamW(_parameter_groups(network, settings), fused=True), None),
    )
    trainer.train()
    trainer.accelerator.unwrap_model(network, keep_fp32_wrapper=False)  # forecasts in float32, as served


def _parameter_groups(network: LengthNetwork, settings: TrainParams) -> list[dict[str, Any]]:
    """Backbone and head learn at their own rates; vectors (biases, norms) do not decay."""
    groups: dict[tuple[float, float], list[Any]] = {}
    for name, parameter in network.named_parameters():
        rate = settings.learning_rate if name.startswith("backbone.") else settings.head_learning_rate
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": found, "lr": rate, "weight_decay": decay} for (rate, decay), found in groups.items()]


def _validation_metrics(spec: PredictorSpec) -> Any:
    """Accuracy at the published granularity and rank correlation, by epoch."""
    from scipy.stats import kendalltau

    width = spec.granularity_tokens

    def compute(prediction: Any) -> dict[str, float]:
        forecasts = Forecasts.from_weights(spec.edges_tokens, softmax(prediction.predictions))
        lengths = prediction.label_ids[:, 0]
        coarse = forecasts.regrouped(width)
        return {
            f"accuracy_{width}": float(np.mean(coarse.argmax(axis=1) == bucket_of(lengths, width, coarse.shape[1]))),
            "kendall_tau": float(kendalltau(forecasts.means(), lengths).statistic),
        }

    return compute


def main() -> None:
    """Entry point."""
    train(load_params(), LABELLED, CHECKPOINT, default_tracking_uri())


if __name__ == "__main__":
    run_stage(main)
