"""Rotated vectors in the codebook of normally distributed numbers: TurboQuant at its best."""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import mlx.core as mx
from jaxtyping import Float

from ..errors import CodecError
from ..planes import Planes
from ..record import record, replace, static
from . import _lloyd_max, _log_scale, _packing, _statistics, _trellis
from ._hadamard import hadamard, hadamard_inverse, hadamard_order, signs
from ._lookup import lookup, rank
from ._plain import LARGEST_HALF

FITS = ("unbiased", "ls", "norm", "rms")
"""How the scale of a vector is chosen when its codes are."""

SEARCHES = (1, 5, 17)
"""How many scales may be tried for each vector."""

TRELLIS_BITS = (2, 3)

STATISTICS = ("ldlq", "bal")
"""What a codec of keys may need to know of a prompt's queries."""

_SHORT_FITS = {"ls": "-ls", "norm": "-norm", "rms": "-rms", "unbiased": ""}
_HUGE = 1e15
_TRELLIS_SCALES = (0.92, 1.0, 1.08)


@record
class Rotated:
    """``bits`` a number of a vector that a random rotation makes normally distributed.

    A vector is rotated (signs and a Hadamard matrix, orthogonal), divided by a scale and rounded to
    the Lloyd-Max codebook. Its planes are those of :mod:`kvfun.codecs._packing` (or of a trellis),
    and one scale a group of ``group_size`` numbers, by default a vector.

    Nothing needs a look at the data. What a cache learns from its first tokens or from a prompt is
    in the arrays: ``reference`` (typical scales, for scales of one byte), ``basis`` (a matrix in
    place of the rotation that makes errors small where queries look, see :func:`kvfun.calibrate`)
    and ``feedback`` (rounding that lets later numbers of a vector make up for earlier ones' errors,
    which only the encoder knows of).

    A vector with a number that is not finite comes back as NaN, whatever else it holds, and no
    other does.

    Args:
        bits: 2, 3, 4 or 5; of a trellis 2 or 3.
        group_size: numbers that share a scale, a multiple of 16; a whole vector by default.
        search: scales tried for a vector: 1, 5 or 17, between 0.8 and 1.2 of its RMS
            (0.88 and 1.12 of 5).
        fit: ``"unbiased"`` makes ``<x, decoded> = <x, x>``, so that means of many vectors do not
            shrink; ``"ls"`` has the least error; ``"norm"`` keeps the norm; ``"rms"`` is plain
            TurboQuant's.
        log_scale: scales of 8 bits instead of 16: logarithms, with 32 steps an octave.
        trellis: choose the codes of a whole vector together, on a trellis of 256 states.
        statistics: of a prompt, which :func:`kvfun.calibrate` takes: ``"ldlq"`` for ``feedback``,
            ``"bal"`` for a ``basis``.
        seed: of the signs.
        frozen: what it is to know was given, and is not learnt.

    Raises:
        CodecError: an argument out of range.

    References:
        Zandieh et al., *TurboQuant*, 2025. Max, *Quantizing for Minimum Distortion*, 1960.

    >>> Rotated(4).vector_nbytes(128, mx.bfloat16), Rotated(4, log_scale=True).spec
    (66, 'rot4-log')
    """

    bits: int = static()
    group_size: int | None = static(default=None)
    search: int = static(default=17)
    fit: str = static(default="unbiased")
    log_scale: bool = static(default=False)
    trellis: bool = static(default=False)
    statistics: str | None = static(default=None)
    seed: int = static(default=42)
    frozen: bool = static(default=False)
    reference: mx.array | None = None
    """``[batch, heads, 1, 1]``: scales are relative to it."""
    basis: tuple[mx.array, mx.array] | None = None
    """``[batch, heads, dim, dim]`` twice: vectors times the first have the products of the
    originals with queries times the second."""
    feedback: tuple[mx.array, mx.array] | None = None
    """``[batch, heads, dim, dim]`` twice: what errors do to the targets of later numbers, and what
    they cost."""

    per_row = ("reference", "basis", "feedback")

    def __attrs_post_init__(self) -> None:
        _one_of("bits", self.bits, TRELLIS_BITS if self.trellis else _lloyd_max.BITS)
        _one_of("search", self.search, SEARCHES)
        _one_of("fit", self.fit, FITS)
        if type(self.seed) is not int or not 0 < self.seed < 10_000:
            raise CodecError(f"seed must be an integer from 1 to 9999, not {self.seed!r}")
        if self.group_size is not None:
            good = type(self.group_size) is int and self.group_size > 0 and not self.group_size % 16
            if not good:
                raise CodecError(f"group_size must be a multiple of 16, not {self.group_size!r}")
            if self.trellis or self.statistics:
                raise CodecError(
                    f"{'a trellis' if self.trellis else self.statistics} runs along a whole vector:"
                    " there are no groups in it"
                )
        if self.statistics is not None:
            _one_of("statistics", self.statistics, STATISTICS)
            if self.trellis and self.statistics == "ldlq":
                raise CodecError("ldlq rounds number by number: there is none on a trellis")

    # -- what it is -------------------------------------------------------------------------------

    @property
    def options(self) -> str:
        """The part of the spec behind the bits."""
        return "".join(
            [
                f"-g{self.group_size}" if self.group_size else "",
                "-tcq" if self.trellis else "",
                f"-{self.statistics}" if self.statistics else "",
                "-log" if self.log_scale else "",
                f"-s{self.search}" if self.search != 17 else "",
                _SHORT_FITS[self.fit],
                f"-seed{self.seed}" if self.seed != 42 else "",
            ]
        )

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        return f"rot{self.bits}{self.options}"

    def check(self, head_dim: int) -> None:
        """Raise ``CodecError`` where vectors of ``head_dim`` cannot be rotated or packed."""
        group = self.group_size or head_dim
        try:
            hadamard_order(head_dim)
        except CodecError as error:
            raise CodecError(f"{self.spec}: {error}") from error
        if head_dim % _packing.MULTIPLE:
            raise CodecError(
                f"{self.spec}: head_dim must be a multiple of {_packing.MULTIPLE}, not {head_dim}"
            )
        if head_dim % group:
            raise CodecError(
                f"{self.spec}: head_dim {head_dim} is no multiple of the group size {group}"
            )
        if self.trellis and head_dim * self.bits % 32:
            raise CodecError(f"{self.spec}: a trellis of {head_dim} numbers fills no whole words")
        self._check_statistics(head_dim)

    def _check_statistics(self, head_dim: int) -> None:
        needed = {"ldlq": "feedback", "bal": "basis"}.get(self.statistics or "")
        for name in ("basis", "feedback"):
            arrays = getattr(self, name)
            if arrays is None and name == needed:
                raise CodecError(
                    f"{self.spec} has to know a prompt's queries: read the prompt into another "
                    "cache, then kvfun.calibrate(cache, queries, spec)"
                )
            if arrays is not None and (
                name != needed
                or any(x.ndim != 4 or x.shape[-2:] != (head_dim, head_dim) for x in arrays)
            ):
                shapes = ", ".join(str(x.shape) for x in arrays)
                raise CodecError(f"{self.spec}: no {name} of {shapes} for a head_dim of {head_dim}")

    def width(self, head_dim: int) -> int:
        """Numbers stored for a vector of ``head_dim``: all, and no more."""
        return head_dim

    def vector_nbytes(self, head_dim: int, dtype: mx.Dtype) -> int:
        """Exact bytes of one vector of one head, scales included; ``dtype`` does not matter."""
        groups = head_dim // (self.group_size or head_dim)
        return head_dim * self.bits // 8 + groups * (1 if self.log_scale else 2)

    # -- coordinates ------------------------------------------------------------------------------

    def enter(self, x: Float[mx.array, "batch heads tokens dim"]) -> mx.array:
        """Vectors in the coordinates they are stored in, float32."""
        x = x.astype(mx.float32)
        if self.basis is not None:
            return _statistics.times(x, self.basis[0])
        return hadamard(x * _signs(x.shape[-1], self.seed))

    def enter_queries(self, x: Float[mx.array, "batch heads queries dim"]) -> mx.array:
        """Queries, by KV head, whose products with stored keys are those with the originals."""
        return self.enter(x) if self.basis is None else x @ self.basis[1].astype(x.dtype)

    def leave_queries(self, x: Float[mx.array, "batch heads queries dim"]) -> mx.array:
        """The inverse of :meth:`enter_queries`: the transpose of what keys are multiplied by."""
        return self.leave(x) if self.basis is None else x @ self.basis[0].swapaxes(-1, -2)

    def leave(self, x: Float[mx.array, "batch heads tokens dim"]) -> mx.array:
        """The inverse of :meth:`enter`."""
        x = x.astype(mx.float32)
        if self.basis is not None:
            return x @ self.basis[1].swapaxes(-1, -2)
        return hadamard_inverse(x) * _signs(x.shape[-1], self.seed)

    # -- encode -----------------------------------------------------------------------------------

    def encode(
        self, x: Float[mx.array, "batch heads tokens head_dim"], positions: object = None
    ) -> Planes:
        """Codes and scales."""
        return self._encoded(self.enter(_bounded(x)), x.shape[-1])

    def _encoded(self, y: mx.array, dim: int) -> Planes:
        group = self.group_size or dim
        y = y.reshape(*y.shape[:-1], dim // group, group)
        energy = mx.sum(y * y, axis=-1, keepdims=True)
        rms = mx.sqrt(energy / group)
        safe = mx.where((rms > 0) & mx.isfinite(rms), rms, 1.0)
        if self.feedback is not None:
            codes, scale = self._with_feedback(y, safe)
        elif self.trellis:
            codes, scale = self._on_trellis(y, energy, safe)
        else:
            codes, scale = self._rounded(y, energy, safe)
        scale = mx.where(mx.isfinite(energy), scale, mx.nan)
        scale = mx.where(energy > 0, scale, mx.where(energy == 0, 0.0, scale))
        return (*codes, self._stored_scale(scale.squeeze(-1)))

    def _stored_scale(self, scale: mx.array) -> mx.array:
        if self.log_scale:
            return _log_scale.encode(scale, self._reference)
        return mx.minimum(scale, LARGEST_HALF).astype(mx.float16)

    @property
    def _reference(self) -> mx.array | float:
        return 1.0 if self.reference is None else self.reference

    def _scales(self, stored: mx.array) -> mx.array:
        if self.log_scale:
            return _log_scale.decode(stored, self._reference)
        return stored.astype(mx.float32)

    def _rounded(self, y: mx.array, energy: mx.array, rms: mx.array) -> tuple[Planes, mx.array]:
        """The codes whose direction is nearest, of those of several scales."""
        unit, table = mx.abs(y) / rms, mx.array(_lloyd_max.magnitudes(self.bits))
        best, score = mx.ones_like(rms), None
        for factor in _searched(self.search) if self.search > 1 else ():
            tried = lookup(table, _index(unit, factor, self.bits))
            along = mx.sum(unit * tried, axis=-1, keepdims=True)
            found = along * along / mx.sum(tried * tried, axis=-1, keepdims=True)
            wins = found > (-1.0 if score is None else score)
            best = mx.where(wins, factor, best)
            score = found if score is None else mx.maximum(found, score)
        index = _index(unit, best, self.bits)
        flat, negative = self._flat(index, y < 0)
        codes = _packing.pack(flat, negative, self.bits)
        return codes, self._fitted(mx.abs(y), lookup(table, index), energy, rms)

    def _flat(self, *arrays: mx.array) -> list[mx.array]:
        return [x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) for x in arrays]

    def _fitted(self, y: mx.array, chosen: mx.array, energy: mx.array, rms: mx.array) -> mx.array:
        """The scale for codes that stand for ``chosen``."""
        if self.fit == "rms":
            return rms
        along = mx.sum(y * chosen, axis=-1, keepdims=True)
        if self.fit == "unbiased":
            return energy / mx.where(along > 0, along, 1.0)
        norm = mx.sum(chosen * chosen, axis=-1, keepdims=True)
        return along / norm if self.fit == "ls" else mx.sqrt(energy / norm)

    def _on_trellis(self, y: mx.array, energy: mx.array, rms: mx.array) -> tuple[Planes, mx.array]:
        """The path that is nearest in direction, of those of three scales."""
        (y,), energy, rms = self._flat(y), energy.squeeze(-1), rms.squeeze(-1)
        scales = mx.array(_TRELLIS_SCALES if self.search > 1 else (1.0,))
        unit = y / rms
        codes = _trellis.encode(unit / scales.reshape(-1, *[1] * y.ndim), self.bits)
        tried = _trellis.decode(codes, self.bits, y.shape[-1])
        along = mx.sum(unit * tried, axis=-1, keepdims=True)
        found = along * mx.abs(along) / mx.sum(tried * tried, axis=-1, keepdims=True)
        _, codes, tried = reduce(_better, zip(found, codes, tried, strict=True))
        return (codes,), self._fitted(y, tried, energy, rms)[..., None]

    def _with_feedback(self, y: mx.array, rms: mx.array) -> tuple[Planes, mx.array]:
        """Rounded one number after another, by the scale with the least cost."""
        assert self.feedback is not None
        lower, metric = self.feedback
        (y,), rms = self._flat(y), rms.squeeze(-1)
        scales = mx.stack([rms * factor for factor in _searched(self.search)])
        scales = self._scales(self._stored_scale(scales))  # codes that fit what is stored
        each, table = scales.squeeze(-1), mx.array(_lloyd_max.magnitudes(self.bits))

        def nearest(targets: mx.array) -> mx.array:
            size = lookup(table, _index(mx.abs(targets), each, self.bits))
            return mx.where(targets < 0, -size, size) * each

        tried = _statistics.round_with_feedback(
            mx.broadcast_to(y, (*scales.shape[:-1], y.shape[-1])), lower, nearest
        )
        cost = _statistics.cost(tried - y, metric)
        index = mx.argmin(cost, axis=0)[None, ..., None]
        chosen = mx.take_along_axis(tried, index, axis=0)[0]
        scale = mx.take_along_axis(scales, index, axis=0)[0]
        size = mx.abs(chosen)
        codes = _packing.pack(_index(size, scale, self.bits), chosen < 0, self.bits)
        return codes, scale[..., None]

    # -- decode -----------------------------------------------------------------------------------

    def decode(self, planes: Planes) -> mx.array:
        """The numbers the planes stand for, float32 ``[batch, heads, tokens, head_dim]``."""
        return self.leave(self.decode_stored(planes))

    def decode_stored(self, planes: Planes) -> mx.array:
        """The same in the coordinates that they are stored in."""
        numbers, scales = self.codes_and_scales(planes)
        groups = scales.shape[-1]
        if groups == 1:
            return numbers * scales
        group = numbers.shape[-1] // groups
        parts = numbers.reshape(*numbers.shape[:-1], groups, group) * scales[..., None]
        return parts.reshape(numbers.shape)

    def codes_and_scales(self, planes: Planes) -> tuple[mx.array, mx.array]:
        """What codes stand for but for a scale a group, and those scales, both float32."""
        *codes, stored = planes
        if self.trellis:
            dim = codes[0].shape[-1] * 32 // self.bits
            return _trellis.decode(codes[0], self.bits, dim), self._scales(stored)
        numbers = _packing.unpack(tuple(codes), self.bits, _lloyd_max.integers(self.bits))
        return numbers.astype(mx.float32), self._scales(stored) * _lloyd_max.STEP

    # -- what it learns ---------------------------------------------------------------------------

    def calibrated(self, x: mx.array, valid: mx.array) -> Rotated:
        """With the typical scale of vectors as reference, where scales are relative to one.

        Args:
            x: ``[batch, heads, tokens, dim]``.
            valid: bool ``[batch, 1, tokens, 1]``: which of them count.
        """
        if not self.log_scale or self.frozen:
            return self
        y = self.enter(x)
        power = mx.mean(y * y, axis=-1, keepdims=True)
        counts = valid & (power > 0) & mx.isfinite(power)
        octaves = mx.where(counts, 0.5 * mx.log2(mx.where(counts, power, 1.0)), 0.0)
        total = mx.sum(counts.astype(mx.float32), axis=2, keepdims=True)
        mean = mx.sum(octaves, axis=2, keepdims=True) / mx.maximum(total, 1.0)
        return replace(self, reference=mx.power(2.0, mean))


