"""What the layers of a loaded model keep, from the arguments it was built with."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError
from ...scheme import Model


def described(model: Any) -> Model:
    """The description of a model that mlx-lm has built.

    Raises:
        ConfigError, UnsupportedError: its arguments tell of no layers that kvfun knows.
    """
    args = getattr(model, "args", getattr(model, "config", None))
    if args is None:
        raise UnsupportedError(f"{type(model).__module__} does not say how it was built")
    config: dict[str, Any] = {"model_type": getattr(model, "model_type", ""), **_plain(args)}
    if type(model).__module__.endswith("bailing_moe_v3"):  # one model_type, two architectures
        config["architectures"] = ["BailingMoeV3ForCausalLM"]
    return Model.from_config(config)


def _plain(value: Any) -> Any:
    """Arguments as dictionaries and lists; what was set on them later is among them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain(vars(value)) if hasattr(value, "__dict__") else value
