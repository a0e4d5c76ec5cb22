"""Records: frozen, slotted, shared by their copies, and shown without being evaluated."""

import copy
import pickle

import attrs
import mlx.core as mx
import pytest

from kvfun.record import fields, is_record, record, replace, static


@record
class Codec:
    mean: mx.array
    bits: int = static(default=4, validator=attrs.validators.in_([2, 3, 4, 8]))
    name: str = static(default="kv", converter=str)


@record
class Cache:
    keys: mx.array
    codec: Codec
    extra: object = None
    window: int | None = static(default=None)


@record
class Named:
    _hidden: int = static(default=0)
    only_by_name: int = static(default=1, kw_only=True)


@record
class Single:
    x: object


@record
class Nothing:
    pass


@pytest.fixture
def cache() -> Cache:
    return Cache(mx.zeros((1, 8, 256, 64), mx.bfloat16), Codec(mx.zeros(64)), window=128)


def test_arguments_by_position_and_by_name():
    x = mx.zeros(1)
    assert Codec(x, 8).bits == 8
    assert Codec(mean=x, bits=8, name="n").mean is x


def test_nothing_can_be_assigned_deleted_or_added(cache):
    with pytest.raises(AttributeError):
        cache.keys = mx.zeros(1)
    with pytest.raises(AttributeError):
        del cache.keys
    with pytest.raises(AttributeError):
        cache.other = 1
    assert not hasattr(cache, "__dict__")


def test_validators_and_converters_of_static_fields_run():
    with pytest.raises(ValueError, match="bits"):
        Codec(mx.zeros(1), bits=5)
    assert Codec(mx.zeros(1), name=3).name == "3"


def test_static_takes_a_factory():
    @record
    class Sinks:
        positions: tuple = static(factory=tuple)

    assert Sinks().positions == ()


def test_fields_splits_children_from_static_fields():
    assert fields(Cache) == (("keys", "codec", "extra"), ("window",))
    assert fields(Nothing) == ((), ())


def test_fields_of_something_else_is_an_error():
    with pytest.raises(TypeError, match="not a record class"):
        fields(int)


def test_is_record(cache):
    assert is_record(cache)
    assert not any(is_record(x) for x in (Cache, 1, None, mx.zeros(1), (cache,)))


def test_replace_changes_one_field_and_shares_the_others(cache):
    new = replace(cache, window=64)
    assert (new.window, cache.window) == (64, 128)
    assert new.keys is cache.keys
    assert new.codec is cache.codec


def test_replace_runs_validators(cache):
    with pytest.raises(ValueError, match="bits"):
        replace(cache.codec, bits=5)


def test_replace_of_an_unknown_field_names_the_known_ones(cache):
    with pytest.raises(TypeError, match=r"no field 'windows'.*'keys'"):
        replace(cache, windows=1)


def test_replace_of_something_else_is_an_error():
    with pytest.raises(TypeError, match="not a record class"):
        replace(3, x=1)


def test_replace_takes_private_and_keyword_only_fields_by_their_arguments():
    new = replace(Named(hidden=3), only_by_name=5)
    assert (new._hidden, new.only_by_name) == (3, 5)
    assert replace(new, hidden=4)._hidden == 4
    assert replace(Single(1), x=2).x == 2
    assert is_record(replace(Nothing()))


def test_equality_and_hash_are_those_of_identity(cache):
    twin = replace(cache)
    assert cache == cache
    assert cache != twin
    assert len({cache, twin}) == 2


def test_copies_are_the_record_itself(cache):
    assert copy.copy(cache) is cache
    assert copy.deepcopy(cache) is cache
    assert copy.deepcopy([cache])[0] is cache


def test_pickle_round_trip(cache):
    twin = pickle.loads(pickle.dumps(cache))
    assert (twin.window, twin.codec.bits, twin.keys.dtype) == (128, 4, mx.bfloat16)
    assert mx.array_equal(twin.keys, cache.keys)


def test_repr_shows_dtypes_and_shapes(cache):
    assert repr(cache.codec) == "Codec(mean=f32[64], bits=4, name='kv')"
    assert "".join(repr(cache).split()) == (
        "Cache(keys=bf16[1,8,256,64],codec=Codec(mean=f32[64],bits=4,name='kv'),extra=None,window=128)"
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (mx.bfloat16, "bf16"),
        (mx.float16, "f16"),
        (mx.float32, "f32"),
        (mx.uint8, "u8"),
        (mx.uint32, "u32"),
        (mx.int32, "i32"),
        (mx.bool_, "bool"),
        (mx.complex64, "c64"),
    ],
)
def test_repr_has_a_short_name_for_every_dtype(dtype, name):
    assert repr(Single(mx.zeros((2, 1), dtype))) == f"Single(x={name}[2,1])"
    assert repr(Single(dtype)) == f"Single(x={name})"
    assert repr(Single(mx.zeros((), dtype))) == f"Single(x={name}[])"


def test_repr_reaches_arrays_in_containers():
    assert repr(Single([{"a": (mx.zeros(3), None)}])) == "Single(x=[{'a': (f32[3], None)}])"


def test_repr_does_not_evaluate():
    before = mx.get_active_memory()
    lazy = mx.zeros((1024, 1024)) + 1
    assert repr(Single(lazy)) == "Single(x=f32[1024,1024])"
    assert mx.get_active_memory() - before < lazy.nbytes


def test_a_method_that_the_class_defines_is_kept():
    @record
    class Terse:
        x: int = static(default=0)

        def __repr__(self):
            return "terse"

    assert repr(Terse()) == "terse"
    assert repr(Single(Terse())) == "Single(x=terse)"
