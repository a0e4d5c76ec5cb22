"""kvfun: immutable, functional key/value caches for MLX. A cache is a value.

>>> import kvfun, mlx.core as mx
>>> k = v = mx.random.normal((1, 2, 5, 64))
>>> cache = kvfun.append(kvfun.empty("kv4"), k, v)
>>> kvfun.offsets(cache), kvfun.offsets(kvfun.rollback(cache, 2))
((5,), (3,))
"""

from . import codecs, errors, geometry, kernels, rounds, scheme, tree
from .caches import (
    KV,
    Chain,
    Delayed,
    Ragged,
    Rebased,
    View,
    append,
    attend,
    batch_size,
    calibrate,
    combine,
    concat,
    convert,
    empty,
    fetch,
    fork,
    mask,
    max_rollback,
    nbytes,
    next_conversion,
    offsets,
    ragged,
    rebased,
    rollback,
    seal,
    settle,
    size,
    stack,
    take,
    unstack,
    view,
)
from .codecs import Codec
from .errors import KVFunError
from .record import record, replace, static

__version__ = "0.1.0"

__all__ = [
    "KV",
    "Chain",
    "Codec",
    "Delayed",
    "KVFunError",
    "Ragged",
    "Rebased",
    "View",
    "append",
    "attend",
    "batch_size",
    "calibrate",
    "codecs",
    "combine",
    "concat",
    "convert",
    "empty",
    "errors",
    "fetch",
    "fork",
    "geometry",
    "kernels",
    "mask",
    "max_rollback",
    "nbytes",
    "next_conversion",
    "offsets",
    "ragged",
    "rebased",
    "record",
    "replace",
    "rollback",
    "rounds",
    "scheme",
    "seal",
    "settle",
    "size",
    "stack",
    "static",
    "take",
    "tree",
    "unstack",
    "view",
]
