"""The shell around one cache value: what other people's caches got wrong under mlx-lm.

Numbers in names are those of ``reference/peers-mlx.md``, section 4.
"""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

import kvfun
from kvfun import storage, tree
from kvfun.errors import CorruptError, RollbackError, UnsupportedError
from kvfun.interop.mlx_lm import KVFunCache, load, make_prompt_cache
from kvfun.interop.mlx_lm import _shell as shell_module
from tests.interop import architectures as archs
from tests.interop import oracle

HEADS, DIM = 2, 64


def shell(spec: str = "plain", packed: bool = False, **policy: Any) -> KVFunCache:
    return KVFunCache(kvfun.empty(spec, **policy), packed)


def block(length: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, 1, HEADS, length, DIM), key=mx.random.key(seed))
    return keys.astype(dtype), values.astype(dtype)


def filled(spec: str = "plain", length: int = 40, **more: Any) -> KVFunCache:
    cache = shell(spec, **more)
    cache.update_and_fetch(*block(length))
    return cache


def same(x: Any, y: Any) -> bool:
    pairs = zip(tree_flatten(x), tree_flatten(y), strict=True)
    return all(mx.array_equal(a, b).item() for (_, a), (_, b) in pairs)


SPECS = [("plain", False), ("bf16", False), ("kv8", False), ("kv8", True), ("k8v4", False)]
SPECS += [("bf16+kv3-g32", False), ("kv4-g128-pad", False), ("mxfp8+nvfp4", False)]
POLICIES = [{}, {"window": 12}, {"window": 12, "sinks": 4}, {"chunk": 16}]
POLICIES += [{"window": 12, "reserve": 8}, {"window": 9, "sinks": 3, "reserve": 5}]


@pytest.fixture(params=SPECS, ids=lambda p: p[0] + ("-packed" if p[1] else ""))
def spec(request):
    return {"spec": request.param[0], "packed": request.param[1]}


@pytest.fixture(params=POLICIES, ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()) or "full")
def policy(request):
    return request.param


# -- what a shell has, and what it must not have ------------------------------------------------


