"""Which layer of a model stores what, what that costs, and whether it fits.

>>> config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
...           "num_key_value_heads": 8, "max_position_embeddings": 131072}
>>> model = Model.from_config(config)
>>> kv_bytes_at(model, 8192) // 2**20, kv_bytes_at(model, 8192, "kv4") // 2**20
(1024, 288)
>>> memory_plan(model, weights=16_060_522_496, usable=24 * 2**30, scheme="kv4").largest
131072
"""

from . import admission
from ._assigned import Assignment
from ._bytes import (
    KvGeometry,
    batch_row_kv_bytes,
    element_bytes,
    kv_allocated_bytes_at,
    kv_bytes_at,
    kv_geometry,
    sdpa_fallback_bytes,
)
from ._caches import ModelCaches, caches
from ._kinds import KINDS
from ._model import Layer, Model, Stream
from ._plan import (
    USABLE,
    MemoryPlan,
    Weights,
    bytes_of,
    decode_speed,
    memory_plan,
    prefill_chunk,
)
from ._recurrent import State
from ._scheme import KvScheme, resolve_scheme

__all__ = [
    "KINDS",
    "USABLE",
    "Assignment",
    "KvGeometry",
    "KvScheme",
    "Layer",
    "MemoryPlan",
    "Model",
    "ModelCaches",
    "State",
    "Stream",
    "Weights",
    "admission",
    "batch_row_kv_bytes",
    "bytes_of",
    "caches",
    "decode_speed",
    "element_bytes",
    "kv_allocated_bytes_at",
    "kv_bytes_at",
    "kv_geometry",
    "memory_plan",
    "prefill_chunk",
    "resolve_scheme",
    "sdpa_fallback_bytes",
]
