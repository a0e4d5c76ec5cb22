"""State that is kept to be used again.

* :func:`checkpoint` and :func:`resume`: what a model's caches need to go back to a boundary,
without
  what a rollback gives anyway; :class:`Kept` spaces such boundaries out;
* :class:`Companion`: what else belongs to a boundary, such as a draft model's state;
* :class:`EncoderOutputs`: what an encoder made of the same image, sound or text before.

All of them are values: keeping one is holding it, and whoever holds one is not affected by what
becomes of the others.
"""

from ._checkpoint import Checkpoint, checkpoint, resume
from ._companion import Companion, capture, restore
from ._encoder import EncoderOutputs, content_key
from ._retention import Kept, keep, nearest

__all__ = [
    "Checkpoint",
    "Companion",
    "EncoderOutputs",
    "Kept",
    "capture",
    "checkpoint",
    "content_key",
    "keep",
    "nearest",
    "restore",
    "resume",
]