def test_28_bits_only_with_group_size_and_triples(spec, policy):
    cache = shell(**spec, **policy)
    keys, values = cache.update_and_fetch(*block(5))
    assert hasattr(cache, "bits") == hasattr(cache, "group_size") == spec["packed"]
    for side in (keys, values):
        if spec["packed"]:
            packed, scales, biases = side
            assert packed.dtype == mx.uint32
            width = DIM * cache.bits // 32
            assert packed.shape == (1, HEADS, 5, width)
            assert scales.shape == biases.shape == (1, HEADS, 5, DIM // cache.group_size)
        else:
            assert side.shape == (1, HEADS, 5, DIM)


@pytest.mark.parametrize("member", ["merge", "to_quantized", "extract", "prepare", "finalize"])
def test_21_no_member_that_makes_mlx_lm_exchange_the_cache(spec, member):
    assert not hasattr(shell(**spec), member)


def test_125_all_members_without_mlx_lms_base_class(spec, policy):
    assert not issubclass(KVFunCache, mlx_lm_cache._BaseCache)
    members = [name for name in vars(mlx_lm_cache._BaseCache) if not name.startswith("_")]
    members += ["offset", "update_and_fetch", "make_mask", "keys", "values", "keys_and_values"]
    members += ["trim", "maybe_trim_front", "start_position"]
    cache = shell(**spec, **policy)
    assert [name for name in members if not hasattr(cache, name)] in ([], ["merge"])
    cache.update_and_fetch(*block(3))
    assert all(hasattr(cache, name) for name in members if name != "merge")


def test_an_empty_cache_is_true_and_is_asked_for_masks(spec, policy):
    cache = shell(**spec, **policy)
    assert cache
    assert not hasattr(KVFunCache, "__len__")
    assert cache.empty()
    hidden = mx.zeros((1, 7, 4))
    mask = create_attention_mask(hidden, cache, return_array=True)
    assert mask.shape == (7, 7)


def test_empty_members(spec, policy):
    cache = shell(**spec, **policy)
    assert (cache.offset, cache.size(), cache.nbytes, cache.start_position) == (
        0,
        0,
        0,
        policy.get("sinks", 0),
    )
    assert cache.keys is None
    assert cache.values is None
    assert cache.is_trimmable()
    assert cache.trim(3) == 0
    mx.eval(cache.state)
    again = copy.deepcopy(cache)
    assert again.empty()
    assert "KVFunCache" in repr(cache)
    cache.maybe_trim_front()
    cache.update_and_fetch(*block(2))
    assert again.empty()
    assert not cache.empty()
    assert cache.size() == cache.offset == 2


@pytest.mark.parametrize(
    ("bits", "dim"), [(b, d) for b in (2, 3, 4, 5, 6, 8) for d in (64, 96, 256)]
)
def test_40_all_bits_at_all_head_dims(bits, dim):
    cache = shell(f"kv{bits}-g32", packed=True)
    keys = mx.random.normal((1, HEADS, 9, dim))
    cache.update_and_fetch(keys, keys)
    queries = mx.random.normal((1, 2 * HEADS, 1, dim))
    out = scaled_dot_product_attention(
        queries + 0, *cache.keys_and_values(), cache=cache, scale=0.1, mask=None
    )
    plain = kvfun.fetch(cache.record)
    wanted = mx.fast.scaled_dot_product_attention(queries, *plain, scale=0.1)
    assert mx.allclose(out, wanted, atol=1e-4).item()


# -- positions and masks ------------------------------------------------------------------------


def test_389_offset_is_the_position_not_the_rows(spec, policy):
    cache, seen = shell(**spec, **policy), 0
    for length in (5, 1, 30, 1, 1, 300, 1, 290, 1):
        captured = cache.offset
        cache.update_and_fetch(*block(length))
        assert captured == seen  # 70: models hold it across the update
        seen += length
        assert cache.offset == seen
        assert type(cache.offset) is int
        narrow = policy.get("window", policy.get("chunk", seen))
        assert cache.size() <= min(seen, narrow + policy.get("sinks", 0))


def test_offset_of_rows_that_differ_is_an_array_of_its_own():
    cache = shell(left_padding=[2, 0])
    keys = mx.zeros((2, HEADS, 5, DIM))
    cache.update_and_fetch(keys, keys)
    before = cache.offset
    cache.update_and_fetch(keys, keys)
    assert before.tolist() == [3, 5]
    assert cache.offset.tolist() == [8, 10]


def numbered(start: int, length: int, tag: int) -> tuple[mx.array, mx.array]:
    """Keys that say their position, values that say who wrote them."""
    keys = mx.broadcast_to(mx.arange(start, start + length).reshape(1, 1, -1, 1), (1, 1, length, 4))
    return keys.astype(mx.float32), mx.full((1, 1, length, 4), tag, mx.float32)


policies = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(1, 14),
        "sinks": st.integers(0, 5),
        "chunk": st.integers(1, 14),
        "reserve": st.integers(0, 9),
    },
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 2, 3, 7, 20, 260])),
        st.tuples(st.just("trim"), st.integers(0, 25)),
        st.tuples(st.just("copy"), st.just(0)),
    ),
    min_size=1,
    max_size=25,
)


@given(policies, steps, st.data())
def test_masks_asked_before_the_update_against_positions(policy, steps, data):
    """370, 6, 7, 11: every query sees exactly the positions it should, of its own history."""
    cache, history = shell(**policy), []
    for tag, (what, count) in enumerate(steps):
        if what == "copy":
            cache = copy.deepcopy(cache)
            continue
        if what == "trim":
            trimmed(cache, history, count)
            continue
        width = data.draw(st.sampled_from([None, None, 3, 10, 400]))
        as_array = data.draw(st.booleans())
        mask = cache.make_mask(count, return_array=as_array, window_size=width)
        keys, values = cache.update_and_fetch(*numbered(len(history), count, tag))
        history += [tag] * count
        positions = keys[0, 0, :, 0].tolist()
        assert values[0, 0, :, 0].tolist() == [history[int(p)] for p in positions]
        assert positions == sorted(set(positions))
        check_mask(mask, positions, range(len(history) - count, len(history)), policy, width)
        if as_array and count > 1:
            assert isinstance(mask, mx.array)
        assert cache.offset == len(history)


def trimmed(cache: KVFunCache, history: list[int], count: int) -> None:
    before = cache.record
    most = kvfun.max_rollback(before)[0]
    try:
        taken = cache.trim(count)
    except RollbackError:
        assert min(count, len(history)) > most
        assert cache.record is before
    else:
        assert taken == min(count, len(history)) <= most
        del history[len(history) - taken :]
    assert cache.offset == len(history)


