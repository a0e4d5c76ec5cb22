"""Which layers need more bits: measured once for a model, and shared out under a budget."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Sequence

import attrs

from ..errors import CodecError
from . import _lloyd_max
from ._rotated import TRELLIS_BITS

SIDES = ("keys", "values")
DISTORTION = {2: 0.11748185, 3: 0.03454776, 4: 0.00950101, 5: 0.00250467}
"""What a codebook of so many bits leaves of the energy of normal numbers (Max, 1960)."""

Measure = Callable[[Sequence[str]], float]
"""From the specs of all layers to how far the model is off, a KL divergence."""


@attrs.frozen
class Sensitivity:
    """How far a model is off when the keys, or the values, of one layer alone are encoded.

    Such losses add up over layers and sides (within a few percent on SmolLM2), and each is
    proportional to the error of its codec: so bits can be chosen without another measurement.

    Args:
        keys: the loss of each layer's keys, nats.
        values: of each layer's values.
        bits: those they were measured with.
    """

    keys: tuple[float, ...] = attrs.field(converter=tuple)
    values: tuple[float, ...] = attrs.field(converter=tuple)
    bits: int = attrs.field(default=3, validator=attrs.validators.in_(DISTORTION))

    def __attrs_post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise CodecError(f"{len(self.keys)} layers of keys, {len(self.values)} of values")
        if not all(0 <= loss < float("inf") for loss in (*self.keys, *self.values)):
            raise CodecError("a loss is a number of nats, not negative")

    def loss(self, bits: Sequence[tuple[int, int]]) -> float:
        """What so many bits of keys and values of every layer are expected to cost."""
        losses = zip(self.keys, self.values, bits, strict=True)
        total = sum(a * DISTORTION[k] + b * DISTORTION[v] for a, b, (k, v) in losses)
        return total / DISTORTION[self.bits]

    def bits_for(
        self, budget: float, allowed: Iterable[int] = tuple(DISTORTION)
    ) -> list[tuple[int, int]]:
        """Bits of keys and values for every layer, ``budget`` a number on average at most.

        Each bit goes where it saves most: every further bit of a side saves less, so no other
        choice is expected to cost less but by what is left of the budget.

        Args:
            budget: bits of a number's code, without its share of the scale; keys and values have
                the same width.
            allowed: the numbers of bits to choose from, two and more.

        Raises:
            CodecError: a budget below the fewest bits, or bits without a codebook.
        """
        steps = sorted({*allowed})
        if not steps or not {*steps} <= {*DISTORTION}:
            raise CodecError(f"bits to choose from are {sorted(DISTORTION)}, not {steps}")
        places = [(layer, side) for layer in range(len(self.keys)) for side in SIDES]
        left = budget * len(places) - steps[0] * len(places)
        if left < 0:
            raise CodecError(f"{budget} bits are less than the fewest, {steps[0]}")
        chosen = dict.fromkeys(places, 0)
        waiting = [self._step(place, 0, steps) for place in places] if len(steps) > 1 else []
        heapq.heapify(waiting)
        while waiting:
            _, place = heapq.heappop(waiting)
            at = chosen[place]
            more = steps[at + 1] - steps[at]
            if more > left + 1e-9:
                continue
            left -= more
            chosen[place] = at + 1
            if at + 2 < len(steps):
                heapq.heappush(waiting, self._step(place, at + 1, steps))
        bits = {place: steps[at] for place, at in chosen.items()}
        return [(bits[layer, "keys"], bits[layer, "values"]) for layer in range(len(self.keys))]

    def _step(
        self, place: tuple[int, str], at: int, steps: Sequence[int]
    ) -> tuple[float, tuple[int, str]]:
        """What the next bits of a side save for each of them, negative, and the side."""
        layer, side = place
        saved = DISTORTION[steps[at]] - DISTORTION[steps[at + 1]]
        return -getattr(self, side)[layer] * saved / (steps[at + 1] - steps[at]), place

    def specs(
        self, budget: float, options: str = "-log", allowed: Iterable[int] = tuple(DISTORTION)
    ) -> list[str]:
        """The spec of every layer under a budget, for ``make_prompt_cache``.

        Args:
            budget: as in :meth:`bits_for`.
            options: the part of the specs behind the bits, such as ``"-tcq-log"``; a trellis is
                used where the bits allow it.
            allowed: as there.

        >>> Sensitivity((0.01, 0.001), (0.002, 0.001)).specs(3.5)
        ['rot-k5v3-log', 'rot-k3v3-log']
        """
        chosen = self.bits_for(budget, allowed)
        plain = options.replace("-tcq", "", 1)
        return [f"rot-k{k}v{v}{options if {k, v} & {*TRELLIS_BITS} else plain}" for k, v in chosen]

    def to_json(self) -> str:
        """As text, the inverse of :meth:`from_json`: to be kept beside a model."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sensitivity:
        """What :meth:`to_json` wrote.

        Raises:
            CodecError: text that it did not write.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise CodecError(f"not a sensitivity: {text!r:.80}") from error


def sensitivity(
    measure: Measure, layers: int, *, bits: int = 3, options: str = "-log"
) -> Sensitivity:
    """Measure a model: each layer's keys alone encoded, then each layer's values.

    That takes ``2 * layers`` runs; a few hundred tokens are enough to rank the layers
    (:func:`kvfun.interop.mlx_lm.measure` makes ``measure`` of a model and a text).

    Args:
        measure: the loss of a model whose layers' caches have given specs.
        layers: how many caches the model has.
        bits: of what is encoded; 3 on a model of good quality.
        options: of its codec.

    Raises:
        CodecError: bits without a codebook, no layers, or a loss that is none.

    >>> known = sensitivity(lambda specs: float(specs[0] != "plain"), 2)
    >>> known.keys, known.values
    ((1.0, 0.0), (1.0, 0.0))
    """
    if bits not in _lloyd_max.BITS:
        raise CodecError(f"bits must be one of {_lloyd_max.BITS}, not {bits!r}")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise CodecError(f"layers must be an integer above 0, not {layers!r}")
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES:
        for layer in range(layers):
            specs = ["plain"] * layers
            one = f"rot{bits}{options}"
            specs[layer] = f"{one}-c+plain" if side == "keys" else f"plain+{one}"
            loss = float(measure(specs))
            found[side].append(0.0 if loss < 0 else loss)  # rounding
    return Sensitivity(found["keys"], found["values"], bits)
