"""Stage baselines: what a length predictor has to beat, fitted on the same training conversations.

  marginal                   the training split's distribution, for everyone
  prompt_length              the distribution at prompts of like length
  tfidf_linear               words and word pairs of the prompt, multinomial logistic regression
  gradient_boosting_prompt   lexical features of the prompt (`pipeline.lexical`), gradient boosted trees
  gradient_boosting          the same, and the lengths of the conversation so far that our model gets, too
  plain_cross_entropy        the paper's method: our backbone on the prompt alone, plain cross-entropy

Always naming the modal bucket needs no file: `predictor.evaluation.metrics` has it from the counts. "Prompt" is the
last message. No baseline is calibrated. Reads data/labelled; writes models/predictor/baselines: predictions.npz
(`predictor.evaluation.baselines`; replies of the test split and of the target, each once) and report.json.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.backbone import find_backbone, load_tokenizer
from pipeline.files import progress, run_stage, write_json
from pipeline.label import TARGET_REPLIES_FILE
from pipeline.lexical import lexical_table
from pipeline.params import InputParams, Params, load_params
from pipeline.train import LABELLED, choose_rows, edges_up_to, fine_buckets, fit, training_rows
from serving_plugin.predictor.encoding import ConversationEncoder, InputRule
from serving_plugin.predictor.evaluation.baselines import DEFAULT_PREDICTIONS, write_baselines
from serving_plugin.predictor.rows import LabelledRow, read_rows

PREDICTIONS = DEFAULT_PREDICTIONS
REPORT_NAME = "report.json"
CLASS_TOKENS = 100  # of classifiers that need a class per bucket; a class's mass is spread over its fine buckets
NUM_LENGTH_BINS = 30
PRIOR_ROWS = 20  # rows of the marginal distribution that join those of a bin
MAX_WORDS = 30_000
TEXT_CHARS = 8_000
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows with what the baselines read of them; tables are (rows, columns) float32."""

    rows: Sequence[LabelledRow]
    lexical: Array
    conversation: Array

    @property
    def texts(self) -> list[str]:
        """Prompts, very long ones cut in the middle."""
        half = TEXT_CHARS // 2
        prompts = [row.prompt for row in self.rows]
        return [text if len(text) <= TEXT_CHARS else f"{text[:half]}\n{text[-half:]}" for text in prompts]