def check_mask(mask, positions, queries, policy, width) -> None:
    wanted = oracle.visible(
        queries, queries.stop, policy.get("window"), policy.get("sinks", 0), policy.get("chunk")
    )
    if width is not None:
        narrow = oracle.visible(queries, queries.stop, width, 0, None)
        wanted = [
            [a and b for a, b in zip(x, y, strict=True)]
            for x, y in zip(wanted, narrow, strict=True)
        ]
    shape = (len(queries), len(positions))
    if mask is None:
        seen = [[True] * shape[1]] * shape[0]
    elif isinstance(mask, str):
        assert mask == "causal"
        ends = range(shape[1] - shape[0], shape[1])
        seen = [[column <= end for column in range(shape[1])] for end in ends]
    else:
        assert mask.dtype == mx.bool_
        seen = mx.broadcast_to(mask.reshape(-1, mask.shape[-1]), shape).tolist()
    for sees, should in zip(seen, wanted, strict=True):
        got = {p for p, shown in zip(positions, sees, strict=True) if shown}
        assert got == {p for p, shown in enumerate(should) if shown}


def test_masks_of_one_query_are_arrays_only_where_something_is_hidden():
    cache = shell()
    cache.update_and_fetch(*block(30))
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, window_size=31) is None
    assert cache.make_mask(1, window_size=30).tolist() == [[[[False] + [True] * 30]]]
    assert cache.make_mask(4) == "causal"
    assert cache.make_mask(4, return_array=True).shape == (4, 34)


def test_chunks_are_counted_from_start_position():
    cache = shell(chunk=16)
    for length in (5, 20, 1, 30, 1):
        start, offset = cache.start_position, cache.offset
        keys, _ = cache.update_and_fetch(*block(length))
        assert start == offset // 16 * 16
        assert keys.shape[2] == offset + length - start


def test_6_and_16_a_window_stays_within_its_bound():
    cache, window, step = shell("kv8", packed=True, window=128, sinks=4), 128, 96
    bound = cache.record.geometry.policy.limit
    assert bound == 512
    token = cache.record.codec.token_nbytes(HEADS, DIM, DIM, mx.float32)
    for number in range(20):
        keys, _ = cache.update_and_fetch(*block(step, number))
        assert keys[0].shape[2] <= window + 4 + step - 1
        assert cache.nbytes <= bound * token
    assert cache.size() == window + 4


# -- arrays that are not ours to change ---------------------------------------------------------


def test_a_held_view_does_not_change(spec, policy):
    cache = shell(**spec, **policy)
    held = cache.update_and_fetch(*block(30))
    state = cache.state
    frozen = [mx.array(x) for _, x in tree_flatten(held)]
    for number in range(5):
        cache.update_and_fetch(*block(1, number))
        mx.eval(cache.state)
    cache.trim(1)
    cache.update_and_fetch(*block(300))
    mx.eval(cache.state)
    assert same(frozen, [x for _, x in tree_flatten(held)])
    arrays = [x for _, x in tree_flatten(state) if isinstance(x, mx.array)]
    assert arrays
    assert all(x.shape[2] == 30 or policy for x in arrays)


def test_the_callers_arrays_do_not_change(spec, policy):
    cache, (keys, values) = shell(**spec, **policy), block(30)
    before = mx.array(keys), mx.array(values)
    cache.update_and_fetch(keys, values)
    cache.update_and_fetch(*block(3, 1))
    mx.eval(cache.state)
    assert same(before, (keys, values))


def test_a_copy_costs_nothing_and_is_independent(spec, policy):
    cache = shell(**spec, **policy)
    mx.eval(cache.update_and_fetch(*block(200)), cache.state)
    mx.synchronize()
    before = mx.get_active_memory()
    copies = [copy.deepcopy(cache) for _ in range(100)]
    assert mx.get_active_memory() == before
    assert all(one.record is cache.record for one in copies)
    assert all(hasattr(one, "bits") == spec["packed"] for one in copies)
    frozen = [mx.array(x) for _, x in tree_flatten(copies[0].keys_and_values())]
    cache.update_and_fetch(*block(1, 1))
    other = copies[1]
    other.update_and_fetch(*block(9, 2))
    mx.eval(cache.state, other.state)
    assert same(frozen, [x for _, x in tree_flatten(copies[0].keys_and_values())])
    assert (cache.offset, other.offset, copies[0].offset) == (201, 209, 200)


