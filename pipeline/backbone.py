"""Where the predictor's backbone comes from, and how a checkpoint is loaded: float32, a padding token that is known."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.target import TINY_OPT, make_target
from serving_plugin.core.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PACKAGE = "package:"
# Random numbers for attention's dropout and the slower kernel that it needs are a tenth of a training step on a CPU,
# and gain nothing (MiniLM, 4,000 rows, 2 epochs, validation: NLL 2.502 without, 2.504 with). Other dropout stays.
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout")


def find_backbone(name: str, scratch: Path, texts: Iterable[str], seed: int) -> str:
    """Where transformers finds backbone `name`.

    `package:NAME` is the model folder inside an installed package, `tiny-opt` is made on the spot in `scratch` (its
    tokenizer trained on `texts`), anything else is a folder or hub name.

    Raises:
        ConfigurationError: the package is missing or holds no model.
    """
    if name.startswith(_PACKAGE):
        return str(_packaged_model(name.removeprefix(_PACKAGE)))
    if name == TINY_OPT:
        return str(make_target(TINY_OPT, scratch / TINY_OPT, texts=texts, seed=seed))
    return name


def _packaged_model(package: str) -> Path:
    """The folder with `config.json` inside a package, which is found without being imported."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"package {package!r} of train.backbone is not installed: pip install {package}")
    configs = sorted(Path(spec.origin).parent.glob("**/config.json"), key=lambda path: len(path.parts))
    for config in configs:
        if "model_type" in json.loads(config.read_text(encoding="utf-8")):  # 1_Pooling/config.json has none
            return config.parent
    raise ConfigurationError(f"package {package!r} of train.backbone holds no model folder; correct train.backbone")


def load_tokenizer(path: str) -> Tokenizer:
    """The backbone's tokenizer as the `tokenizers` library's object: the one that serving will read.

    Raises:
        ConfigurationError: there is none at `path`.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path).backend_tokenizer
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no tokenizer for backbone {path!r} ({_first_line(error)}); correct train.backbone"
        ) from None


def load_backbone(path: str) -> Any:
    """The pretrained model without a head, in float32 (a checkpoint's own dtype may be float16), in evaluation mode.

    Raises:
        ConfigurationError: no model at `path`, or one without a padding token.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(path)
        # BERT's pooling layer is trained for another task, and would be one more thing to export
        without_pooler = {"add_pooling_layer": False} if config.model_type in ("bert", "roberta") else {}
        without_dropout = {name: 0.0 for name in _ATTENTION_DROPOUT if hasattr(config, name)}
        model = AutoModel.from_pretrained(path, dtype=torch.float32, **without_pooler, **without_dropout)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no backbone at {path!r} ({_first_line(error)}); correct train.backbone") from None
    if model.config.pad_token_id is None:
        raise ConfigurationError(f"backbone {path!r} has no pad_token_id to fill batches with; take another")
    return model.eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
