"""Which served model a predictor was trained for."""

from __future__ import annotations


def target_name(model: str) -> str:
    """Last path component of a model's name or folder: `org/Name`, `/models/Name/` and `Name` are one target."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def same_target(a: str, b: str) -> bool:
    """Whether two model names mean the same target LLM; an empty name matches nothing."""
    return bool(target_name(a)) and target_name(a) == target_name(b)
