"""The box that mlx-lm's models hold: one cache value, replaced at every step."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

from ... import caches as verbs
from ... import planes as p
from ... import storage, tree
from ...caches import KV, Chain, Delayed, Rebased
from ...codecs import Affine, Rope
from ...errors import CorruptError
from ...geometry import Geometry, Mask, Segments, mask_array
from ...record import replace
from ._attention import is_routed
from ._handed import Handed, remember

OLD_PROTOCOL = hasattr(mlx_lm_cache._BaseCache, "meta_state")
"""Up to mlx-lm 0.32.0 a cache's state is arrays, and its scalars are strings beside them."""

PACKED, DECODED = "packed", "decoded"


class KVFunCache:
    """One layer's cache, as mlx-lm's models, generators and prompt caches expect it.

    It holds one value, ``record``; everything else is derived from it. There is deliberately no
    ``to_quantized`` (the codec was chosen when the cache was made), no ``merge`` (batches of
    shells are not there yet) and, unless ``packed``, no ``bits``: their presence changes what
    mlx-lm does.

    Args:
        record: the cache.
        packed: hand out ``mx.quantize`` triples, which mlx-lm's quantized attention reads; only
            where keys and values are affine with the same bits and group size.
        exact: hand out visible columns only. Otherwise the read is one slice, which costs no copy,
            and the mask hides what lies between sinks and window: for models that ask for the
            mask of a single token too.
    """

    routed = True
    """Whether attention may read encoded what is handed out, within :func:`attention`."""

    def __init__(
        self, record: KV | Chain | Delayed | Rebased, packed: bool = False, exact: bool = True
    ):
        self.record = record
        self.exact = exact
        self.rope: Rope | None = None
        """The rotation that the model's keys go through, where it is known."""
        self.block = 1
        """Tokens of the last append: what a model attends with right afterwards."""
        if packed:
            codec = record.codec.keys
            assert can_be_packed(record)
            assert isinstance(codec, Affine)
            self.bits, self.group_size = codec.bits, codec.group_size

    # -- reading and writing ------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Append a block; return what attention reads, for all of the block's queries."""
        self.record = verbs.append(self.record, keys, values)
        self.block = keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self):
        """What the last block's queries read: arrays, or triples of arrays where packed."""
        record: Any = self.record
        columns = self.columns(record.geometry, self.block)
        if not hasattr(self, "bits"):
            keys, values = verbs.fetch_columns(record, columns)
        else:
            keys, values = p.read(record.keys, columns), p.read(record.values, columns)
        if isinstance(record, Rebased) and self.block > 1 and not is_routed():
            verbs.fetch(record, queries=self.block)  # raises where keys cannot say it
        if self.routed:
            remember(keys, values, Handed(record, columns, self.block))
        return keys, values

    def columns(self, geometry: Geometry | Segments, queries: int) -> Any:
        """The columns that the last ``queries`` tokens are handed."""
        return geometry.spans(queries) if self.exact else geometry.cover(queries)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next ``N`` tokens over what :meth:`update_and_fetch` will return.

        Args:
            N: how many tokens come next.
            return_array: an array even where ``"causal"`` would do.
            window_size: a window of the caller's that is narrower than the cache's own.
        """
        _, geometry = self.record.geometry.advance(N)
        spans = self.columns(geometry, N)
        mask = geometry.mask(N, spans)
        if window_size is not None:
            mask = _narrowed(geometry, mask, N, spans, window_size)
        if mask is None or (mask == "causal" and not return_array):
            return mask
        array = mask_array(mask, queries=N, columns=geometry.width(spans))
        # deepseek_v32 wants four axes of a single token's mask; everybody takes them.
        return array[None, None] if N == 1 and array is not None and array.ndim == 2 else array

    # -- position and size ----------------------------------------------------------------------

    @property
    def offset(self):
        """Tokens seen, the next one's RoPE position: int, or ``int32 [batch]`` if rows differ."""
        rows = self.record.geometry.rows
        if len(rows) == 1:
            return rows[0].offset
        return mx.array([row.offset for row in rows], dtype=mx.int32)

    @property
    def start_position(self) -> int:
        """The first position that the next block reads (chunked attention masks count from it)."""
        geometry = self.record.geometry
        return min(geometry.policy.lowest(row.offset) for row in geometry.rows)

    def maybe_trim_front(self) -> None:
        """Nothing to do: what no query may see any more is never handed out."""

    def size(self) -> int:
        """Live columns."""
        return verbs.size(self.record)

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return self.record.layout is None

    @property
    def nbytes(self) -> int:
        """Bytes held, spare columns included."""
        return tree.nbytes(self.record)

    # -- going back -----------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether an exact :meth:`trim` is to be had: of anything, of ``reserve``, or of a block.

        A window that has dropped tokens can always take back its last block (a verify window of
        speculative decoding), and ``reserve`` tokens where it was made with one.
        """
        geometry = self.record.geometry
        whole = all(
            most >= row.offset
            for most, row in zip(geometry.max_rollback(), geometry.rows, strict=True)
        )
        return whole or geometry.policy.reserve > 0 or self.block > 1

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens (at most all there are), exactly.

        Raises:
            RollbackError: some of what would be visible again has been dropped.
        """
        geometry = self.record.geometry
        n = min(n, *(max(row.offset, 0) for row in geometry.rows))
        self.record = verbs.rollback(self.record, n)
        self.block = 1
        return n

    def keep_in_reserve(self, tokens: int) -> None:
        """From the next append on, keep what an exact :meth:`trim` of ``tokens`` needs."""
        if self.record.geometry.policy.reserve < tokens:
            self.record = verbs.with_reserve(self.record, tokens)

    # -- state ----------------------------------------------------------------------------------

    @property
    def state(self):
        """Everything that must be evaluated or saved.

        Up to mlx-lm 0.32.0 that is what the last block saw, since models take ``state`` for the
        keys and values there; from 0.32.1 on all columns held, and their description.
        """
        if OLD_PROTOCOL:
            planes = tuple(storage.dump(self.record, self.block)[1])
            if not planes:  # an empty list would leave no trace in a file
                return [mx.zeros(0)]
            if isinstance(self.record, Chain):
                return list(planes)
            split = len(_parts(self.record)[0].keys)
            return [_plane(planes[:split]), _plane(planes[split:])]
        header, planes = storage.dump(self.record)
        return [header, self._mode(), *planes]

    @state.setter
    def state(self, state) -> None:
        if OLD_PROTOCOL:
            # The description follows with meta_state.
            self._planes = [plane for side in state or () for plane in _planes(side)]
            return
        self.__init__(*restored(state[:2], list(state[2:])))

    @property
    def meta_state(self):
        """The description of :attr:`state`, as mlx-lm up to 0.32.0 wants it."""
        return (storage.dump(self.record, self.block)[0], self._mode())

    @meta_state.setter
    def meta_state(self, strings) -> None:
        self.__init__(*restored(strings, self.__dict__.pop("_planes", [])))

    def _mode(self) -> str:
        return PACKED if hasattr(self, "bits") else DECODED

    @classmethod
    def from_state(cls, state, meta_state=None) -> KVFunCache:
        """The cache of a saved state."""
        shell = cls.__new__(cls)
        shell.state = state
        if meta_state is not None:
            shell.meta_state = meta_state
        return shell

    def __copy__(self) -> KVFunCache:
        copy = KVFunCache(self.record, hasattr(self, "bits"), self.exact)
        copy.block = self.block
        return copy

    def __deepcopy__(self, memo) -> KVFunCache:
        return self.__copy__()  # a value needs no copy: the first append to either makes its own

    def __repr__(self) -> str:
        return f"KVFunCache({self.record!r})"

    # -- planes, for models that reach into a cache ---------------------------------------------

    @property
    def keys(self):
        """The keys as stored, spare columns included: an array, or a tuple of planes."""
        return self._side("keys")

    @keys.setter
    def keys(self, planes) -> None:
        self._replace_side("keys", planes)

    @property
    def values(self):
        """The values as stored, spare columns included: an array, or a tuple of planes."""
        return self._side("values")

    @values.setter
    def values(self, planes) -> None:
        self._replace_side("values", planes)

    def _side(self, name: str):
        """The planes of one side, those of a chain's parts one after another."""
        return _plane(tuple(x for part in _parts(self.record) for x in getattr(part, name)))

    def _replace_side(self, name: str, planes) -> None:
        planes, parts = list(_planes(planes)), []
        for part in _parts(self.record):
            count = len(getattr(part, name))
            parts.append(replace(part, **{name: tuple(planes[:count])}))
            del planes[:count]
        record = self.record
        if isinstance(record, Chain):
            self.record = record.with_parts(parts)
        elif isinstance(record, Delayed | Rebased):
            self.record = replace(record, inner=parts[0])
        else:
            self.record = parts[0]