def test_copies_right_after_a_block_hand_out_that_block():
    cache = filled(window=12)
    assert copy.deepcopy(cache).keys_and_values()[0].shape[2] == 40
    assert copy.copy(cache).block == 40


@pytest.mark.parametrize("packed", [False, True])
def test_52_and_82_an_evaluated_cache_holds_no_graph(packed, policy):
    cache = shell("kv8", packed, **policy)
    for number in range(4):
        cache.update_and_fetch(*block(7, number))
        mx.eval(cache.state)
    text = io.StringIO()
    mx.export_to_dot(text, *tree.leaves(cache.record))
    assert "->" not in text.getvalue()


# -- going back ---------------------------------------------------------------------------------


def test_trim_returns_what_was_taken_and_is_exact(spec):
    cache = filled(**spec, length=30)
    wanted = [mx.array(x) for _, x in tree_flatten(cache.keys_and_values())]
    cache.update_and_fetch(*block(7, 3))
    assert cache.trim(7) == 7
    assert cache.offset == 30
    assert same(wanted, [x for _, x in tree_flatten(cache.keys_and_values())])
    assert cache.trim(100) == 30  # at most what there is
    assert cache.offset == cache.size() == 0
    assert cache.trim(1) == 0
    cache.update_and_fetch(*block(4, 9))
    fresh = shell(**spec)
    fresh.update_and_fetch(*block(4, 9))
    pairs = zip(
        tree_flatten(cache.keys_and_values()), tree_flatten(fresh.keys_and_values()), strict=True
    )
    assert all(mx.array_equal(x, y).item() for (_, x), (_, y) in pairs)


def test_7_a_wrapped_window_goes_back_exactly_or_refuses():
    cache = shell(window=12)
    cache.update_and_fetch(*block(600))
    assert cache.trim(600) == 600  # the last block, whole
    cache.update_and_fetch(*block(600))
    for number in range(300):
        cache.update_and_fetch(*block(1, number))
    before, most = cache.record, kvfun.max_rollback(cache.record)[0]
    with pytest.raises(RollbackError, match="can give back"):
        cache.trim(most + 1)
    assert cache.record is before
    assert cache.trim(most) == most
    assert cache.keys_and_values()[0].shape[2] == 12


def test_trim_refuses_negative_counts():
    with pytest.raises(RollbackError):
        filled().trim(-1)


def test_is_trimmable_means_that_an_exact_trim_is_to_be_had():
    cache = shell(window=12)
    cache.update_and_fetch(*block(500))
    assert cache.is_trimmable()  # nothing has been dropped
    for number in range(20):
        cache.update_and_fetch(*block(1, number))
    assert not cache.is_trimmable()  # LRUPromptCache would take back anything
    cache.update_and_fetch(*block(4))
    assert cache.is_trimmable()  # that block
    assert cache.trim(3) == 3
    assert not cache.is_trimmable()
    cache.keep_in_reserve(5)
    assert cache.is_trimmable()


def test_15_a_reserve_takes_back_71_tokens_of_a_full_window():
    cache = shell(window=12, reserve=71)
    for number in range(40):
        cache.update_and_fetch(*block(37, number))
    reference = copy.deepcopy(cache)
    wanted = kvfun.fetch(reference.record)
    for number in range(71):
        cache.update_and_fetch(*block(1, number))
    assert cache.trim(71) == 71
    assert same(wanted, kvfun.fetch(cache.record))


def test_51_nothing_lacks_trim():
    model = oracle.model("gemma3_text")
    for cache in make_prompt_cache(model, "kv8-g32"):
        assert callable(cache.trim)


# -- planes, for models that reach into a cache --------------------------------------------------


def test_keys_and_values_can_be_read_and_assigned(spec):
    cache = filled(**spec)
    keys, values = cache.keys, cache.values
    before = cache.keys_and_values()
    if isinstance(keys, tuple):
        cache.keys = tuple(mx.depends(list(keys), [mx.zeros(1)]))
    else:
        cache.keys = mx.depends(keys, mx.zeros(1))
    cache.values = values
    assert same(before, cache.keys_and_values())


# -- state, files -------------------------------------------------------------------------------


def restored(cache: KVFunCache) -> KVFunCache:
    state = (cache.state, cache.meta_state) if oracle.OLD_PROTOCOL else (cache.state,)
    return KVFunCache.from_state(*state)


