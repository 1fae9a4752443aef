"""Settings of the pipeline: `params.yaml` parsed into frozen dataclasses, strictly.

    python -m pipeline.params use ci|cpu|cpu_full|paper     make that profile the active one (writes params.yaml)
    python -m pipeline.params use paper --tiny              the same settings with tiny models: a dry run
    python -m pipeline.params check                         say whether params.yaml is right

`pipeline/profiles/*.yaml` are complete sets with the reasons for their values; params.yaml is the active one, and what
DVC compares to decide which stages to run. `dvc exp run -S train.epochs=3` changes a single key.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from pipeline.files import SPLITS, run_stage, write_text
from serving_plugin.core.errors import ConfigurationError

PARAMS_FILE = Path("params.yaml")
PROFILES_FOLDER = Path(__file__).parent / "profiles"
PROFILES = ("ci", "cpu", "cpu_full", "paper")


@dataclass(frozen=True, slots=True)
class Within:
    """Limit of a number: `low <= value <= high`."""

    low: float
    high: float | None = None

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, if anything."""
        if value >= self.low and (self.high is None or value <= self.high):
            return None
        return f"must be at least {self.low}" if self.high is None else f"must be from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True, init=False)
class OneOf:
    """Limit of a value to a few."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, if anything."""
        return None if value in self.choices else f"choose one of {', '.join(str(choice) for choice in self.choices)}"


@dataclass(frozen=True, slots=True)
class TargetParams:
    """The LLM whose lengths are predicted. `path`: folder or hub name; null if `pipeline.target` makes the target."""

    name: str
    path: str | None
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")]

    @property
    def location(self) -> str:
        """What transformers and vLLM load."""
        return self.path or f"models/targets/{self.name}"


