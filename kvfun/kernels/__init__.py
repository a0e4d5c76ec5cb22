"""Kernel sets: plain dictionaries of callables, one for each kind of read.

Every callable has the same signature::

    kernel(queries, keys, values, codec, *, scale, mask, sinks) -> out

* ``queries [batch, heads, L, head_dim]``;
* ``keys``, ``values``: encoded planes, ``[batch, kv_heads, N, ...]``; query head ``h`` reads KV
  head ``h // (heads // kv_heads)``;
* ``mask``: see below;
* ``sinks [heads]``: attention sink logits, a key without a value;
* ``out [batch, heads, L, value_dim]`` in the queries' dtype.

Nothing that is given is changed. What does not fit is refused at the call, before anything is
evaluated: :class:`kvfun.errors.ShapeError`, ``DTypeError``, ``CodecError`` or ``PhaseError``.

The keys of a set are the phases of a read:

=================  ===============================================================================
``decode``         one query a row
``window``         a block of causal queries
``masked_window``  a block whose mask is an array or a callable
``committed``      tokens already decided: bit-equal to decoding them one at a time
                   (:func:`committed` makes it of any ``decode``)
``partial``        any number of queries over some of the columns: a :class:`Partial` ``(out, lse)``
                   in float32, to be merged with others by :func:`merge`
=================  ===============================================================================

A mask is one of

* ``None``: every query sees every column;
* ``"causal"``: query ``i`` sees the columns up to ``N - L + i`` (aligned at the lower right; the
  first queries see nothing where there are fewer columns than queries);
* a bool array (true: attend) or a float array (added to the scores) that broadcasts to
  ``[batch, heads, L, N]``; rank 5 is ``[batch, kv_heads, heads // kv_heads, L, N]``;
* a callable ``mask(first, last, start, stop)``: the block of queries ``[first, last)`` and columns
  ``[start, stop)``, an array that broadcasts to ``[batch, heads, last - first, stop - start]``, or
  ``None`` if all of them see all of it. Tiled kernels ask for one tile at a time, so that a mask
  takes no more memory than that; kernels that need all of it call ``mask(0, L, 0, N)``. It is
  called when the graph is built, in any order, for a block as often as it is read.

The sets:

* :data:`FUSED`: MLX's fused attention, for plain numbers in the queries' dtype; others are read as
  by the sets below, as the fused kernel would promote a copy of the whole cache, and so are 16-bit
  numbers on the CPU, where products in float32 are faster;
* :data:`UNFUSED`: mlx-lm's arithmetic, all scores at once, for one query or a few;
* :data:`TILED`: one query unfused, windows by an online softmax over tiles: memory that grows
  neither with the cache nor with the window;
* :data:`TILED_CAUSAL`: the same, but masks that are arrays are applied to all scores at once;
* :data:`ALL_TILED`: tiles for one query too, decoded before they are multiplied;
* :data:`COMPOSED`: MLX's fused attention on one decoded tile after the other;
* :data:`GROUPED_HEADS`: one window of one shape of model, and a typed error for everything else.

:func:`expanded` makes one for windows over latents. :func:`kernels_for` chooses one; any other
dictionary can be passed instead.

A query that sees nothing yields finite numbers, whatever hides the columns, and a log-sum-exp so
low that :func:`merge` gives it no weight beside anything seen.
"""

from ._choose import PHASES, kernels_for, multiplies_packed
from ._committed import committed
from ._composed import COMPOSED
from ._deferred import DEFERRED, DEFERRED_COMPOSED, DENSE, UNCOMPOSED, deferred, densely
from ._fused import FUSED
from ._grouped_heads import GROUPED_HEADS
from ._latent import expanded
from ._merge import Partial, merge, sink_part
from ._tiled import ALL_TILED, TILED, TILED_CAUSAL
from ._unfused import UNFUSED

SETS = {
    "fused": FUSED,
    "unfused": UNFUSED,
    "tiled": TILED,
    "tiled-causal": TILED_CAUSAL,
    "all-tiled": ALL_TILED,
    "composed": COMPOSED,
    "deferred": DEFERRED,
    "deferred-composed": DEFERRED_COMPOSED,
    "dense": DENSE,
    "uncomposed": UNCOMPOSED,
}
"""The sets that take any shape, by the names that a scheme stores."""

__all__ = [
    "ALL_TILED",
    "COMPOSED",
    "DEFERRED",
    "DEFERRED_COMPOSED",
    "DENSE",
    "FUSED",
    "GROUPED_HEADS",
    "PHASES",
    "SETS",
    "TILED",
    "TILED_CAUSAL",
    "UNCOMPOSED",
    "UNFUSED",
    "Partial",
    "committed",
    "deferred",
    "densely",
    "expanded",
    "kernels_for",
    "merge",
    "multiplies_packed",
    "sink_part",
]
