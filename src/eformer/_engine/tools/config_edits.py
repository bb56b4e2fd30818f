"""Edit the configuration of a model so that it agrees with exported tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from eformer._engine.record.dtypes import floating_dtype

Config = dict[str, Any]

_QUANTIZED = ("quantization_config", "compression_config")
_TEXT = (
    "text_config",
    "llm_config",
    "language_config",
)  # parts of models of text and images that have the text model
_DTYPES = ("dtype", "torch_dtype")  # since transformers 5, and before


def with_settings(config: Mapping[str, Any], given: Mapping[str, Any]) -> Config:
    """Return a configuration with the caller's settings on top. Objects in it are merged, too."""
    found = dict(config)
    for key, value in given.items():
        inner = found.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        found[key] = with_settings(inner, value) if both else value  # type: ignore[arg-type]
    return found


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting of the text model; None if the configuration does not have it."""
    found = (part.get(key) for part in _text_parts(config))
    return next((value for value in found if value is not None), None)


def with_setting(config: Mapping[str, Any], key: str, value: Any) -> Config:
    """Return the configuration with a setting of the text model, in all of the parts that have it."""
    edited = dict(config)
    inner = {name: dict(config[name]) for name in _TEXT if isinstance(config.get(name), Mapping)}
    having = [part for part in (edited, *inner.values()) if key in part]
    for part in having or [*inner.values(), edited][:1]:
        part[key] = value
    return edited | inner


def _text_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(config[name] for name in _TEXT if isinstance(config.get(name), Mapping))]


def for_export(config: Mapping[str, Any], dtype: str | None) -> Config:
    """Return the configuration of dense weights of a dtype: without quantisation, and with the dtype where it was."""
    edited = {key: _with_dtype(value, dtype) for key, value in config.items() if key not in _QUANTIZED}
    if dtype is None:
        return edited
    return {**edited, **{key: dtype for key in _DTYPES if key in edited}, "dtype": dtype}


def _with_dtype(value: Any, dtype: str | None) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept = {key: inner for key, inner in value.items() if key not in _QUANTIZED}
    return {key: dtype if dtype and key in _DTYPES and inner else inner for key, inner in kept.items()}


def without_dtype(config: Mapping[str, Any]) -> Config:
    """Return a configuration that names no dtype of the weights."""
    found = {key: value for key, value in config.items() if key not in _DTYPES}
    inner = {name: found[name] for name in _TEXT if isinstance(found.get(name), Mapping)}
    return found | {name: {k: v for k, v in part.items() if k not in _DTYPES} for name, part in inner.items()}


def dtype_in(config: Mapping[str, Any]) -> str | None:
    """Return the dtype of the weights that a configuration names; None without one, or with an unknown one."""
    found = (setting(config, key) for key in _DTYPES)
    name = next((value for value in found if isinstance(value, str)), "").removeprefix("torch.")
    with suppress(ValueError):
        return floating_dtype(name)
    return None