@dataclass(frozen=True, slots=True)
class ShareParams:
    """Shares of the root conversations; they sum to one."""

    train: Annotated[float, Within(0, 1)]
    validation: Annotated[float, Within(0, 1)]
    calibration: Annotated[float, Within(0, 1)]
    test: Annotated[float, Within(0, 1)]

    def as_dict(self) -> dict[str, float]:
        """Split name -> share, in the order in which the unit interval is cut."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class PrepareParams:
    """Which conversations are used. `split_seed` deals them out; it is not the training's `seed`.

    Conversations with questions whose words (runs of three) have a Jaccard similarity of `near_duplicate_similarity`
    or more stay in one split; questions under `near_duplicate_min_words` words are too common to tell.
    """

    source: str
    split_seed: Annotated[int, Within(0)]
    max_conversations: Annotated[int | None, Within(1)]
    near_duplicate_similarity: Annotated[float, Within(0.3, 1)]
    near_duplicate_min_words: Annotated[int, Within(3)]
    shares: ShareParams


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """Replies of the target by vLLM to conversations of `splits`.

    `num_prompts` 0: none; null: every turn. The first `num_resampled` of them are answered `samples` times, all others
    once: how far two replies to one prompt differ is the ceiling of any prediction.
    """

    splits: tuple[str, ...]
    turns: Annotated[str, OneOf("first", "all")]
    num_prompts: Annotated[int | None, Within(0)]
    num_resampled: Annotated[int, Within(0)]
    samples: Annotated[int, Within(1)]
    temperature: Annotated[float, Within(0, 2)]
    top_p: Annotated[float, Within(0.01, 1)]
    repetition_penalty: Annotated[float, Within(0.5, 2)]
    max_tokens: Annotated[int, Within(1)]
    max_model_len: Annotated[int, Within(16)]
    max_num_seqs: Annotated[int, Within(1)]
    shard_size: Annotated[int, Within(1)]
    tensor_parallel_size: Annotated[int, Within(1)]
    kv_cache_gib: Annotated[int, Within(1)]
    gpu_memory_utilization: Annotated[float, Within(0.05, 1)]


@dataclass(frozen=True, slots=True)
class LabelParams:
    """Where lengths come from: the target's own replies (`generated`) or the data set's (`recorded`)."""

    source: Annotated[str, OneOf("recorded", "generated")]
    granularity_tokens: Annotated[int, OneOf(50, 100, 200, 400)]
    max_length_tokens: Annotated[int, Within(1)]


@dataclass(frozen=True, slots=True)
class InputParams:
    """How a conversation is cut to the model's input, in the backbone's tokens (`encoding.InputRule`)."""

    max_tokens: Annotated[int, Within(8)]
    opening_tokens: Annotated[int, Within(0)]
    reply_tokens: Annotated[int, Within(0)]
    head_share: Annotated[float, Within(0, 1)]


@dataclass(frozen=True, slots=True)
class TrainParams:
    """The predictor. `backbone` is a folder, a hub name, `package:NAME` or `tiny-opt`; null in `max_...`: all.

    The loss is cross-entropy over buckets of `fine_granularity_tokens`, with `label_smoothing_tokens` 0 and
    `expected_value_weight` 0 the paper's. The head is trained alone for `head_epochs` first. `use_features` gives the
    lengths of the conversation so far to the head as numbers. `head_dropout` matters: a few thousand replies are soon
    learnt by heart.
    `dtype` is that of the arithmetic (autocast); weights stay float32.
    """

    backbone: str
    epochs: Annotated[float, Within(0.01)]
    batch_size: Annotated[int, Within(1)]
    learning_rate: Annotated[float, Within(0, 1)]
    head_epochs: Annotated[int, Within(0)]
    head_learning_rate: Annotated[float, Within(0, 1)]
    head_dropout: Annotated[float, Within(0, 0.9)]
    weight_decay: Annotated[float, Within(0, 1)]
    warmup_share: Annotated[float, Within(0, 1)]
    fine_granularity_tokens: Annotated[int, OneOf(25, 50, 100, 200, 400)]
    use_features: bool
    label_smoothing_tokens: Annotated[float, Within(0)]
    expected_value_weight: Annotated[float, Within(0)]
    max_turns_per_conversation: Annotated[int | None, Within(1)]
    max_train_rows: Annotated[int | None, Within(1)]
    max_validation_rows: Annotated[int | None, Within(1)]
    dtype: Annotated[str, OneOf("float32", "bfloat16")]


@dataclass(frozen=True, slots=True)
class CalibrateParams:
    """What is fitted on the calibration split. `prompt_edges_tokens` cut the groups that are calibrated apart.

    `target`: calibrate what serving uses on the target's own replies to that split, if `generate` made enough.
    """

    temperature: bool
    conformal: bool
    target: bool
    prompt_edges_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BaselineParams:
    """What the predictor is compared with. `plain_cross_entropy`: also the paper's model, trained like ours.

    `max_train_rows` null: as many rows as our own model is trained on.
    """

    plain_cross_entropy: bool
    max_train_rows: Annotated[int | None, Within(1)]


@dataclass(frozen=True, slots=True)
class EvaluateParams:
    """Which granularities are reported, where a decode counts as heavy, and the share that intervals should cover."""

    granularities_tokens: tuple[int, ...]
    heavy_over_tokens: Annotated[int, Within(1)]
    coverage: Annotated[float, Within(0.5, 0.999)]
    num_bootstrap: Annotated[int, Within(0)]


@dataclass(frozen=True, slots=True)
class ExportParams:
    """ONNX parity and latency. `tolerance` bounds |probability difference| to torch.

    `int8` serves the model with weights quantised to 8 bits, if its accuracy and coverage on the validation split stay
    within `int8_max_loss` (share of rows) of the float one's; the float model is kept otherwise.
    """

    opset: Annotated[int, Within(17)]
    int8: bool
    int8_max_loss: Annotated[float, Within(0, 1)]
    tolerance: Annotated[float, Within(0, 1)]
    num_latency_runs: Annotated[int, Within(1)]


@dataclass(frozen=True, slots=True)
class RegisterParams:
    """Name and alias in the registry; `allow_worse` makes a model champion that the gate would not."""

    name: str
    alias: str
    allow_worse: bool


@dataclass(frozen=True, slots=True)
class Params:
    """All settings. `profile` names the set they came from; it selects nothing by itself."""

    profile: Annotated[str, OneOf(*PROFILES)]
    seed: Annotated[int, Within(0)]
    target: TargetParams
    prepare: PrepareParams
    generate: GenerateParams
    label: LabelParams
    input: InputParams
    train: TrainParams
    calibrate: CalibrateParams
    baselines: BaselineParams
    evaluate: EvaluateParams
    export: ExportParams
    register: RegisterParams

    def to_plain(self) -> dict[str, Any]:
        """Nested dicts and lists, as YAML holds them."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def load_params(path: Path | None = None) -> Params:
    """Parse and check a params file (default: params.yaml of the working directory).

    Raises:
        ConfigurationError: no such file, not YAML, unknown or missing key, wrong type or value; names key and cure.
    """
    path = PARAMS_FILE if path is None else path
    params = parse_params(_read_yaml(path), str(path))
    for name in PROFILES:
        if name != params.profile and _same_but_profile(params, name):
            raise ConfigurationError(
                f"{path}: profile is {params.profile!r} but every value is that of {name!r}: that key selects "
                f"nothing, run `python -m pipeline.params use {params.profile}`"
            )
    return params