def saved(cache: list[Any], path: Any, **metadata: str) -> tuple[list[Any], dict[str, str]]:
    mlx_lm_cache.save_prompt_cache(str(path), cache, metadata)
    return mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_35_files_are_exact_in_every_dtype(spec, policy, dtype, tmp_path):
    cache = shell(**spec, **policy)
    cache.update_and_fetch(*block(20, 0, dtype))
    for number in range(5):
        cache.update_and_fetch(*block(1, number, dtype))
    (loaded,), _ = saved([cache], tmp_path / "c.safetensors")
    (again,), _ = load(tmp_path / "c.safetensors")
    for one in (loaded, again, restored(cache)):
        assert type(one) is KVFunCache
        assert one.offset == cache.offset == 25
        assert one.record.layout == cache.record.layout
        assert one.record.codec.spec == cache.record.codec.spec
        assert one.record.geometry.policy == cache.record.geometry.policy
        assert hasattr(one, "bits") == spec["packed"]
        for ours, theirs in zip(cache.keys_and_values(), one.keys_and_values(), strict=True):
            pairs = zip(tree_flatten(ours), tree_flatten(theirs), strict=True)
            for (_, x), (_, y) in pairs:
                assert x.dtype == y.dtype
                assert mx.array_equal(x, y).item()
        one.update_and_fetch(*block(6, 7, dtype))
    cache.update_and_fetch(*block(6, 7, dtype))
    assert same(cache.keys_and_values(), loaded.keys_and_values())


def test_empty_and_mixed_lists_round_trip(tmp_path):
    """34, and caches that nothing was ever appended to, at both ends."""
    mixed = [shell("kv4"), filled("bf16"), filled("kv8", packed=True), filled("k8v4", window=12)]
    mixed += [mlx_lm_cache.CacheList(filled("kv4"), shell()), shell("kv8", packed=True)]
    loaded, metadata = saved(mixed, tmp_path / "c.safetensors", model="m")
    again, also = load(tmp_path / "c.safetensors")
    assert metadata == also == {"model": "m"}
    for one in (loaded, again):
        pairs = list(zip(oracle.leaves(copy.deepcopy(mixed)), oracle.leaves(one), strict=True))
        assert len(pairs) == 7
        for x, y in pairs:
            assert (x.offset, x.empty(), hasattr(x, "bits")) == (
                *(y.offset, y.empty()),
                hasattr(y, "bits"),
            )
            assert x.record.codec.spec == y.record.codec.spec
            x.update_and_fetch(*block(2))
            y.update_and_fetch(*block(2))
            assert same(x.keys_and_values(), y.keys_and_values())


def test_files_hold_used_rows_only(tmp_path):
    cache = filled(length=10)
    saved([cache], tmp_path / "c.safetensors")
    rows = 10 * 2 * HEADS * DIM * 4
    assert rows < (tmp_path / "c.safetensors").stat().st_size < rows + 3000
    assert cache.nbytes == 256 * 2 * HEADS * DIM * 4


def test_chunked_prefill_evaluates_state_before_anything_was_appended():
    mx.eval([cache.state for cache in make_prompt_cache(oracle.model("llama"), "kv8-g32")])


