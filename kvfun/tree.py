"""Trees: records, tuples, lists, dicts and None, with MLX arrays as leaves.

A tree is flattened into its arrays and a hashable :class:`Structure` that holds everything
else (node types, keys, static values), and rebuilt from the two. The transformations of
MLX, which know of lists of arrays only, become transformations of functions of trees, in
the manner of Equinox for JAX.

Names such as ``map`` and ``compile`` are meant to be read as ``tree.map``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx

from kvfun.errors import TreeError
from kvfun.record import _assemble, fields, is_record

__all__ = [
    "At",
    "Compiled",
    "Structure",
    "at",
    "compile",
    "equal",
    "evaluate",
    "flatten",
    "grad",
    "leaves",
    "map",
    "nbytes",
    "paths",
    "structure",
    "unflatten",
    "value_and_grad",
    "vmap",
]

_COMPILED_ENTRIES = 256

# A node of a structure is _LEAF, a _Static, or a triple (type, data, nodes of the children);
# data is the tuple of static values of a record, the _Keys of a dict, None otherwise.
_LEAF = ...


# Structure


@attrs.frozen(repr=False, cache_hash=True)
class Structure:
    """Everything in a tree but its arrays; hashable, and equal when trees have one shape.

    Static values are compared with their types (1, 1.0 and True are three values), floats
    by their bits up to NaN, so that NaN equals itself; tuples, frozensets and records by
    their contents; anything else by its own ``==``. The order in which a dict was filled is
    kept and not compared.
    """

    root: Any
    num_leaves: int = attrs.field(eq=False)

    def __repr__(self) -> str:
        import wadler_lindig as wl

        stars = unflatten(self, [_Star()] * self.num_leaves)
        return f"Structure({wl.pformat(stars, width=100)})"


@attrs.frozen
class _Static:
    """A value that belongs to the structure, compared by its key."""

    value: Any = attrs.field(eq=False)
    key: Any


@attrs.frozen
class _Keys:
    """The keys of a dict: sorted, which is the order of its leaves, and as they were filled."""

    ordered: tuple[str, ...]
    filled: tuple[str, ...] = attrs.field(eq=False)


class _Star:
    """What a leaf looks like in the repr of a structure."""

    def __repr__(self) -> str:
        return "*"


class _Refused(Exception):
    """A value that cannot be in a tree; the path is filled in on the way out."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.steps: list[str] = []