@dataclass(frozen=True, slots=True)
class Task:
    """What a baseline learns from and has to answer. `fine` are the (train rows,) fine buckets."""

    edges_tokens: tuple[int, ...]
    train: Split
    validation: Split
    test: Split
    seed: int

    @property
    def fine(self) -> Array:
        """(train rows,) fine bucket of each reply; a cut one counts where it was cut."""
        return fine_buckets([row.output_tokens for row in self.train.rows], self.edges_tokens)

    @property
    def marginal(self) -> Array:
        """(buckets,) share of the training rows."""
        counts = np.bincount(self.fine, minlength=len(self.edges_tokens) - 1)
        shares: Array = counts / counts.sum()
        return shares

    def classes(self, rows: Sequence[LabelledRow]) -> Array:
        """(rows,) class of each reply: buckets of `CLASS_TOKENS`, or the fine ones where these are wider."""
        classes: Array = fine_buckets([row.output_tokens for row in rows], self.edges_tokens) // self.fine_per_class
        return classes

    @property
    def fine_per_class(self) -> int:
        """How many fine buckets make a class."""
        return max(1, CLASS_TOKENS // self.edges_tokens[1])

    def spread(self, probabilities: Array, classes: Array) -> Array:
        """(rows, classes that occurred) -> (rows, fine buckets): in a class, as the training rows lie in it."""
        inside = np.zeros((len(classes), len(self.edges_tokens) - 1))
        for row, label in enumerate(classes):
            members = slice(label * self.fine_per_class, (label + 1) * self.fine_per_class)
            inside[row, members] = self.marginal[members]
        result: Array = probabilities @ (inside / inside.sum(axis=1, keepdims=True))
        return result


def marginal(task: Task) -> Array:
    """The training split's distribution for everyone."""
    return np.tile(task.marginal, (len(task.test.rows), 1))


def prompt_length(task: Task) -> Array:
    """The distribution of the training rows whose prompt is about as long, in bins of equal size."""
    train, test = (np.asarray([len(row.prompt) for row in split.rows]) for split in (task.train, task.test))
    cuts = np.unique(np.quantile(train, np.linspace(0, 1, NUM_LENGTH_BINS + 1)[1:-1]))
    counts = np.tile(PRIOR_ROWS * task.marginal, (len(cuts) + 1, 1))
    np.add.at(counts, (np.searchsorted(cuts, train, side="right"), task.fine), 1.0)
    shares: Array = counts / counts.sum(axis=1, keepdims=True)
    return shares[np.searchsorted(cuts, test, side="right")]


def tfidf_linear(task: Task) -> Array:
    """TF-IDF of words and word pairs under a multinomial logistic regression."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    labels = task.classes(task.train.rows)
    if len(np.unique(labels)) < 2:
        return marginal(task)
    # one-letter words count, and any text has words for it: "I", "5", code
    words = TfidfVectorizer(
        max_features=MAX_WORDS, ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]",
        min_df=2 if len(labels) > 1000 else 1, dtype=np.float32,
    )  # fmt: skip
    model = LogisticRegression(C=2.0, max_iter=100, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # near the optimum is enough, and takes a bounded time
        model.fit(words.fit_transform(task.train.texts), labels)
    return task.spread(model.predict_proba(words.transform(task.test.texts)), model.classes_)


def gradient_boosting_prompt(task: Task) -> Array:
    """Gradient boosted trees on lexical features of the prompt."""
    return _boosted(task, *(split.lexical for split in (task.train, task.validation, task.test)))


def gradient_boosting(task: Task) -> Array:
    """Gradient boosted trees on lexical features and on the conversation's lengths: the strongest rival."""
    tables = (np.hstack([split.lexical, split.conversation]) for split in (task.train, task.validation, task.test))
    return _boosted(task, *tables)


def _boosted(task: Task, train: Array, validation: Array, test: Array) -> Array:
    from sklearn.ensemble import HistGradientBoostingClassifier

    labels, held_out = task.classes(task.train.rows), task.classes(task.validation.rows)
    if len(np.unique(labels)) < 2:
        return marginal(task)
    known = np.isin(held_out, labels)
    stopping: dict[str, Any] = {"X_val": validation[known], "y_val": held_out[known]} if known.any() else {}
    model = HistGradientBoostingClassifier(
        learning_rate=0.06, max_iter=200, max_leaf_nodes=15, min_samples_leaf=max(1, min(20, len(labels) // 20)),
        l2_regularization=1.0, early_stopping=bool(stopping), n_iter_no_change=10, random_state=task.seed,
    )  # fmt: skip
    model.fit(train, labels, **stopping)
    return task.spread(model.predict_proba(test), model.classes_)


BASELINES: dict[str, Callable[[Task], Array]] = {
    "marginal": marginal,
    "prompt_length": prompt_length,
    "tfidf_linear": tfidf_linear,
    "gradient_boosting_prompt": gradient_boosting_prompt,
    "gradient_boosting": gradient_boosting,
}


def plain_cross_entropy(
    params: Params,
    train_rows: Sequence[LabelledRow],
    validation_rows: Sequence[LabelledRow],
    test_rows: Sequence[LabelledRow],
) -> Array:
    """(test rows, buckets) of the paper's method (TetriInfer 3.3.2) with our backbone, rows, epochs and rates.

    The input is the prompt alone and the loss plain cross-entropy. `train_rows` are those of our model's training.
    """
    plain = replace(
        params,
        input=InputParams(params.input.max_tokens, 0, 0, params.input.head_share),
        train=replace(params.train, use_features=False, label_smoothing_tokens=0.0, expected_value_weight=0.0),
    )
    with tempfile.TemporaryDirectory(prefix="tetri-plain-") as scratch:
        return fit(plain, train_rows, validation_rows, Path(scratch)).probabilities(test_rows)


def run(params: Params, labelled: Path, predictions: Path) -> dict[str, Any]:
    """Fit every baseline and write what it says of the test rows; returns what report.json holds."""
    train_rows, validation_rows = read_rows(labelled / "train.jsonl"), read_rows(labelled / "validation.jsonl")
    target = labelled / TARGET_REPLIES_FILE
    asked = read_rows(labelled / "test.jsonl")
    asked += read_rows(target) if target.is_file() and target.stat().st_size else []
    test_rows = list({row.id: row for row in asked}.values())  # samples of one reply share their forecast
    ours = training_rows(params, train_rows)
    chosen = choose_rows(ours, params.seed, max_rows=params.baselines.max_train_rows)
    progress(f"baselines: {len(chosen)} training rows, forecasts of {len(test_rows)} replies")
    task = make_task(params, chosen, validation_rows, test_rows)
    found, seconds = {}, {}
    for name, predict in BASELINES.items():
        found[name], seconds[name] = _timed(name, lambda predict=predict: predict(task))  # type: ignore[misc]
    if params.baselines.plain_cross_entropy:
        name = "plain_cross_entropy"
        found[name], seconds[name] = _timed(name, lambda: plain_cross_entropy(params, ours, validation_rows, test_rows))
    write_baselines(predictions, [row.id for row in test_rows], task.edges_tokens, found)
    report = {
        "num_train_rows": len(chosen),
        "num_validation_rows": len(validation_rows),
        "num_replies": len(test_rows),
        "seconds": seconds,
        "versions": {package: version(package) for package in ("numpy", "scikit-learn", "torch")},
    }
    write_json(predictions.with_name(REPORT_NAME), report)
    return report


def make_task(
    params: Params,
    train_rows: Sequence[LabelledRow],
    validation_rows: Sequence[LabelledRow],
    test_rows: Sequence[LabelledRow],
) -> Task:
    """Rows with their features; the conversation's lengths are counted by the backbone's tokenizer, as our model's."""
    with tempfile.TemporaryDirectory(prefix="tetri-baselines-") as scratch:
        path = find_backbone(params.train.backbone, Path(scratch), (row.prompt for row in train_rows), params.seed)
        encoder = ConversationEncoder(load_tokenizer(path), InputRule(**params.to_plain()["input"]))

    def split(rows: Sequence[LabelledRow]) -> Split:
        features = [encoder.encode(row.messages).features for row in rows]
        return Split(rows, lexical_table([row.prompt for row in rows]), np.asarray(features, dtype=np.float32))

    edges = edges_up_to(params.label.max_length_tokens, params.train.fine_granularity_tokens)
    return Task(edges, split(train_rows), split(validation_rows), split(test_rows), params.seed)


def _timed(name: str, predict: Callable[[], Array]) -> tuple[Array, float]:
    started = time.perf_counter()
    found = predict()
    seconds = math.ceil(10 * (time.perf_counter() - started)) / 10
    progress(f"baselines: {name} in {seconds:.1f} s")
    return found, seconds


def main() -> None:
    """Entry point."""
    run(load_params(), LABELLED, PREDICTIONS)


if __name__ == "__main__":
    run_stage(main)
