"""The records and their verbs."""

from ._calibrate import calibrate
from ._chain import Chain, seal
from ._cross import Cross, attend_cross, cross
from ._delayed import Delayed, next_conversion, settle
from ._empty import BLOCK, empty
from ._extents import Extents, extents, own_columns, width
from ._kv import KV, Layout, decoded
from ._latent import Latent, Selection, attend_latent, index_scores, latent, select
from ._ragged import Ragged, ragged
from ._rebased import Rebased, rebased
from ._recurrent import Recurrent, advance, finalize, prepare, recurrent
from ._snapshot import snapshot
from ._verbs import (
    append,
    attend,
    attend_columns,
    batch_size,
    concat,
    convert,
    fetch,
    fetch_columns,
    fork,
    join,
    mask,
    max_rollback,
    nbytes,
    offsets,
    rollback,
    size,
    stack,
    take,
    unstack,
    with_reserve,
)
from ._view import Combined, View, attend_over, combine, layout, view

__all__ = [
    "BLOCK",
    "KV",
    "Chain",
    "Combined",
    "Cross",
    "Delayed",
    "Extents",
    "Latent",
    "Layout",
    "Ragged",
    "Rebased",
    "Recurrent",
    "Selection",
    "View",
    "advance",
    "append",
    "attend",
    "attend_columns",
    "attend_cross",
    "attend_latent",
    "attend_over",
    "batch_size",
    "calibrate",
    "combine",
    "concat",
    "convert",
    "cross",
    "decoded",
    "empty",
    "extents",
    "fetch",
    "fetch_columns",
    "finalize",
    "fork",
    "index_scores",
    "join",
    "latent",
    "layout",
    "mask",
    "max_rollback",
    "nbytes",
    "next_conversion",
    "offsets",
    "own_columns",
    "prepare",
    "ragged",
    "rebased",
    "recurrent",
    "rollback",
    "seal",
    "select",
    "settle",
    "size",
    "snapshot",
    "stack",
    "take",
    "unstack",
    "view",
    "width",
    "with_reserve",
]