def flatten(tree: Any) -> tuple[list[mx.array], Structure]:
    """The arrays of a tree in order, and its structure.

    Raises ``TreeError``, naming the path, for a value that is neither an array, a node nor
    hashable (a set, a NumPy array), and for a dict with a key that is not a string.

    >>> arrays, structure = flatten({"b": mx.zeros(2), "a": (mx.ones(1), "label", None)})
    >>> [x.shape for x in arrays]
    [(1,), (2,)]
    >>> structure
    Structure({'b': *, 'a': (*, 'label', None)})
    """
    arrays: list[mx.array] = []
    try:
        root = _describe(tree, arrays)
    except _Refused as refusal:
        path = "".join(reversed(refusal.steps))
        raise TreeError(f"tree{path} {refusal}") from None
    return arrays, Structure(root, len(arrays))


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The tree of a structure with these leaves, which may be any objects.

    The constructors of records do not run. Raises ``TreeError`` on a wrong number of leaves.

    >>> arrays, structure = flatten([mx.zeros(2), "label"])
    >>> unflatten(structure, ["anything"])
    ['anything', 'label']
    """
    given = list(leaves)
    if len(given) != structure.num_leaves:
        raise TreeError(
            f"{len(given)} leaves were given to a structure of {structure.num_leaves}: {structure}"
        )
    return _build(structure.root, iter(given))


def structure(tree: Any) -> Structure:
    """The structure of a tree; raises as :func:`flatten` does.

    >>> structure((mx.zeros(2), 1)) == structure((mx.ones(3), 1))
    True
    >>> structure((mx.zeros(2), 1)) == structure((mx.zeros(2), True))
    False
    """
    return flatten(tree)[1]


def leaves(tree: Any) -> list[mx.array]:
    """The arrays of a tree in order; raises as :func:`flatten` does.

    >>> leaves([mx.array(1), {"a": mx.array(2)}, "static"])
    [array(1, dtype=int32), array(2, dtype=int32)]
    """
    return flatten(tree)[0]


def paths(tree: Any) -> list[tuple[str, mx.array]]:
    """The path and the array of every leaf, in order; raises as :func:`flatten` does.

    >>> [path for path, leaf in paths({"layers": [mx.zeros(1), mx.zeros(2)]})]
    ["['layers'][0]", "['layers'][1]"]
    """
    arrays, structure = flatten(tree)
    return list(zip(_leaf_paths(structure.root, ""), arrays, strict=True))


def _describe(x: Any, arrays: list[mx.array]) -> Any:
    if isinstance(x, mx.array):
        arrays.append(x)
        return _LEAF
    opened = _open(x)
    if opened is None:
        return _freeze(x)
    cls, data, children = opened
    nodes = []
    for place, child in enumerate(children):
        try:
            nodes.append(_describe(child, arrays))
        except _Refused as refusal:
            refusal.steps.append(_labels(cls, data, len(children))[place])
            raise
    return cls, data, tuple(nodes)


def _open(x: Any) -> tuple[type, Any, Sequence[Any]] | None:
    """The type, the static data and the children of a node; None for a value with none."""
    cls = type(x)
    if x is None:
        return cls, None, ()
    if cls is tuple or cls is list or _is_namedtuple(cls):
        return cls, None, x
    if cls is dict:
        keys = _keys(x)
        return cls, keys, [x[key] for key in keys.ordered]
    if is_record(x):
        children, statics = fields(cls)
        frozen = tuple([_freeze_field(x, name) for name in statics])
        return cls, frozen, [getattr(x, name) for name in children]
    if isinstance(x, tuple | list | dict):
        raise _Refused(
            f"is a {cls.__name__}, which cannot be rebuilt: use a plain tuple, list or dict"
        )
    return None


def _build(node: Any, leaves: Iterator[Any]) -> Any:
    if node is _LEAF:
        return next(leaves)
    if isinstance(node, _Static):
        return node.value
    cls, data, nodes = node
    return _close(cls, data, [_build(child, leaves) for child in nodes])


def _close(cls: Any, data: Any, children: list[Any]) -> Any:
    """The node of a type with this static data and these children."""
    if cls is types.NoneType:
        return None
    if cls is list:
        return children
    if cls is tuple:
        return tuple(children)
    if cls is dict:
        values = dict(zip(data.ordered, children, strict=True))
        return {key: values[key] for key in data.filled}
    if _is_namedtuple(cls):
        return cls._make(children)
    return _assemble(cls, children, [static.value for static in data])


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _keys(x: dict[Any, Any]) -> _Keys:
    strange = [key for key in x if type(key) is not str]
    if strange:
        raise _Refused(f"is a dict with the key {strange[0]!r}: keys must be strings")
    return _Keys(tuple(sorted(x)), tuple(x))


def _labels(cls: type, data: Any, count: int) -> list[str]:
    """What to append to a node's path for each of its children."""
    if cls is dict:
        return [f"[{key!r}]" for key in data.ordered]
    if _is_namedtuple(cls):
        return [f".{name}" for name in cls._fields]  # type: ignore[attr-defined]
    if issubclass(cls, tuple | list):
        return [f"[{place}]" for place in range(count)]
    return [f".{name}" for name in fields(cls)[0]] if count else []


def _leaf_paths(node: Any, path: str) -> Iterator[str]:
    if node is _LEAF:
        yield path
    elif not isinstance(node, _Static):
        cls, data, nodes = node
        for label, child in zip(_labels(cls, data, len(nodes)), nodes, strict=True):
            yield from _leaf_paths(child, path + label)


# Static values


def _freeze(value: Any) -> _Static:
    return _Static(value, _key(value))


def _freeze_field(record: Any, name: str) -> _Static:
    try:
        return _freeze(getattr(record, name))
    except _Refused as refusal:
        refusal.steps.append(f".{name}")
        raise


