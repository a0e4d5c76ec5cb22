"""kvfun caches under any mlx-lm model.

>>> from mlx_lm.models import llama
>>> args = llama.ModelArgs("llama", 64, 2, 128, 2, 1e-5, 100, num_key_value_heads=1)
>>> model = llama.Model(args)
>>> cache = make_prompt_cache(model, "kv4-g32")
>>> print(describe(cache))
layers 0-1: kv4-g32, full, read as packed numbers

The list goes wherever mlx-lm takes a ``prompt_cache``. Importing this module makes mlx-lm's
``load_prompt_cache`` know :class:`KVFunCache` and :class:`KVFunStates`. Works with both of mlx-lm's
cache protocols (up to 0.32.0, and from 0.32.1 on); :func:`load` reads files of either.
"""

from ._attention import attention, attention_where_possible, can_be_routed
from ._batch import Batch
from ._calibrate import calibrated_prompt_cache
from ._described import described
from ._file import load
from ._generate import DraftModel, Generated, PromptLookup, Proposal, speculative_generate
from ._make import LayerReport, PromptCache, describe, make_prompt_cache
from ._measure import measure
from ._probe import Probed, probe
from ._shell import KVFunCache
from ._speculative import speculative_cache
from ._states import KVFunCacheList, KVFunStates
from ._weights import weights_of

__all__ = [
    "Batch",
    "DraftModel",
    "Generated",
    "KVFunCache",
    "KVFunCacheList",
    "KVFunStates",
    "LayerReport",
    "Probed",
    "PromptCache",
    "PromptLookup",
    "Proposal",
    "attention",
    "attention_where_possible",
    "calibrated_prompt_cache",
    "can_be_routed",
    "describe",
    "described",
    "load",
    "make_prompt_cache",
    "measure",
    "probe",
    "speculative_cache",
    "speculative_generate",
    "weights_of",
]
