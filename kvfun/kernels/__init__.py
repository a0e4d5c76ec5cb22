"""Kernel sets: plain dictionaries of callables, one for each kind of read.

Every callable has the same signature::

    kernel(queries, keys, values, codec, *, scale, mask, sinks) -> out

* ``queries [batch, heads, L, head_dim]``; they are never changed;
* ``keys``, ``values``: encoded planes, ``[batch, kv_heads, N, ...]``; query head ``h`` reads KV
  head ``h // (heads // kv_heads)``;
* ``mask``: ``None``, ``"causal"`` (aligned at the lower right), a bool array (true: attend) or a
  float array (added to the scores), that broadcasts to ``[batch, heads, L, N]``; rank 5 is
  ``[batch, kv_heads, heads // kv_heads, L, N]``;
* ``sinks [heads]``: attention sink logits, a key without a value;
* ``out [batch, heads, L, value_dim]`` in the queries' dtype.

The keys of a set are the phases of a read: ``"decode"`` (one query a row), ``"window"`` (a block of
causal queries), ``"masked_window"`` (a block whose mask is an array).

The sets:

* ``FUSED``: MLX's fused attention, for plain numbers in the queries' dtype; others are read by the
  sets below, as the fused kernel would promote a copy of the whole cache, and so are 16-bit numbers
  on the CPU, where products in float32 are faster;
* ``UNFUSED``: all scores at once, for one query or a few;
* ``TILED``: online softmax over tiles, for windows: memory that does not grow with the cache.

A query that sees nothing yields finite numbers, whatever hides the columns.
"""

from ._choose import PHASES, kernels_for, multiplies_packed
from ._fused import FUSED
from ._tiled import TILED
from ._unfused import UNFUSED

__all__ = ["FUSED", "PHASES", "TILED", "UNFUSED", "kernels_for", "multiplies_packed"]
