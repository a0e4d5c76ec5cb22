"""Scales in one byte each: logarithms, fine near a reference and coarse far from it."""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx

from ._lookup import lookup

FINE = 32
"""Steps an octave near the reference."""

_NEAR = 64
"""Steps on either side of the reference that are fine: two octaves."""

_DOUBLING = 21
"""Further away, so many steps double the distance: 16 octaves are the most."""

_CENTRE = 128


def _octaves(step: int) -> float:
    """The distance of a step from the reference."""
    if step <= _NEAR:
        return step / FINE
    return _NEAR / FINE * 2.0 ** ((step - _NEAR) / _DOUBLING)


@cache
def factors() -> tuple[float, ...]:
    """What each of the 256 codes multiplies the reference by: the first is zero, the last NaN.

    >>> factors()[0], factors()[128], factors()[160]
    (0.0, 1.0, 2.0)
    """
    steps = [code - _CENTRE for code in range(1, 255)]
    powers = [2.0 ** math.copysign(_octaves(abs(step)), step) for step in steps]
    return (0.0, *powers, math.nan)


def encode(scales: mx.array, reference: mx.array | float = 1.0) -> mx.array:
    """The nearest code of each scale, by the logarithm; zero below zero, and NaN if not finite."""
    positive = (scales > 0) & mx.isfinite(scales)
    distance = mx.log2(mx.where(positive, scales / reference, 1.0))
    far = mx.maximum(mx.abs(distance), _NEAR / FINE)
    near = mx.abs(distance) <= _NEAR / FINE
    outer = _NEAR + _DOUBLING * mx.log2(far / (_NEAR / FINE))
    steps = mx.round(mx.where(near, mx.abs(distance) * FINE, outer))
    code = mx.clip(mx.where(distance < 0, _CENTRE - steps, _CENTRE + steps), 1, 254)
    other = mx.where(mx.isfinite(scales), 0.0, 255.0)
    return mx.where(positive, code, other).astype(mx.uint8)


def decode(codes: mx.array, reference: mx.array | float = 1.0) -> mx.array:
    """The scales that codes stand for, float32."""
    return lookup(mx.array(factors()), codes) * reference