def _key(value: Any) -> Any:
    """What a static value is compared by: its type and its contents."""
    cls = type(value)
    if cls is int or cls is str or cls is bool or value is None:
        return cls, value
    if isinstance(value, float):
        return cls, value.hex()
    if isinstance(value, complex):
        return cls, value.real.hex(), value.imag.hex()
    if isinstance(value, tuple):
        return cls, tuple([_key(item) for item in value])
    if isinstance(value, frozenset):
        return cls, frozenset([_key(item) for item in value])
    if is_record(value):
        children, statics = fields(cls)
        return cls, tuple([_key(getattr(value, name)) for name in children + statics])
    return cls, _hashable(value)


def _hashable(value: Any) -> Any:
    name = type(value).__name__
    if isinstance(value, mx.array):
        raise _Refused("holds an array in a static value: make it a child instead of static")
    try:
        hash(value)
    except TypeError:
        if hasattr(value, "__array__"):
            raise _Refused(f"is a {name}: convert it with mx.array") from None
        raise _Refused(
            f"is or holds a {name}, which is neither an array, a node of a tree nor hashable: "
            "use a record, tuple, list or dict for arrays and a hashable value for anything else"
        ) from None
    return value


# Comparing and measuring


def map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree of ``f`` applied to every array, or to the arrays in the same place of several.

    Static values are those of ``tree``. Raises ``TreeError``, naming the first difference,
    when the structures differ.

    >>> map(lambda x, y: x + y, [mx.array(1), "a"], [mx.array(2), "a"])
    [array(3, dtype=int32), 'a']
    """
    arrays, structure = flatten(tree)
    columns = [arrays]
    for other in rest:
        others, other_structure = flatten(other)
        if other_structure != structure:
            raise TreeError(_difference(structure.root, other_structure.root, "tree"))
        columns.append(others)
    return unflatten(structure, [f(*xs) for xs in zip(*columns, strict=True)])


def equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure and the same bytes in every array.

    Shapes and dtypes must agree; NaNs of the same bits are equal, 0.0 and -0.0 are not.
    Evaluates the arrays.

    >>> equal({"x": mx.array(float("nan"))}, {"x": mx.array(float("nan"))})
    True
    >>> equal([mx.array(1), 2], [mx.array(1), 2.0])
    False
    """
    arrays, structure = flatten(a)
    others, other_structure = flatten(b)
    if structure != other_structure:
        return False
    pairs = [(x, y) for x, y in zip(arrays, others, strict=True) if x is not y]
    if any(x.shape != y.shape or x.dtype != y.dtype for x, y in pairs):
        return False
    same = [mx.all(_bits(x) == _bits(y)) for x, y in pairs]
    mx.eval(same)
    return all(x.item() for x in same)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree, without evaluating them.

    An array that appears twice, as the same object, counts once.

    >>> x = mx.zeros((4, 8), mx.bfloat16)
    >>> nbytes((x, x, "static"))
    64
    """
    distinct = {id(x): x for x in leaves(tree)}
    return sum(x.size * x.dtype.size for x in distinct.values())


def evaluate(*trees: Any) -> None:
    """Evaluate every array of the trees, in one ``mx.eval``.

    >>> evaluate({"x": mx.zeros(2) + 1}, mx.ones(3))
    """
    mx.eval([leaves(tree) for tree in trees])


def _bits(x: mx.array) -> mx.array:
    return x.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[x.dtype.size])


def _difference(a: Any, b: Any, path: str) -> str:
    """Where two nodes that are not equal first differ."""
    if not (isinstance(a, tuple) and isinstance(b, tuple) and a[0] is b[0]):
        return f"{path} is {_kind(a)} in one tree and {_kind(b)} in another"
    (cls, data, nodes), (_, other_data, other_nodes) = a, b
    if data != other_data:
        return _data_difference(cls, data, other_data, path)
    if len(nodes) != len(other_nodes):
        return f"{path} has {len(nodes)} items in one tree and {len(other_nodes)} in another"
    place = next(i for i in range(len(nodes)) if nodes[i] != other_nodes[i])
    label = _labels(cls, data, len(nodes))[place]
    return _difference(nodes[place], other_nodes[place], path + label)


def _data_difference(cls: type, data: Any, other: Any, path: str) -> str:
    if cls is dict:
        return f"{path} has keys {data.ordered} in one tree and {other.ordered} in another"
    names = fields(cls)[1]
    place = next(i for i in range(len(names)) if data[i] != other[i])
    return _difference(data[place], other[place], f"{path}.{names[place]}")


def _kind(node: Any) -> str:
    if node is _LEAF:
        return "an array"
    if isinstance(node, _Static):
        return f"the static value {node.value!r} ({type(node.value).__name__})"
    return "None" if node[0] is types.NoneType else f"a {node[0].__name__}"


# Changing a part


def at(tree: Any, where: Callable[[Any], Any]) -> At:
    """A place in a tree, to be read or changed: ``.get()``, ``.set(value)``, ``.apply(f)``.

    ``where`` selects a leaf, a subtree or a static field with attributes and indices only,
    or a tuple of these; then values come and go as a tuple. It may go on into a static value
    that is an attrs class, a tuple, list or dict. The tree itself is unchanged and the parts
    that are not selected are shared. The records on the way are constructed again, with
    their validators. Raises ``TreeError`` when the place is not in the tree.

    >>> at({"layers": [1, 2]}, lambda t: t["layers"][0]).set("new")
    {'layers': ['new', 2]}
    >>> at((3, 4), lambda t: (t[0], t[1])).get()
    (3, 4)
    """
    selected = where(_Place(()))
    several = isinstance(selected, tuple | list)
    places = tuple(_resolve(tree, place) for place in (selected if several else [selected]))
    for i, place in enumerate(places):
        for other in places[:i]:
            shared = min(len(place), len(other))
            if place[:shared] == other[:shared]:
                raise TreeError(f"{_show(other)} and {_show(place)} overlap: select a part once")
    return At(tree, places, several)


@attrs.frozen
class At:
    """One place in a tree, or several; made by :func:`at`."""

    tree: Any
    places: tuple[tuple[_Step, ...], ...]
    several: bool

    def get(self) -> Any:
        """What is there; a tuple when several places were selected.

        >>> at([1, 2], lambda t: t[1]).get()
        2
        """
        found = tuple(_follow(self.tree, place) for place in self.places)
        return found if self.several else found[0]

    def set(self, value: Any) -> Any:
        """The tree with ``value`` there; a tuple of values when several were selected.

        Raises ``TreeError`` when the number of values is not that of the places.

        >>> at([1, 2], lambda t: t[1]).set("new")
        [1, 'new']
        """
        values = value if self.several else (value,)
        if not isinstance(values, tuple | list) or len(values) != len(self.places):
            raise TreeError(f"{len(self.places)} places need a tuple of as many values")
        tree = self.tree
        for place, new in zip(self.places, values, strict=True):
            tree = _put(tree, place, new)
        return tree

    def apply(self, f: Callable[[Any], Any]) -> Any:
        """The tree with ``f`` of what is there, place by place.

        >>> at([1, 2], lambda t: t[1]).apply(str)
        [1, '2']
        """
        found = tuple(f(_follow(self.tree, place)) for place in self.places)
        return self.set(found if self.several else found[0])


@attrs.frozen
class _Step:
    """An attribute or an index."""

    key: Any
    is_attribute: bool


class _Place:
    """Stands for a tree in ``where`` and records the attributes and indices taken."""

    __slots__ = ("_kvfun_steps",)

    def __init__(self, steps: tuple[_Step, ...]):
        self._kvfun_steps = steps

    def __getattr__(self, name: str) -> _Place:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Place((*self._kvfun_steps, _Step(name, True)))

    def __getitem__(self, key: Any) -> _Place:
        return _Place((*self._kvfun_steps, _Step(key, False)))

    # Without this, Python would iterate by calling __getitem__ for ever.
    def __iter__(self) -> Iterator[Any]:
        raise TreeError("`where` can use attributes and indices only; it cannot iterate")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TreeError("`where` can use attributes and indices only; it cannot call methods")


def _resolve(tree: Any, place: Any) -> tuple[_Step, ...]:
    """The steps to a place, each spelled in one way only."""
    if not isinstance(place, _Place):
        raise TreeError(f"`where` must return a part of its argument, not {place!r}")
    node, resolved = tree, []
    for step in place._kvfun_steps:
        found = _locate(node, step)
        if found is None:
            raise TreeError(
                f"{_show((*resolved, step))} is not in the tree: "
                f"{_show(resolved)} is a {type(node).__name__}"
            )
        resolved.append(found)
        node = _child(node, found)
    return tuple(resolved)


def _locate(node: Any, step: _Step) -> _Step | None:
    """The step in its only spelling if it leads from this node to a child, else None."""
    cls, key = type(node), step.key
    if step.is_attribute:
        if attrs.has(cls):
            return step if key in attrs.fields_dict(cls) else None
        known = _is_namedtuple(cls) and key in cls._fields
        return _Step(cls._fields.index(key), False) if known else None
    if cls is dict:
        return step if isinstance(key, str) and key in node else None
    sequence = cls is tuple or cls is list or _is_namedtuple(cls)
    if not sequence or type(key) is not int or not -len(node) <= key < len(node):
        return None
    return _Step(key % len(node), False)


def _child(node: Any, step: _Step) -> Any:
    return getattr(node, step.key) if step.is_attribute else node[step.key]


def _follow(tree: Any, steps: Sequence[_Step]) -> Any:
    return functools.reduce(_child, steps, tree)


def _put(node: Any, steps: Sequence[_Step], new: Any) -> Any:
    if not steps:
        return new
    step, *rest = steps
    value = _put(_child(node, step), rest, new)
    if step.is_attribute:
        argument = attrs.fields_dict(type(node))[step.key].alias or step.key
        return attrs.evolve(node, **{argument: value})
    if isinstance(node, dict):
        return {**node, step.key: value}
    items = [*node[: step.key], value, *node[step.key + 1 :]]
    return _close(type(node), None, items)


def _show(steps: Iterable[_Step]) -> str:
    return "tree" + "".join(f".{s.key}" if s.is_attribute else f"[{s.key!r}]" for s in steps)


# Transformations


def compile(f: Callable[..., Any], *, shapeless: bool = False) -> Compiled:
    """``mx.compile`` for a function of trees that returns a tree.

    It is traced once for every structure of the arguments and every shape and dtype of
    their arrays (rank instead of shape when ``shapeless``); so a static value that changes
    traces again, the numbers in an array never do. (MLX also traces once a stream, and so
    once a thread.) ``f`` must be pure: arrays it closes over, the global random state among
    them, are frozen into the trace. The 256 traces used last are kept; ``.traces`` counts how
    often ``f`` has been traced.

    >>> double = compile(lambda x: {"twice": 2 * x["once"]})
    >>> double({"once": mx.array(3)})
    {'twice': array(6, dtype=int32)}
    >>> double({"once": mx.array(4)})["twice"].item(), double.traces
    (8, 1)
    """
    return Compiled(f, shapeless)


class Compiled:
    """A compiled function of trees; made by :func:`compile`."""

    def __init__(self, f: Callable[..., Any], shapeless: bool):
        functools.update_wrapper(self, f)
        self.traces = 0
        self._function = f
        self._shapeless = shapeless
        self._entry = functools.lru_cache(_COMPILED_ENTRIES)(self._new_entry)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, from its trace for arguments like these."""
        # MLX makes a thread's stream on first use and traces again when it finds a new one.
        mx.default_stream(mx.default_device())
        arrays, structure = flatten((args, kwargs))
        signature = tuple([(x.ndim if self._shapeless else x.shape, x.dtype) for x in arrays])
        run, output = self._entry(structure, signature)
        results = run(*arrays)
        return unflatten(output[0], results)

    # As a plain function does, so that methods can be compiled.
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<compiled {self._function!r}, {self.traces} traces>"

    def _new_entry(self, structure: Structure, _signature: Any) -> tuple[Any, list[Structure]]:
        """A function of arrays, and the box in which its trace leaves the output's structure."""
        output: list[Structure] = []

        def traced(*arrays: mx.array) -> list[mx.array]:
            args, kwargs = unflatten(structure, arrays)
            results, output[:] = _flatten_boxed(self._function(*args, **kwargs))
            self.traces += 1
            return results

        return mx.compile(traced, shapeless=self._shapeless), output


