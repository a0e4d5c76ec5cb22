"""What each layer of a model comes to store under a scheme, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from ..codecs import Codec
from ..errors import CodecError, SpecError
from ._kinds import FULL, RECURRENT, SLIDING
from ._model import Layer, Model

if TYPE_CHECKING:
    from ._scheme import KvScheme

RAW = "bf16"


@attrs.frozen
class Assignment:
    """What one layer stores.

    Args:
        index: the layer.
        layer: what it keeps.
        spec: the codec of its keys and values; ``None`` where it has none of its own.
        reason: why that is not what the scheme has for it; empty where it is.
    """

    index: int
    layer: Layer
    spec: str | None
    reason: str = ""

    @property
    def affected(self) -> bool:
        """Whether the scheme changes what the layer would store anyway."""
        return self.spec not in (None, RAW)

    @property
    def kind(self) -> str:
        """The kind of attention, with its bound, and a state beside it."""
        layer, stream = self.layer, self.layer.stream
        name = layer.kind
        if stream is not None and stream.window is not None:
            newest = "window" if layer.kind == SLIDING else "the newest"
            name += f", {newest} {stream.window:,}"
        if stream is not None and stream.chunk is not None:
            name += f", chunk {stream.chunk:,}"
        if stream is not None and stream.sinks:
            name += f" and {stream.sinks} sinks"
        if layer.state is not None and layer.kind != RECURRENT:
            name += " and a recurrent state"
        return name


def assigned(scheme: KvScheme, model: Model) -> tuple[Assignment, ...]:
    """As :meth:`KvScheme.assigned` says."""
    listed = dict(scheme.layers)
    beyond = [index for index in listed if index >= len(model.layers)]
    if beyond:
        raise SpecError(f"the scheme lists layer {beyond[0]}, the model has {len(model.layers)}")
    found = [_of_layer(scheme, listed, i, layer) for i, layer in enumerate(model.layers)]
    wanted = [spec for spec in scheme.specs if spec != RAW]
    storing = [each for each in found if each.spec is not None]
    if wanted and storing and not any(each.affected for each in found):
        reasons = "; ".join(dict.fromkeys(each.reason for each in storing))
        raise CodecError(f"{scheme.cache_key} affects no layer of the model: {reasons}")
    return tuple(found)


def _of_layer(scheme: KvScheme, listed: dict[int, str], index: int, layer: Layer) -> Assignment:
    if layer.donor is not None:
        return Assignment(index, layer, None, f"reads what layer {layer.donor} stores")
    if not layer.streams:
        why = "its state is kept as it is" if layer.state is not None else "it stores nothing"
        return Assignment(index, layer, None, why)
    spec = listed.get(index) if scheme.spec is None else scheme.spec
    if spec is None:
        return Assignment(index, layer, RAW, "not listed")
    if scheme.kind == "turbo" and layer.kind != FULL:
        return Assignment(index, layer, RAW, f"turbo is for full attention, not {layer.kind}")
    codec = Codec.of(spec)
    try:
        for stream in layer.streams:
            if not stream.index:
                codec.keys.check(stream.head_dim)
                codec.values.check(stream.value_dim)
    except CodecError as error:
        if scheme.spec is None:
            raise CodecError(f"layer {index}: {error}") from error
        return Assignment(index, layer, RAW, str(error))
    return Assignment(index, layer, spec)


def described(scheme: KvScheme, found: Sequence[Assignment]) -> str:
    """Equal neighbours on one line, under the scheme's name."""
    lines: list[tuple[list[int], str]] = []
    for each in found:
        text = f"({each.kind}): {each.spec or 'nothing of its own'}"
        text += f", {each.reason}" if each.reason else ""
        if lines and lines[-1][1] == text and lines[-1][0][-1] == each.index - 1:
            lines[-1][0].append(each.index)
        else:
            lines.append(([each.index], text))
    head = (
        scheme.label if scheme.label == scheme.cache_key else f"{scheme.label} ({scheme.cache_key})"
    )
    return "\n".join([head, *[f"{_span(indices)} {text}" for indices, text in lines]])


def _span(indices: Sequence[int]) -> str:
    return f"layer {indices[0]}" if len(indices) == 1 else f"layers {indices[0]}-{indices[-1]}"