def _bounded(x: mx.array) -> mx.array:
    """Huge numbers cut off, so that their squares can be summed; NaN where one is not finite."""
    x = x.astype(mx.float32)
    return mx.where(mx.isfinite(x), mx.clip(x, -_HUGE, _HUGE), mx.nan)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if type(value) not in (int, str) or value not in allowed:
        raise CodecError(f"{name} must be one of {allowed}, not {value!r}")


@cache
def _searched(count: int) -> tuple[float, ...]:
    """The scales that are tried, relative to the RMS."""
    if count == 1:
        return (1.0,)
    spread = 0.12 if count == 5 else 0.2
    return tuple([1 + spread * (2 * i / (count - 1) - 1) for i in range(count)])


def _better(one: tuple[mx.array, ...], other: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """The better of two choices for each vector, whose first array says how good it is."""
    wins = other[0] > one[0]
    return tuple([mx.where(wins, b, a) for a, b in zip(one, other, strict=True)])


def _index(size: mx.array, scale: mx.array | float, bits: int) -> mx.array:
    """Which magnitude of the codebook times the scale is nearest, ``uint8``; midway the smaller."""
    return rank(size, [boundary * scale for boundary in _lloyd_max.boundaries(bits)])


def _signs(dim: int, seed: int) -> mx.array:
    return mx.array(signs(dim, seed), dtype=mx.float32)