def test_78_a_fresh_process_reads_a_file(tmp_path):
    path = tmp_path / "c.safetensors"
    saved([filled("kv8", packed=True), filled("bf16", window=12)], path)
    code = f"""
import kvfun.interop.mlx_lm
from mlx_lm.models.cache import load_prompt_cache
print([(type(c).__name__, c.offset, hasattr(c, "bits")) for c in load_prompt_cache({str(path)!r})])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('KVFunCache', 40, True), ('KVFunCache', 40, False)]"


def other_generation(cache: list[Any], path: Any, metadata: dict[str, str], monkeypatch) -> None:
    """A file as the mlx-lm that is not installed lays it out."""
    arrays_caches = mlx_lm_cache.ArraysCache
    old = not oracle.OLD_PROTOCOL
    monkeypatch.setattr(shell_module, "OLD_PROTOCOL", old)

    def state(one: Any) -> Any:
        if isinstance(one, mlx_lm_cache.CacheList):
            return [state(x) if old else (state(x), type(x).__name__) for x in one.caches]
        if isinstance(one, arrays_caches):
            return one.cache if old else (one.cache, None, None)
        return one.state

    def strings(one: Any) -> Any:
        if isinstance(one, mlx_lm_cache.CacheList):
            return ([type(x).__name__ for x in one.caches], [strings(x) for x in one.caches])
        return one.meta_state if isinstance(one, KVFunCache) else ""

    classes = [type(one).__name__ for one in cache]
    flat = dict(tree_flatten([state(one) for one in cache]))
    if old:
        said = [[strings(one) for one in cache], metadata, classes]
    else:
        marks: list[Any] = [""]
        for place, x in flat.items():
            if isinstance(x, str):
                marks.append((place, "string"))
                flat[place] = mx.array([ord(letter) for letter in x])
            elif x is None:
                marks.append((place, "none"))
                flat[place] = mx.array([])
        said = [metadata, classes, marks]
    mx.save_safetensors(str(path), flat, dict(tree_flatten(said)))
    monkeypatch.undo()


def recurrent() -> Any:
    cache = mlx_lm_cache.ArraysCache(2)
    cache[0], cache[1] = mx.ones((1, 3, 4)), mx.zeros((1, 2))
    return cache


def test_79_files_of_the_other_generation(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    mixed = [shell("kv4"), filled("bf16"), filled("kv8", packed=True), filled("k8v4", window=12)]
    mixed += [mlx_lm_cache.CacheList(recurrent(), filled("kv4")), recurrent(), filled("kv4")]
    other_generation(mixed, path, {"model": "m"}, monkeypatch)
    with pytest.raises((KeyError, ValueError, TypeError)):  # mlx-lm reads its own only
        mlx_lm_cache.load_prompt_cache(str(path))
    loaded, metadata = load(path)
    assert metadata == {"model": "m"}
    for x, y in zip(oracle.leaves(mixed), oracle.leaves(loaded), strict=True):
        assert type(x) is type(y)
        if isinstance(x, KVFunCache):
            assert (x.offset, hasattr(x, "bits")) == (y.offset, hasattr(y, "bits"))
            x.update_and_fetch(*block(3))
            y.update_and_fetch(*block(3))
            assert same(x.keys_and_values(), y.keys_and_values())
        else:
            assert same(x.cache, y.cache)


def test_79_no_metadata_and_trailing_empties(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    other_generation([filled("bf16"), shell("kv4"), shell("kv8")], path, {}, monkeypatch)
    loaded, metadata = load(path)
    assert metadata == {}
    assert [one.offset for one in loaded] == [40, 0, 0]


def test_79_unknown_files_are_named(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    other_generation([filled("bf16"), Stranger()], path, {}, monkeypatch)
    with pytest.raises(UnsupportedError, match="Stranger that another generation"):
        load(path)
    mx.save_safetensors(str(path), {"a": mx.zeros(3)}, {"a": "b"})
    with pytest.raises(CorruptError, match="no prompt cache"):
        load(path)


class Stranger:
    state = [mx.zeros(2)]
    meta_state = ""


def damaged(change: Any) -> list[Any]:
    """A state after ``change(header, planes)``, as the installed mlx-lm hands it back."""
    cache = filled("k8v4", window=12, sinks=2)
    header, planes = storage.dump(cache.record)
    said = json.loads(header)
    planes = change(said, planes) or planes
    return [json.dumps(said), shell_module.DECODED, *planes]


def back(header: str, mode: str, *planes: mx.array) -> KVFunCache:
    if oracle.OLD_PROTOCOL:
        return KVFunCache.from_state([list(planes)], (header, mode))
    return KVFunCache.from_state([header, mode, *planes])


def test_an_undamaged_state_comes_back():
    one = back(*damaged(lambda said, planes: None))
    whole = filled("k8v4", window=12, sinks=2)
    assert one.offset == 40
    assert one.record.geometry == whole.record.geometry
    assert same(kvfun.fetch(one.record), kvfun.fetch(whole.record))


@pytest.mark.parametrize(
    "change",
    [
        lambda said, planes: said.pop("kvfun") and None,
        lambda said, planes: said.update(kvfun=99),
        lambda said, planes: said.pop("rows") and None,
        lambda said, planes: said.update(codec="kv9"),
        lambda said, planes: said.update(codec="kv8"),
        lambda said, planes: said.update(window=-1),
        lambda said, planes: said.update(rows=[[40, 0]]),
        lambda said, planes: said.update(rows=[["40", 0, 2]]),
        lambda said, planes: said.update(rows=[[40, 0, -5]]),
        lambda said, planes: said.update(rows=[[40, -60, 2]]),
        lambda said, planes: said.update(rows=[]),
        lambda said, planes: said.update(rows=[[40, 0, 2]] * 3),
        lambda said, planes: said.update(rows=[[41, 0, 2]]),
        lambda said, planes: said.update(keys=2),
        lambda said, planes: said.update(layout=3),
        lambda said, planes: said["layout"].update(head_dim=32),
        lambda said, planes: said["layout"].update(key_dtype="float33"),
        lambda said, planes: said["layout"].update(value_dtype="bfloat16"),
        lambda said, planes: said["layout"].update(batch=True),
        lambda said, planes: planes[:-1],
        lambda said, planes: [*planes, planes[0]],
        lambda said, planes: [planes[0][:, :, 1:], *planes[1:]],
        lambda said, planes: [planes[0][..., 1:], *planes[1:]],
        lambda said, planes: [planes[0].astype(mx.int32), *planes[1:]],
        lambda said, planes: [planes[0][0], *planes[1:]],
    ],
)
def test_damaged_states_are_corrupt(change):
    with pytest.raises(CorruptError):
        back(*damaged(change))


@pytest.mark.parametrize(
    "strings", [("{}", "decoded"), ("x", "decoded"), ("", "decoded"), ("{", "packed"), ("[]", "x")]
)
def test_descriptions_that_are_none_are_corrupt(strings):
    with pytest.raises(CorruptError):
        back(*strings, mx.zeros(3))


def test_a_mode_that_is_unknown_or_cannot_be_is_corrupt():
    header, _, *planes = damaged(lambda said, planes: None)
    for mode in ("packed", "Packed", ""):
        with pytest.raises(CorruptError):
            back(header, mode, *planes)


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4", "kv8-pad", "k8v4", "bf16"])
def test_only_one_affine_codec_is_handed_out_packed(spec):
    """mlx-lm's quantized attention knows scales and biases, nothing else."""
    record = filled(spec).record
    assert not shell_module.can_be_packed(record)
    header, planes = storage.dump(record)
    assert tree.equal(back(header, "decoded", *planes).record, record)
    with pytest.raises(CorruptError, match=f"{spec} planes cannot be handed out packed"):
        back(header, "packed", *planes)


