"""The laws of ``kvfun.testing`` on chains: those that age, and those that were sealed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import settings

import kvfun
from kvfun import testing as t
from kvfun.codecs import parse
from kvfun.errors import GeometryError, KVFunError, RollbackError, SpecError
from kvfun.testing import LAWS, VERBS, CacheMachine, Recipe, chains, check_laws, law_suite, layouts
from kvfun.testing._checks import same_columns
from kvfun.testing._suite import SLOW

SEALING = (*VERBS, "seal")


class TestAgeing(law_suite(chains())):
    pass


class TestSealed(law_suite(layouts(), allowed=SEALING)):
    pass


class TestSealedWhileAgeing(law_suite(chains(), allowed=SEALING)):
    """What is raw then stays raw, and all that comes is encoded at once."""


class AgeingMachine(CacheMachine):
    recipes = chains()


class LargeAgeingMachine(AgeingMachine):
    small = False


class SealedMachine(CacheMachine):
    recipes = layouts()
    allowed = SEALING


class LargeSealedMachine(SealedMachine):
    small = False


class SealedWhileAgeingMachine(CacheMachine):
    recipes = chains()
    allowed = SEALING


FEW = settings(max_examples=max(5, settings().max_examples // 4))

TestAgeingMachine = AgeingMachine.TestCase
TestLargeAgeingMachine = LargeAgeingMachine.TestCase
TestSealedMachine = SealedMachine.TestCase
TestLargeSealedMachine = LargeSealedMachine.TestCase
TestSealedWhileAgeingMachine = SealedWhileAgeingMachine.TestCase
TestLargeAgeingMachine.settings = FEW
TestLargeSealedMachine.settings = FEW


def parses(spec: str) -> bool:
    try:
        parse(spec)
    except SpecError:
        return False
    return True


FAMILIES = ("kv4", "kv8-g32", "k8v4", "bf16", "mxfp8")
WINDOWS = {
    "full": {},
    "window": {"window": 4},
    "wide": {"window": 9},
    "sinks": {"window": 7, "sinks": 2, "reserve": 2},
    "chunk": {"chunk": 6},
    "both": {"window": 8, "chunk": 9, "sinks": 1},
}
AGES = {
    "residual": {"residual": 3, "block": 2},
    "sinks": {"raw_sinks": 3},
    "both": {"residual": 1, "block": 4, "raw_sinks": 2},
    "large": {"residual": 64, "block": 64, "raw_sinks": 4},
}
HISTORY = (t.Append(5), t.Rollback((2, 1)), t.Append(9, 3), t.Join((2,), 1))
LATER = (t.Append(1, 6), t.Take((1, 0)), t.Rollback((1,)), t.Append(6, 1))


def case(before=HISTORY, later=LATER, blocks=(3, 11), small=True) -> t.Case:
    return t.Case(
        shape=t.Shape(2, 64, 64, mx.bfloat16, mx.bfloat16),
        batch=2,
        before=before,
        blocks=blocks,
        later=later,
        others=((), (t.Append(3),)),
        spec="kv8",
        group=2,
        query_dtype=mx.bfloat16,
        sinks=True,
        small=small,
    )


QUICK = {name: law for name, law in LAWS.items() if name not in SLOW}


@pytest.mark.parametrize("spec", filter(parses, FAMILIES))
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("age", AGES)
def test_all_laws_of_every_ageing_chain(spec, window, age):
    recipe = Recipe(spec, **WINDOWS[window], **AGES[age])
    if age == "large":
        before = (t.Append(130, 2), t.Append(1, 1), t.Rollback((1, 70)), t.Append(66, 3))
        check_laws(recipe, case(before, blocks=(3, 62), small=False), QUICK)
    else:
        check_laws(recipe, case(), QUICK)


@pytest.mark.parametrize("spec", filter(parses, FAMILIES))
@pytest.mark.parametrize("window", WINDOWS)
def test_all_laws_of_every_sealed_chain(spec, window):
    before = (*HISTORY[:3], t.Seal("kv8"), t.Append(4, 2), t.Rollback((2,)), t.Seal(spec))
    check_laws(Recipe("plain", **WINDOWS[window]), case((*before, HISTORY[3])), QUICK)
    before = (t.Append(6, 1), t.Seal("bf16"), t.Append(1, 3), t.Convert("k8v4"), t.Seal())
    check_laws(Recipe(spec, **WINDOWS[window]), case(before), QUICK)


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("age", [*AGES, "sealed"])
def test_one_row_fetches_the_columns_of_one_kv_at_every_offset(window, sinks, age):
    """Not one more that is hidden, as of raw first tokens that a window is sliding through."""
    world = t.World(Recipe("kv8-g32", window=window, sinks=sinks, **AGES.get(age, {})), t.Shape())
    handle = world.begin()
    for offset in range(1, 17):
        handle = world.apply(handle, t.Append(1, offset))
        if age == "sealed" and offset % 4 == 3:
            handle = world.apply(handle, t.Seal())
        same_columns(handle.cache, world.one(handle), f"at offset {offset}")


# -- what the specification says in so many words ------------------------------------------------


SHAPE = t.Shape(kv_heads=1, head_dim=64, value_dim=64)


def encoded(cache, spec: str, keys: mx.array, raw: int = 0) -> list[int]:
    """The positions that are shown as the codec makes them; the others must be raw."""
    own = kvfun.fetch(kvfun.append(kvfun.empty(spec), keys, keys))[0]
    shown = kvfun.fetch(cache)[0]
    assert shown.shape == keys.shape
    found = []
    for p in range(keys.shape[2]):
        if mx.array_equal(shown[:, :, p], own[:, :, p]):
            found.append(p)
        else:
            assert mx.array_equal(shown[:, :, p], keys[:, :, p]), f"position {p} is neither"
    return found


@pytest.fixture
def keys():
    return SHAPE.block(5, 1, 40)[0]


@pytest.mark.parametrize(
    ("numbers", "offset", "expected"),
    [
        ({"residual": 4, "block": 3}, 6, range(0)),
        ({"residual": 4, "block": 3}, 7, range(3)),
        ({"residual": 4, "block": 3}, 9, range(3)),
        ({"residual": 4, "block": 3}, 10, range(6)),
        ({"residual": 4, "block": 3}, 40, range(36)),
        ({"residual": 4, "block": 3, "raw_sinks": 2}, 9, range(2, 5)),
        ({"residual": 4, "block": 3, "sinks": 2}, 9, range(2, 5)),
        ({"residual": 4, "block": 3, "sinks": 3, "raw_sinks": 2}, 10, range(3, 6)),
        ({"residual": 4}, 67, range(0)),
        ({"raw_sinks": 2}, 1, range(0)),
        ({"raw_sinks": 2}, 5, range(2, 5)),
        ({"raw_sinks": 2, "sinks": 4}, 5, range(4, 5)),
    ],
)
def test_which_tokens_are_encoded(keys, numbers, offset, expected):
    keys = mx.tile(keys, (1, 1, 2, 1))[:, :, :offset]
    whole = kvfun.append(kvfun.empty("kv2-g32", **numbers), keys, keys)
    assert encoded(whole, "kv2-g32", keys) == list(expected)
    assert isinstance(whole, kvfun.Chain)
    steps = kvfun.empty("kv2-g32", **numbers)
    for p in range(offset):
        steps = kvfun.append(steps, keys[:, :, p : p + 1], keys[:, :, p : p + 1])
    assert encoded(steps, "kv2-g32", keys) == list(expected)


def test_what_is_encoded_stays_so_and_blocks_count_from_there(keys):
    cache = kvfun.append(
        kvfun.empty("kv2-g32", residual=4, block=3), keys[:, :, :10], keys[:, :, :10]
    )
    back = kvfun.rollback(cache, 6)
    assert encoded(back, "kv2-g32", keys[:, :, :4]) == [0, 1, 2, 3]
    again = kvfun.append(back, keys[:, :, 4:10], keys[:, :, 4:10])
    assert encoded(again, "kv2-g32", keys[:, :, :10]) == [0, 1, 2, 3]
    again = kvfun.append(again, keys[:, :, 10:11], keys[:, :, 10:11])
    assert encoded(again, "kv2-g32", keys[:, :, :11]) == list(range(7))


def test_no_residual_and_no_raw_sinks_is_no_chain():
    assert isinstance(kvfun.empty("kv4", sinks=4, window=8), kvfun.KV)
    assert isinstance(kvfun.empty("kv4", block=8), kvfun.KV)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"residual": 3}, {"residual": 4}),
        ({"residual": 3}, {"residual": 3, "block": 2}),
        ({"residual": 3}, {"residual": 3, "raw_sinks": 1}),
        ({"raw_sinks": 1}, {"raw_sinks": 2}),
        ({"raw_sinks": 1}, {"raw_sinks": 1, "window": 4}),
    ],
)
@pytest.mark.parametrize("filled", [True, False])
def test_chains_of_other_numbers_are_not_joined(keys, one, other, filled):
    pair = [kvfun.empty("kv4", **numbers) for numbers in (one, other)]
    if filled:
        pair = [kvfun.append(cache, keys, keys) for cache in pair]
    with pytest.raises(GeometryError):
        kvfun.concat(pair)
    with pytest.raises(KVFunError):
        kvfun.concat([pair[0], kvfun.empty("kv4")])


def test_chains_of_other_codecs_are_not_joined(keys):
    pair = [kvfun.append(kvfun.empty(s, residual=3), keys, keys) for s in ("kv4", "kv8")]
    with pytest.raises(kvfun.errors.CodecError):
        kvfun.stack(pair)
    sealed = kvfun.append(kvfun.empty("kv4"), keys, keys)
    pair = [kvfun.seal(kvfun.convert(sealed, s), "kv4") for s in ("kv4", "kv8")]
    with pytest.raises(kvfun.errors.CodecError):
        kvfun.stack(pair)
    with pytest.raises(KVFunError):
        kvfun.stack([pair[0], kvfun.seal(pair[0])])


def test_sealing_what_cannot_be_sealed(keys):
    short = kvfun.append(kvfun.empty("kv4", sinks=4), keys[:, :, :3], keys[:, :, :3])
    padded = kvfun.append(kvfun.empty("kv4", left_padding=[4]), keys[:, :, :3], keys[:, :, :3])
    for cache in (short, padded, kvfun.empty("kv4", sinks=1), kvfun.empty("kv4", left_padding=[1])):
        with pytest.raises(GeometryError):
            kvfun.seal(cache)
    with pytest.raises(SpecError):
        kvfun.seal(kvfun.append(short, keys, keys), "kv9")


def test_a_sealed_chain_keeps_its_sinks(keys):
    chain = kvfun.seal(kvfun.append(kvfun.empty("kv4", sinks=4), keys, keys))
    assert kvfun.max_rollback(chain) == (36,)
    with pytest.raises(RollbackError):
        kvfun.rollback(chain, 37)


def test_an_empty_cache_can_be_sealed(keys):
    chain = kvfun.append(kvfun.seal(kvfun.empty("kv8"), "kv2-g32"), keys, keys)
    assert encoded(chain, "kv2-g32", keys) == list(range(40))
    assert kvfun.offsets(chain) == (40,)


def test_a_tail_that_was_rolled_back_into_the_segment(keys):
    chain = kvfun.seal(
        kvfun.append(kvfun.empty("plain"), keys[:, :, :9], keys[:, :, :9]), "kv2-g32"
    )
    chain = kvfun.append(chain, keys[:, :, 9:12], keys[:, :, 9:12])
    assert encoded(chain, "kv2-g32", keys[:, :, :12]) == [9, 10, 11]
    back = kvfun.append(kvfun.rollback(chain, 7), keys[:, :, 5:12], keys[:, :, 5:12])
    assert encoded(back, "kv2-g32", keys[:, :, :12]) == list(range(5, 12))
    assert encoded(chain, "kv2-g32", keys[:, :, :12]) == [9, 10, 11]
