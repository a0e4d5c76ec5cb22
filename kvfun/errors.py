"""The errors of kvfun: one small hierarchy, each also the natural built-in."""


class KVFunError(Exception):
    """The root of every error that kvfun raises on purpose."""


class ShapeError(KVFunError, ValueError):
    """An array has the wrong shape."""


class DTypeError(KVFunError, TypeError):
    """An array has the wrong dtype."""


class RollbackError(KVFunError, ValueError):
    """A rollback asks for more tokens than can be taken back exactly."""


class CodecError(KVFunError, ValueError):
    """A codec cannot encode or decode what it was given."""


class SpecError(CodecError):
    """A spec string names no codec."""


class GeometryError(KVFunError, ValueError):
    """Positions, columns or windows that cannot be."""


class PhaseError(KVFunError, ValueError):
    """A phase that does not exist, or that does not fit the call."""


class TreeError(KVFunError, TypeError):
    """A value that is not a tree, or two trees that do not match."""


class StorageError(KVFunError, OSError):
    """A store could not be read or written."""


class CorruptError(StorageError):
    """Stored bytes are not the bytes that were saved."""


class UnsupportedError(KVFunError, NotImplementedError):
    """A model or architecture that cannot take a spec."""


class ConfigError(KVFunError, ValueError):
    """A model's config lacks a key, or holds something else than it should."""


class BudgetError(KVFunError, ValueError):
    """A budget that cannot be, or that what is asked for can never fit."""


class AdmissionError(KVFunError, RuntimeError):
    """A request that is not admitted: the queue is full, or the pool was closed."""


class RoundError(KVFunError, RuntimeError):
    """A speculative round that cannot be, or a call that does not fit it."""


class CompanionError(KVFunError, ValueError):
    """State that belongs to a boundary, and is missing, of another kind, or of another boundary."""
