"""The box that mlx-lm's recurrent layers hold, and the one for layers with several caches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

from ... import caches as verbs
from ... import storage, tree
from ...caches import Recurrent, recurrent
from ...caches._recurrent import counted, given_states, of_batch, with_states
from ...errors import CorruptError
from ...record import replace
from ...recurrences import valid_columns
from ._shell import OLD_PROTOCOL


class KVFunStates(mlx_lm_cache.ArraysCache):
    """The states of one recurrent layer, as mlx-lm's models read and write them: by number.

    It holds one value, ``record``, a :class:`kvfun.Recurrent` whose states are named ``"0"``,
    ``"1"``, .... The models compute; what they write makes a new value. (It is an ``ArraysCache``
    because mamba keeps nothing in other classes. None of that class's own data is used.)

    Args:
        size: how many states the layer has.
        record: the cache, a new one by default.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> KVFunStates:
        """An object without the attributes that mlx-lm up to 0.32.0 sets here."""
        return object.__new__(cls)

    def __init__(self, size: int, record: Recurrent | None = None):
        self.size_of_layer = size
        self.record = recurrent() if record is None else record
        self._before = self.record.offsets
        """Tokens seen before the model began to write."""

    # -- reading and writing ----------------------------------------------------------------------

    def __getitem__(self, index: int) -> mx.array | None:
        if not 0 <= index < self.size_of_layer:
            raise IndexError(index)  # which also ends ``a, b = cache``
        return given_states(self.record).get(str(index))

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        if not 0 <= index < self.size_of_layer:
            raise IndexError(index)
        states = given_states(self.record)
        states.pop(str(index), None)
        record = self.record
        if value is not None:
            states[str(index)] = value
            record = of_batch(record, len(value))
        if record.offsets is not None:
            self._before = record.offsets
        self.record = replace(with_states(record, states), offsets=None)

    def __iter__(self) -> Iterator[mx.array | None]:
        return iter(self.cache)

    @property
    def cache(self) -> list[mx.array | None]:
        """The states in order, ``None`` where there is none yet."""
        states = given_states(self.record)
        return [states.get(str(index)) for index in range(self.size_of_layer)]

    def advance(self, N: int) -> None:
        """Count ``N`` columns of a block, of which padding is none."""
        self.told(N)

    def told(self, columns: int) -> None:
        """Count columns of a block that was written, where the model has not done so itself."""
        record = replace(self.record, offsets=self._before)
        self.record = counted(of_batch(record, self.batch_size), columns)
        self._before = self.record.offsets

    @property
    def counts(self) -> bool:
        """Whether all that was written is counted."""
        return self.record.offsets is not None

    # -- padding ----------------------------------------------------------------------------------

    def make_mask(self, N: int) -> mx.array | None:
        """Which of the next columns are tokens, bool ``[batch, N]``; ``None`` where all are."""
        ahead = self.record.ahead
        return None if ahead is None else valid_columns(tuple([x.span(N) for x in ahead]), N)

    @property
    def lengths(self) -> mx.array | None:
        """For each row the columns up to its last token, of a padded block."""
        ahead = self.record.ahead
        return None if ahead is None else mx.array([each.length for each in ahead])

    @property
    def left_padding(self) -> mx.array | None:
        """For each row the columns of padding that are still to come."""
        ahead = self.record.ahead
        if ahead is None or not any(each.left for each in ahead):
            return None
        return mx.array([each.left for each in ahead])

    def prepare(self, lengths: Any = None, left_padding: Any = None, **_: Any) -> None:
        """Expect a block whose rows differ in length, in one piece or several."""
        lengths, left = [None if x is None else _numbers(x) for x in (lengths, left_padding)]
        record = self.record
        if lengths is None:
            return
        if not record.states and verbs.batch_size(record) == 1:
            record = of_batch(record, len(lengths))
        self.record = verbs.prepare(record, lengths, left_padding=left)
        self._before = self.record.offsets

    def finalize(self) -> None:
        """The block is over."""
        self.record = verbs.finalize(self.record)

    # -- rows -------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """How many rows there are."""
        return verbs.batch_size(self.record)

    def filter(self, batch_indices: Any) -> None:
        """Keep the rows of these numbers, in their order."""
        self.put(verbs.take(self.record, _numbers(batch_indices)))

    def extend(self, other: KVFunStates) -> None:
        """Add another cache's rows; those without a token yet begin with zeros."""
        self.put(verbs.concat([self.record, other.record]))

    def extract(self, idx: int) -> KVFunStates:
        """One row as a cache of its own."""
        return self._with(verbs.take(self.record, [idx]))

    def merge(self, caches: Sequence[KVFunStates]) -> KVFunStates:
        """One cache of the rows of several."""
        return self._with(verbs.concat([cache.record for cache in caches]))

    def put(self, record: Recurrent) -> None:
        """Hold another value."""
        self.record, self._before = record, record.offsets

    def _with(self, record: Recurrent) -> KVFunStates:
        return KVFunStates(self.size_of_layer, record)

    # -- going back, size, state ------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """No token can be taken out of a state."""
        return False

    def trim(self, n: int) -> int:
        """Take back nothing.

        Raises:
            RollbackError: anything else was asked for.
        """
        self.record = verbs.rollback(self.record, n)
        return n

    def size(self) -> int:
        """No token is held."""
        return 0

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.record.states

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tree.nbytes(self.record)

    @property
    def state(self) -> Any:
        """All that must be evaluated or saved."""
        header, arrays = storage.dump(self.record)
        if OLD_PROTOCOL:  # an empty list would leave no trace in a file
            return arrays or [mx.zeros(0)]
        return [header, str(self.size_of_layer), *arrays]

    @state.setter
    def state(self, state: Any) -> None:
        if OLD_PROTOCOL:
            self._arrays = [x for x in state or () if x.size]
            return
        self.__init__(*restored_states(state[:2], list(state[2:])))

    @property
    def meta_state(self) -> Any:
        """The description of :attr:`state`, as mlx-lm up to 0.32.0 wants it."""
        return (storage.dump(self.record)[0], str(self.size_of_layer))

    @meta_state.setter
    def meta_state(self, strings: Any) -> None:
        self.__init__(*restored_states(strings, self.__dict__.pop("_arrays", [])))

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> KVFunStates:
        """The cache of a saved state."""
        shell = cls.__new__(cls)
        shell.state = state
        if meta_state is not None:
            shell.meta_state = meta_state
        return shell

    def __copy__(self) -> KVFunStates:
        copy = self._with(self.record)
        copy._before = self._before
        return copy

    def __deepcopy__(self, memo: Any) -> KVFunStates:
        return self.__copy__()  # a value needs no copy

    def __repr__(self) -> str:
        return f"KVFunStates({self.record!r})"


def _numbers(x: Any) -> list[int]:
    listed: Any = x.tolist() if isinstance(x, mx.array) else x
    return [int(n) for n in listed]


def restored_states(strings: Any, arrays: list[mx.array]) -> tuple[int, Recurrent]:
    """How many states a layer has, and the record of a description.

    Raises:
        CorruptError: not such a description, or arrays that do not fit it.
    """
    try:
        header, size = strings
        record = storage.load(header, arrays)
        names = {str(index) for index in range(json.loads(size))}
    except (ValueError, TypeError) as error:
        raise CorruptError(f"not the state of a kvfun cache: {strings!r:.80}") from error
    if not isinstance(record, Recurrent) or not record.states.keys() <= names:
        raise CorruptError(f"not the state of a recurrent layer: {strings!r:.80}")
    return len(names), record


class KVFunCacheList(mlx_lm_cache.CacheList):
    """The caches of a layer that has several: tokens are taken back in all of them, or in none."""

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens.

        Raises:
            RollbackError: one of the caches cannot; none has changed then.
        """
        before = [dict(vars(cache)) for cache in self.caches]
        try:
            return min(cache.trim(n) for cache in self.caches)
        except Exception:
            for cache, had in zip(self.caches, before, strict=True):
                vars(cache).update(had)
            raise

    def __deepcopy__(self, memo: Any) -> KVFunCacheList:
        return KVFunCacheList(*[cache.__copy__() for cache in self.caches])


def leaves_of(caches: Any) -> Iterator[Any]:
    """The boxes of a model's caches, those of layers with several one after another."""
    for cache in caches:
        if isinstance(cache, mlx_lm_cache.CacheList):
            yield from leaves_of(cache.caches)
        else:
            yield cache


# mlx-lm's loader looks the class of a saved cache up among its own names.
for _kind in (KVFunStates, KVFunCacheList):
    setattr(mlx_lm_cache, _kind.__name__, _kind)