def vmap(f: Callable[..., Any], in_axes: Any = 0, out_axes: int = 0) -> Callable[..., Any]:
    """``mx.vmap`` for a function of trees that returns a tree.

    ``in_axes`` is an axis of every array of every positional argument, or a tuple with an
    axis or None (not mapped) for each; keyword arguments are not mapped. Static values pass
    through. Every array of the result has the mapped axis at ``out_axes``.

    Raises ``TreeError`` when ``in_axes`` does not fit the arguments or nothing is mapped.

    >>> add = vmap(lambda x, y: {"sum": x["a"] + y}, in_axes=(0, None))
    >>> add({"a": mx.array([1, 2])}, mx.array(10))
    {'sum': array([11, 12], dtype=int32)}
    """

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        arrays, structure = flatten(args)
        axes = _leaf_axes(in_axes, args)
        output: list[Structure] = []

        def flat(*xs: mx.array) -> list[mx.array]:
            results, output[:] = _flatten_boxed(f(*unflatten(structure, xs), **kwargs))
            return results

        results = mx.vmap(flat, in_axes=axes, out_axes=out_axes)(*arrays)
        return unflatten(output[0], results)

    return mapped


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """``mx.value_and_grad`` for a function of trees that returns a scalar array.

    The gradient is taken with respect to the floating and complex arrays of the chosen
    positional argument (or of several: then it is a tuple). It is the same tree with None
    in place of every other array. With ``has_aux``, ``f`` returns ``(scalar, tree)`` and the
    value is that pair.

    Raises ``TreeError`` when there is nothing to differentiate or the value is no scalar.

    >>> square = value_and_grad(lambda p: p["w"] ** 2)
    >>> square({"w": mx.array(3.0), "step": mx.array(1)})
    (array(9, dtype=float32), {'w': array(6, dtype=float32), 'step': None})
    """
    several = not isinstance(argnums, int)
    chosen = tuple(argnums) if several else (argnums,)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        arrays, structure = flatten(tuple(args[i] for i in chosen))
        varied = [i for i, x in enumerate(arrays) if mx.issubdtype(x.dtype, mx.inexact)]
        if not varied:
            raise TreeError(f"arguments {chosen} hold no floating or complex array")
        output: list[Structure] = []

        def flat(xs: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
            filled = dict(zip(varied, xs, strict=True))
            new = unflatten(structure, [filled.get(i, x) for i, x in enumerate(arrays)])
            value, aux = _scalar(f(*_substitute(args, chosen, new), **kwargs), has_aux)
            results, output[:] = _flatten_boxed(aux)
            return value, results

        (value, results), slopes = mx.value_and_grad(flat)([arrays[i] for i in varied])
        by_leaf = dict(zip(varied, slopes, strict=True))
        gradient = unflatten(structure, [by_leaf.get(i) for i in range(len(arrays))])
        aux = unflatten(output[0], results)
        return (value, aux) if has_aux else value, gradient if several else gradient[0]

    return differentiated


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of :func:`value_and_grad` alone, or ``(gradient, aux)`` with ``has_aux``.

    >>> grad(lambda p: p[0] * p[1])((mx.array(3.0), mx.array(2.0)))
    (array(2, dtype=float32), array(3, dtype=float32))
    """
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @functools.wraps(f)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def _flatten_boxed(tree: Any) -> tuple[list[mx.array], tuple[Structure]]:
    arrays, structure = flatten(tree)
    return arrays, (structure,)


def _leaf_axes(in_axes: Any, args: tuple[Any, ...]) -> tuple[int | None, ...]:
    """The axis of every array of the arguments."""
    by_argument = in_axes if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
    if len(by_argument) != len(args):
        raise TreeError(f"in_axes {in_axes} do not fit {len(args)} positional arguments")
    axes = [
        axis
        for axis, arg in zip(by_argument, args, strict=True)
        for _ in range(structure(arg).num_leaves)
    ]
    if all(axis is None for axis in axes):
        raise TreeError("no array is mapped: give at least one argument with arrays an axis")
    return tuple(axes)


def _substitute(args: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    result = list(args)
    for place, value in zip(places, new, strict=True):
        result[place] = value
    return result


def _scalar(result: Any, has_aux: bool) -> tuple[mx.array, Any]:
    value, aux = result if has_aux else (result, None)
    if not isinstance(value, mx.array) or value.ndim != 0:
        shown = value.shape if isinstance(value, mx.array) else type(value).__name__
        raise TreeError(f"the value to differentiate must be a scalar array, not {shown}")
    return value, aux
