"""The file in which the pipeline keeps what the baselines forecast: one npz, one row per reply. numpy only.

`ids` (replies,), `edges_tokens` (buckets + 1,) and, for each baseline under its name, (replies, buckets) float32.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.evaluation.scores import Array

DEFAULT_PREDICTIONS = Path("models/predictor/baselines/predictions.npz")
_IDS, _EDGES = "ids", "edges_tokens"


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an npz whole or not at all; the same arrays give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_baselines(
    path: Path, ids: Sequence[str], edges_tokens: Sequence[int], predictions: Mapping[str, Array]
) -> None:
    """Write the predictions of the baselines.

    Args:
        ids: (replies,) each once.
        predictions: baseline -> (replies, buckets) probabilities over `edges_tokens`.
    """
    held = {name: np.asarray(values, dtype=np.float32) for name, values in predictions.items()}
    write_arrays(path, {_IDS: np.asarray(ids), _EDGES: np.asarray(edges_tokens, dtype=np.int64), **held})


def read_baselines(path: Path, ids: Sequence[str], edges_tokens: Sequence[int]) -> dict[str, Array]:
    """Baseline -> (rows, buckets) for the rows of these ids, in their order.

    Raises:
        ConfigurationError: no such file, or it is not one of ours, of other buckets, or without some of these rows.
    """
    try:
        # opened here, since NumPy leaves a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        place = {str(row_id): i for i, row_id in enumerate(held.pop(_IDS))}
        edges = tuple(held.pop(_EDGES).tolist())
    except OSError as error:
        reason = error.strerror or "not an npz file"
        raise ConfigurationError(f"baselines {path} cannot be read ({reason}); run `dvc repro baselines`") from None
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:  # an .npy is no context manager
        raise ConfigurationError(f"{path} holds no baselines ({error}); run `dvc repro baselines`") from None
    if edges != tuple(edges_tokens):
        raise ConfigurationError(
            f"{path} has buckets up to {max(edges, default=0)} tokens in {len(edges) - 1} steps, the predictor up to "
            f"{edges_tokens[-1]} in {len(edges_tokens) - 1}; run `dvc repro baselines`"
        )
    shape = (len(place), len(edges) - 1)
    for name, values in held.items():
        if values.shape != shape or values.dtype.kind not in "fiu":
            raise ConfigurationError(
                f"{path}: {name} has shape {values.shape} of {values.dtype}, not {shape} of numbers; "
                "run `dvc repro baselines`"
            )
    missing = [row_id for row_id in ids if row_id not in place]
    if missing:
        raise ConfigurationError(
            f"{path} lacks {len(missing)} of {len(ids)} rows ({missing[0]}, ...): it was made for other data; "
            "run `dvc repro baselines`"
        )
    chosen = [place[row_id] for row_id in ids]
    return {name: values[chosen] for name, values in held.items()}