def test_1_to_4_policies_survive_every_way(tmp_path):
    """Sinks and windows live through a copy, a file and a reserve."""
    cache = shell("kv4", packed=True, window=12, sinks=4)
    for number in range(60):
        cache.update_and_fetch(*block(11, number))
    (loaded,), _ = saved([cache], tmp_path / "c.safetensors")
    for one in (cache, copy.deepcopy(cache), loaded):
        one.keep_in_reserve(3)
        one.update_and_fetch(*block(1, 99))
        assert one.size() == 16
        keys = kvfun.fetch(one.record)[0]
        first = shell("kv4")
        first.update_and_fetch(*block(11, 0))
        assert mx.array_equal(keys[:, :, :4], kvfun.fetch(first.record)[0][:, :, :4]).item()


def test_22_live_bytes_are_those_of_the_codec():
    for spec, bits in (("bf16", 16), ("kv8", 8.5), ("kv4", 4.5), ("kv4-g32", 5), ("mxfp8", 8.25)):
        cache = shell(spec)
        cache.update_and_fetch(*block(256, 0, mx.bfloat16))
        assert cache.nbytes == 256 * 2 * HEADS * DIM * bits / 8
        held = mx.get_active_memory()
        mx.eval(cache.state)
        assert mx.get_active_memory() - held <= cache.nbytes + 2**16


def test_36_the_report_names_windows_and_sinks():
    model = oracle.model("gemma3_text")
    cache = make_prompt_cache(model, "k8v4-g32", 64)
    texts = {str(report) for report in cache.report}
    assert texts == {
        "k8v4-g32, window 12, decoded at every read",
        "k8v4-g32, window 60, 4 sinks, decoded at every read",
    }
    assert archs.facts("gemma3_text").layers == len(cache.report)


def test_packed_numbers_are_handed_out_only_where_the_device_can_multiply_them(monkeypatch):
    """MLX's CUDA backend refuses many quantized products, but only when it computes them."""
    model = archs.build("llama")
    assert hasattr(make_prompt_cache(model, "kv8-g32")[0], "bits")
    monkeypatch.setattr("kvfun.interop.mlx_lm._make.multiplies_packed", lambda: False)
    assert not hasattr(make_prompt_cache(model, "kv8-g32")[0], "bits")
