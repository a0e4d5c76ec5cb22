"""Records: frozen attrs classes whose fields are arrays, records or static values.

A record is a value. Nothing in it can be assigned to, a copy of it is itself, and
:mod:`kvfun.tree` takes it apart and rebuilds it, so that ``mx.eval``, ``mx.compile``,
``mx.vmap`` and ``mx.grad`` work on functions of records.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import mlx.core as mx

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """Stand in for ``typing.dataclass_transform``, which Python 3.10 lacks."""
        return lambda decorated: decorated


__all__ = ["fields", "is_record", "record", "replace", "static"]

T = TypeVar("T")

_STATIC = "kvfun.static"
_MARK = "__kvfun_record__"
_SHORT_DTYPES = {
    mx.bool_: "bool",
    mx.bfloat16: "bf16",
    mx.float16: "f16",
    mx.float32: "f32",
    mx.float64: "f64",
    mx.complex64: "c64",
    mx.int8: "i8",
    mx.int16: "i16",
    mx.int32: "i32",
    mx.int64: "i64",
    mx.uint8: "u8",
    mx.uint16: "u16",
    mx.uint32: "u32",
    mx.uint64: "u64",
}


def static(
    *,
    default: Any = attrs.NOTHING,
    factory: Callable[[], Any] | None = None,
    validator: Any = None,
    converter: Any = None,
    metadata: Mapping[str, Any] | None = None,
    kw_only: bool = False,
    repr: bool = True,
) -> Any:
    """A field that is part of a record's structure, never an array.

    Its value must be hashable; a function compiled over records is traced again when it
    changes. The arguments are those of ``attrs.field``.

    >>> @record
    ... class Window:
    ...     size: int = static(default=128)
    >>> Window()
    Window(size=128)
    """
    return attrs.field(
        default=default,
        factory=factory,
        validator=validator,
        converter=converter,
        metadata={**(metadata or {}), _STATIC: True},
        kw_only=kw_only,
        repr=repr,
    )


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(static, attrs.field))
def record(cls: type[T]) -> type[T]:
    """Make a class a record: frozen, slotted, and a tree of its fields.

    Fields hold arrays, records, tuples, lists, dicts or None, and are the children of the
    record in :mod:`kvfun.tree`; a field made by :func:`static` belongs to its structure.
    Records compare and hash by identity (``tree.equal`` compares their contents), are
    their own copies, and show arrays by dtype and shape without evaluating them.

    Raises ``attrs.exceptions.FrozenInstanceError`` (an ``AttributeError``) on assignment.

    >>> @record
    ... class Planes:
    ...     keys: mx.array
    ...     values: mx.array
    ...     step: int = static(default=256)
    >>> Planes(mx.zeros((1, 8)), values=mx.zeros((1, 8), mx.bfloat16))
    Planes(keys=f32[1,8], values=bf16[1,8], step=256)
    """
    shown = {} if "__repr__" in vars(cls) else {"__repr__": _repr, "__pdoc__": _pdoc}
    for name, method in {**shown, "__copy__": _itself, "__deepcopy__": _itself}.items():
        setattr(cls, name, method)
    setattr(cls, _MARK, True)
    return attrs.define(frozen=True, slots=True, eq=False, repr=False, auto_attribs=True)(cls)


def is_record(x: Any) -> bool:
    """Whether ``x`` is an instance of a record class.

    >>> is_record(mx.zeros(3))
    False
    """
    return hasattr(type(x), _MARK)


@cache
def fields(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a record class's children and of its static fields, in order.

    Raises ``TypeError`` when ``cls`` is not a record class.

    >>> @record
    ... class Codec:
    ...     mean: mx.array
    ...     bits: int = static(default=4)
    >>> fields(Codec)
    (('mean',), ('bits',))
    """
    if not hasattr(cls, _MARK):
        raise TypeError(f"{cls!r} is not a record class; decorate it with @record")
    children = tuple(f.name for f in attrs.fields(cls) if not f.metadata.get(_STATIC))
    statics = tuple(f.name for f in attrs.fields(cls) if f.metadata.get(_STATIC))
    return children, statics


def replace(record: T, /, **changes: Any) -> T:
    """The record with some fields changed; the others are shared.

    The constructor runs, validators and converters included, as with ``attrs.evolve``.
    Raises ``TypeError`` when a name is not a field.

    >>> @record
    ... class Window:
    ...     size: int = static()
    ...     sinks: int = static(default=0)
    >>> replace(Window(128), sinks=4)
    Window(size=128, sinks=4)
    """
    read, index, build = _rebuilding(type(record))
    values = list(read(record))
    for name, value in changes.items():
        if name not in index:
            raise TypeError(f"{type(record).__name__} has no field {name!r}; it has {list(index)}")
        values[index[name]] = value
    return build(*values)


def _assemble(cls: type[T], children: Any, statics: Any) -> T:
    """A record from the values of its fields, past the constructor.

    A rebuilt record may hold anything in place of its arrays (tracers, axes, None), which
    validators and converters must not see.
    """
    new = object.__new__(cls)
    set_children, set_statics = _setters(cls)
    for set_field, value in zip(set_children, children, strict=True):
        set_field(new, value)
    for set_field, value in zip(set_statics, statics, strict=True):
        set_field(new, value)
    return new


@cache
def _setters(cls: type) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    children, statics = fields(cls)
    return (
        tuple(getattr(cls, name).__set__ for name in children),
        tuple(getattr(cls, name).__set__ for name in statics),
    )


@cache
def _rebuilding(cls: type) -> tuple[Callable[..., Any], dict[str, int], Callable[..., Any]]:
    """How to read a record's arguments, their places by name, and how to build it again."""
    fields(cls)
    arguments = [f for f in attrs.fields(cls) if f.init]
    names = [f.alias for f in arguments]

    def by_keyword(*values: Any) -> Any:
        return cls(**dict(zip(names, values, strict=True)))

    read = _reader([f.name for f in arguments])
    index = {name: place for place, name in enumerate(names)}
    return read, index, by_keyword if any(f.kw_only for f in arguments) else cls


def _reader(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a record to the tuple of the named fields."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def _short_array(x: mx.array) -> str:
    shape = ",".join(map(str, x.shape))
    return f"{_SHORT_DTYPES.get(x.dtype, str(x.dtype))}[{shape}]"


def _custom_doc(x: Any) -> Any:
    import wadler_lindig as wl

    if isinstance(x, mx.array):
        return wl.TextDoc(_short_array(x))
    if isinstance(x, mx.Dtype):
        return wl.TextDoc(_SHORT_DTYPES.get(x, str(x)))
    return None


def _pdoc(self: Any, **options: Any) -> Any:
    import wadler_lindig as wl

    options["custom"] = _custom_doc
    pairs = [(f.name, getattr(self, f.name)) for f in attrs.fields(type(self)) if f.repr]
    return wl.bracketed(
        begin=wl.TextDoc(type(self).__name__ + "("),
        docs=wl.named_objs(pairs, **options),
        sep=wl.comma,
        end=wl.TextDoc(")"),
        indent=options["indent"],
    )


def _repr(self: Any) -> str:
    import wadler_lindig as wl

    return wl.pformat(self, width=100)


def _itself(self: T, _memo: Any = None) -> T:
    return self