def can_be_packed(record: KV | Chain | Delayed | Rebased) -> bool:
    """Whether mlx-lm's quantized attention can read the planes: one affine codec, unpadded."""
    keys, values = record.codec.keys, record.codec.values
    plain = isinstance(keys, Affine) and not keys.pad and not keys.half
    packed = plain and keys.spec == values.spec
    return packed and isinstance(record, KV)


def restored(strings: Any, planes: list[mx.array]) -> tuple[KV | Chain | Delayed | Rebased, bool]:
    """The record that a description stands for, and whether it was handed out packed.

    Raises:
        CorruptError: not such a description, or arrays that do not fit it.
    """
    if len(strings) != 2 or strings[1] not in (PACKED, DECODED):
        raise CorruptError(f"not the state of a kvfun cache: {strings!r:.80}")
    record, packed = storage.load(strings[0], planes), strings[1] == PACKED
    if not isinstance(record, KV | Chain | Delayed | Rebased):
        raise CorruptError(f"a {type(record).__name__} where keys and values should be")
    if packed and not can_be_packed(record):
        raise CorruptError(f"{record.codec.spec} planes cannot be handed out packed")
    return record, packed


def _narrowed(
    geometry: Geometry | Segments, mask: Mask, length: int, spans: Any, window: int
) -> Mask:
    """The mask under a window of the model's own, which hides sinks too."""
    policy, rows = geometry.policy, geometry.rows
    if not policy.sinks and policy.window is not None and policy.window <= window:
        return mask
    if all(row.offset <= window for row in rows):
        return mask  # nobody sees that far back yet
    return geometry.describe(length, spans, within=window)


def _parts(record: Any) -> tuple[KV, ...]:
    if isinstance(record, Delayed | Rebased):
        inner: Any = record.inner
        return (inner,)
    return record.parts if isinstance(record, Chain) else (record,)


def _plane(planes):
    return planes[0] if len(planes) == 1 else (planes or None)


def _planes(planes):
    return (planes,) if isinstance(planes, mx.array) else tuple(planes)


# mlx-lm's loader looks the class of a saved cache up among its own names.
setattr(mlx_lm_cache, KVFunCache.__name__, KVFunCache)
