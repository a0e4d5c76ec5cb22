"""What an encoder made of the same image, sound or text before."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx

from .. import tree
from ..caches import snapshot
from ..errors import BudgetError, CorruptError
from ..record import record, static


def content_key(identity: str, *contents: bytes | bytearray | memoryview | str | mx.array) -> str:
    """The key of what an encoder makes of some contents.

    Two keys are equal where identity, number, order, kinds and bytes of the contents are.

    Args:
        identity: the encoder: weights, preprocessing and all else that its output depends on.
        contents: what it is fed, as bytes, text, or arrays (which are evaluated). Never an address.

    >>> key = content_key("whisper-tiny.en", b"sound")
    >>> key == content_key("whisper-tiny.en", b"sound"), key == content_key("other", b"sound")
    (True, False)
    """
    digest = hashlib.sha256()
    for kind, raw in [("identity", identity.encode()), *map(_bytes, contents)]:
        digest.update(f"{kind}:{len(raw)}:".encode())
        digest.update(raw)
    return digest.hexdigest()


def _bytes(content: Any) -> tuple[str, bytes]:
    if isinstance(content, mx.array):
        flat = content.reshape(-1)
        view: Any = memoryview(flat.view(mx.uint8) if flat.size else mx.zeros(0, mx.uint8))  # pyright: ignore
        return f"array {content.dtype} {content.shape}", bytes(view)
    if isinstance(content, str):
        return "text", content.encode()
    return "bytes", bytes(content)


@record
class EncoderOutputs:
    """Encoder outputs by content, up to so many bytes; the least recently used are let go first.

    A value, as caches are: what was taken out stays whole whatever happens to the store.
    :class:`kvfun.service.EncoderCache` holds one for threads.

    Args:
        entries: outputs by key, the least recently used first.
        capacity: bytes.

    >>> store = EncoderOutputs({}, capacity=1000)
    >>> store = store.put("a", mx.zeros(100)).put("b", mx.zeros(100)).put("c", mx.zeros(100))
    >>> [*store.entries], store.nbytes
    (['b', 'c'], 800)
    >>> found, store = store.take("b")
    >>> found.shape, [*store.entries]
    ((100,), ['c', 'b'])
    """

    entries: dict[str, Any]
    capacity: int = static()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tree.nbytes(self.entries)

    def put(self, key: str, output: Any) -> EncoderOutputs:
        """The store with an output, in buffers of its own.

        Args:
            key: see :func:`content_key`.
            output: an array, a cache, or a tree of them.

        Raises:
            BudgetError: it is larger than the whole store.
            CorruptError: there is another one of this key already, and it looks different.
        """
        return self.put_own(key, snapshot(output))

    def put_own(self, key: str, own: Any) -> EncoderOutputs:
        """As :meth:`put`, of an output that is in buffers of its own already."""
        size = tree.nbytes(own)
        if size > self.capacity:
            raise BudgetError(f"{size} bytes for a store of {self.capacity}")
        others = dict(self.entries)
        old = others.pop(key, None)
        if old is not None and _looks(old) != _looks(own):
            raise CorruptError(f"{key}: {_looks(own)} where {_looks(old)} was stored")
        held = sum(map(tree.nbytes, others.values()))
        for oldest in [*others]:
            if held + size <= self.capacity:
                break
            held -= tree.nbytes(others.pop(oldest))
        return EncoderOutputs({**others, key: own}, self.capacity)

    def take(self, key: str) -> tuple[Any | None, EncoderOutputs]:
        """The output of a key, ``None`` if it is not there; and the store that has seen it used."""
        if key not in self.entries:
            return None, self
        others = dict(self.entries)
        found = others.pop(key)
        return found, EncoderOutputs({**others, key: found}, self.capacity)

    def without(self, key: str) -> EncoderOutputs:
        """The store without an output."""
        return EncoderOutputs({k: x for k, x in self.entries.items() if k != key}, self.capacity)


def _looks(output: Any) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    return [(tuple(x.shape), x.dtype) for x in tree.leaves(output)]
