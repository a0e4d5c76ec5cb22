"""Caches as bytes.

:func:`dump` says what a record is as a string of JSON and a list of arrays, and :func:`load` makes
it again; what is damaged, or does not fit, is refused.

>>> import kvfun, mlx.core as mx
>>> k = mx.zeros((1, 2, 5, 64))
>>> cache = kvfun.append(kvfun.empty("kv4", window=4), k, k)
>>> header, arrays = dump(cache)
>>> kvfun.offsets(load(header, arrays))
(5,)
"""

from ._records import Record, dump, load

__all__ = ["Record", "dump", "load"]