def load_profile(name: str) -> Params:
    """A profile's complete settings."""
    path = _profile_path(name)
    return parse_params(_read_yaml(path), str(path))


def parse_params(plain: Any, where: str) -> Params:
    """Settings from nested dicts; `where` is named in errors."""
    params: Params = _parse(Params, plain, where, "")
    _check_together(params, where)
    return params


def with_tiny_models(params: Params, *, num_prompts: int = 48) -> Params:
    """The same settings with tiny OPT models in place of the named ones, and few prompts: a dry run of a big profile.

    What a small machine cannot hold is cut down with them: tensor parallelism, reply and context length.
    """
    generate, label = params.generate, params.label
    max_tokens = min(generate.max_tokens, 64)
    return dataclasses.replace(
        params,
        target=TargetParams("tiny-opt", None, "float32"),
        prepare=dataclasses.replace(params.prepare, max_conversations=num_prompts),
        generate=dataclasses.replace(
            generate,
            num_prompts=num_prompts if generate.num_prompts is None else min(generate.num_prompts, num_prompts),
            num_resampled=min(generate.num_resampled, 4),
            max_tokens=max_tokens,
            max_model_len=min(generate.max_model_len, 2048),
            max_num_seqs=min(generate.max_num_seqs, 32),
            shard_size=min(generate.shard_size, max(1, num_prompts // 2)),
            tensor_parallel_size=1,
            kv_cache_gib=1,
        ),
        label=dataclasses.replace(label, max_length_tokens=max_tokens) if label.source == "generated" else label,
        train=dataclasses.replace(params.train, backbone="tiny-opt", epochs=1.0),
        register=dataclasses.replace(params.register, allow_worse=True),
    )


def use_profile(name: str, *, tiny: bool = False, path: Path | None = None, **changes: Any) -> Params:
    """Write params.yaml from a profile, comments included; `changes` maps dotted keys to other values."""
    path = PARAMS_FILE if path is None else path
    params = load_profile(name)
    if not tiny and not changes:
        write_text(path, _profile_path(name).read_text(encoding="utf-8"))
        return params
    plain = (with_tiny_models(params) if tiny else params).to_plain()
    for key, value in changes.items():
        _set(plain, key, value)
    params = parse_params(plain, str(path))
    write_text(path, f"# Made from pipeline/profiles/{name}.yaml\n" + yaml.safe_dump(plain, sort_keys=False))
    return params


def _profile_path(name: str) -> Path:
    if name not in PROFILES:
        raise ConfigurationError(f"unknown profile {name!r}: choose one of {', '.join(PROFILES)}")
    return PROFILES_FOLDER / f"{name}.yaml"


def _read_yaml(path: Path) -> Any:
    if not path.is_file():
        raise ConfigurationError(f"{path} is missing: run `python -m pipeline.params use cpu` in the checkout")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigurationError(
            f"{path} is not YAML ({problem}): correct it or run `python -m pipeline.params use cpu`"
        ) from error


def _same_but_profile(params: Params, name: str) -> bool:
    return dataclasses.replace(load_profile(name), profile=params.profile) == params


def _parse(kind: Any, plain: Any, where: str, prefix: str) -> Any:
    """A dataclass from a mapping with exactly its fields."""
    if not isinstance(plain, Mapping):
        raise ConfigurationError(f"{where}: {prefix.rstrip('.') or 'the file'} is {plain!r}, expected keys with values")
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [f.name for f in dataclasses.fields(kind)]
    for key in plain:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ConfigurationError(f"{where}: unknown key {prefix}{key}: {hint}known here: {', '.join(fields)}")
    values = {}
    for name in fields:
        key = prefix + name
        if name not in plain:
            raise ConfigurationError(
                f"{where}: key {key} is missing: add it (known here: {', '.join(fields)}; "
                f"values in pipeline/profiles/cpu.yaml show its form)"
            )
        values[name] = _value(hints[name], plain[name], where, key)
    return kind(**values)


def _value(hint: Any, value: Any, where: str, key: str) -> Any:
    if typing.get_origin(hint) is Annotated:
        base, limit = typing.get_args(hint)
        value = _value(base, value, where, key)
        problem = None if value is None else limit.problem(value)
        if problem is not None:
            raise ConfigurationError(f"{where}: {key} is {value!r}: {problem}")
        return value
    if dataclasses.is_dataclass(hint):
        return _parse(hint, value, where, f"{key}.")
    optional = isinstance(hint, types.UnionType)
    kinds = typing.get_args(hint) if optional else (hint,)
    if optional and value is None:
        return None
    kind = kinds[0]
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        if isinstance(value, list | tuple) and value and all(type(item) is item_kind for item in value):
            return tuple(value)
        example = "[100, 200]" if item_kind is int else "[train, test]"
        raise ConfigurationError(f"{where}: {key} is {value!r}, expected a list such as {example}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    hint_float = " (write 1.0e-5: YAML 1.1 reads 1e-5 as text)" if kind is float and type(value) is str else ""
    raise ConfigurationError(
        f"{where}: {key} is {value!r}, expected {words[kind]}{' or null' if optional else ''}{hint_float}"
    )


def _check_together(params: Params, where: str) -> None:
    """Rules that bind two keys."""
    generate, label, train = params.generate, params.label, params.train
    prepare, evaluate = params.prepare, params.evaluate
    total = sum(prepare.shares.as_dict().values())
    widths = evaluate.granularities_tokens
    unknown = [name for name in generate.splits if name not in SPLITS]
    rules = [
        (not unknown, f"generate.splits names {', '.join(unknown)}: known are {', '.join(SPLITS)}"),
        (
            label.source != "generated" or set(generate.splits) == set(SPLITS),
            f"label.source is 'generated' but generate.splits lacks some of {', '.join(SPLITS)}: name them all",
        ),
        (
            all(width > 0 and width % train.fine_granularity_tokens == 0 for width in widths),
            f"evaluate.granularities_tokens {list(widths)} must be multiples of train.fine_granularity_tokens "
            f"{train.fine_granularity_tokens}",
        ),
        (abs(total - 1.0) < 1e-6, f"prepare.shares sum to {total:g}, must sum to 1"),
        (
            generate.max_tokens < generate.max_model_len,
            f"generate.max_tokens {generate.max_tokens} leaves no room for a prompt in generate.max_model_len "
            f"{generate.max_model_len}: lower the first or raise the second",
        ),
        (
            label.source != "generated" or generate.num_prompts != 0,
            "label.source is 'generated' but generate.num_prompts is 0: generate some or label 'recorded'",
        ),
        (
            params.input.opening_tokens + params.input.reply_tokens + 8 <= params.input.max_tokens,
            f"input.opening_tokens {params.input.opening_tokens} and input.reply_tokens {params.input.reply_tokens} "
            f"leave less than 8 of input.max_tokens {params.input.max_tokens} for the last message",
        ),
        (
            list(params.calibrate.prompt_edges_tokens) == sorted(set(params.calibrate.prompt_edges_tokens)),
            f"calibrate.prompt_edges_tokens {list(params.calibrate.prompt_edges_tokens)} must rise",
        ),
        (
            label.granularity_tokens % train.fine_granularity_tokens == 0,
            f"train.fine_granularity_tokens {train.fine_granularity_tokens} must divide label.granularity_tokens "
            f"{label.granularity_tokens}",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigurationError(f"{where}: {message}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _set(plain: dict[str, Any], dotted_key: str, value: Any) -> None:
    *sections, key = dotted_key.split(".")
    for section in sections:
        plain = plain[section]
    plain[key] = value


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.params", description="Choose or check the pipeline's settings."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    use = commands.add_parser("use", help="write params.yaml from a profile")
    use.add_argument("profile", metavar="PROFILE", help=f"one of {', '.join(PROFILES)}")
    use.add_argument("--tiny", action="store_true", help="tiny models in place of the named ones: a dry run")
    commands.add_parser("check", help="check params.yaml")
    options = parser.parse_args(arguments)
    if options.command == "use":
        use_profile(options.profile, tiny=options.tiny)
        print(f"params.yaml holds profile {options.profile}{' (tiny models)' if options.tiny else ''}: run `dvc repro`")
    else:
        params = load_params()
        print(f"params.yaml is right (profile {params.profile})")


if __name__ == "__main__":
    run_stage(main)
