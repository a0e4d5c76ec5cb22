"""Recurrent layers of mlx-lm on kvfun records."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.models.cache as mlx_lm_cache
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

import kvfun
from kvfun import tree
from kvfun.errors import CorruptError, RollbackError, ShapeError, UnsupportedError
from kvfun.interop.mlx_lm import (
    KVFunCache,
    KVFunCacheList,
    KVFunStates,
    describe,
    load,
    make_prompt_cache,
)
from kvfun.interop.mlx_lm._generate import Reader
from kvfun.interop.mlx_lm._states import leaves_of
from tests.interop import architectures as archs
from tests.interop import oracle

RECURRENT = archs.RECURRENT
PROMPT = archs.prompt(20)
UNCOUNTED = {"baichuan_m1", "bailing_moe_linear", "falcon_mamba", "jamba", "longcat_flash_ngram"}
UNCOUNTED |= {"mamba", "recurrent_gemma", "rwkv7"}
"""Models that do not say how many tokens they read."""


def states(caches):
    return [leaf for leaf in leaves_of(caches) if isinstance(leaf, KVFunStates)]


def read(model, caches, tokens):
    logits = model(mx.array([list(tokens)]), cache=caches)[0]
    mx.eval(logits)
    return logits


def same(one, other):
    """Whether two lists of caches show the same bits."""
    for a, b in zip(leaves_of(one), leaves_of(other), strict=True):
        if isinstance(a, KVFunStates):
            assert a.record.offsets == b.record.offsets
            pairs = [(x, b.record.states[name]) for name, x in a.record.states.items()]
        else:
            assert kvfun.offsets(a.record) == kvfun.offsets(b.record)
            pairs = list(zip(kvfun.fetch(a.record), kvfun.fetch(b.record), strict=True))
        for x, y in pairs:
            assert x.dtype == y.dtype
            assert mx.array_equal(x, y).item()


# -- wholly on kvfun ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_every_layer_is_a_kvfun_record(name):
    model = oracle.model(name)
    caches = make_prompt_cache(model, "plain")
    kinds = {type(leaf) for leaf in leaves_of(caches)}
    assert kinds <= {KVFunCache, KVFunStates}
    assert KVFunStates in kinds
    assert "left to mlx-lm" not in describe(caches)
    assert "recurrent" in describe(caches)
    lists = [entry for entry in caches if isinstance(entry, mlx_lm_cache.CacheList)]
    assert all(isinstance(entry, KVFunCacheList) for entry in lists)


@pytest.mark.parametrize("name", RECURRENT)
def test_tokens_are_counted_where_the_model_counts_them(name):
    model = oracle.model(name)
    caches = make_prompt_cache(model, "plain")
    read(model, caches, PROMPT)
    read(model, caches, [3])
    if name in UNCOUNTED or name.split("+")[0] in UNCOUNTED:
        with pytest.raises(UnsupportedError, match="does not say"):
            kvfun.offsets(states(caches)[0].record)
        assert not states(caches)[0].counts
        return
    assert {kvfun.offsets(each.record) for each in states(caches)} == {(21,)}
    reader = Reader(model, make_prompt_cache(model, "plain"))
    reader.read(PROMPT)
    assert {kvfun.offsets(each.record) for each in states(reader.caches)} == {(20,)}


# -- going back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 3, 5])
@pytest.mark.parametrize("name", [n for n in RECURRENT if n not in archs.CHUNKS_DIFFER])
def test_what_was_taken_back_was_never_there(name, keep):
    """Bit for bit, in every layer's state, keys, values and in the logits that follow."""
    model, block = oracle.model(name), [5, 9, 2, 6, 5]
    there, never = [Reader(model, make_prompt_cache(model, "plain")) for _ in range(2)]
    for reader in (there, never):
        mx.eval(reader.read(PROMPT))
        reader.back_to(len(PROMPT))
    before = [state.record for state in states(there.caches)]
    mx.eval(there.read(block))
    there.back_to(len(PROMPT) + keep)
    if keep:
        never.read(block[:keep])
    else:
        after = [state.record for state in states(there.caches)]
        assert all(a is b for a, b in zip(before, after, strict=True))
    same(there.caches, never.caches)
    for tokens in ([7], [1, 2, 3], [4]):
        assert mx.array_equal(there.read(tokens), never.read(tokens)).item()
    same(there.caches, never.caches)


def test_trim_takes_back_nothing_and_says_so():
    model = oracle.model("mamba2")
    caches = make_prompt_cache(model, "plain")
    read(model, caches, PROMPT)
    assert not caches[0].is_trimmable()
    assert caches[0].trim(0) == 0
    with pytest.raises(RollbackError, match="begin a round"):
        caches[0].trim(1)


def test_a_layer_with_several_caches_takes_back_in_all_or_in_none():
    model = oracle.model("falcon_h1")
    caches = make_prompt_cache(model, "plain")
    read(model, caches, PROMPT)
    before = [leaf.record for leaf in leaves_of(caches[:1])]
    with pytest.raises(RollbackError):
        caches[0].trim(1)
    assert [leaf.record for leaf in leaves_of(caches[:1])] == before
    both = KVFunCacheList(*[KVFunCache(kvfun.empty("plain", window=w)) for w in (None, 4)])
    k = mx.zeros((1, 1, 600, 32))
    for cache in both.caches:
        cache.update_and_fetch(k, k)
        cache.update_and_fetch(k[:, :, :1], k[:, :, :1])
    with pytest.raises(RollbackError):
        both.trim(30)
    assert [cache.offset for cache in both.caches] == [601, 601]
    assert both.trim(1) == 1


# -- copies, files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_copies_go_their_own_ways(name):
    model = oracle.model(name)
    caches = make_prompt_cache(model, "plain")
    read(model, caches, PROMPT)
    copies = copy.deepcopy(caches)
    one = read(model, caches, [1, 2, 3])
    read(model, copies, [4])
    third = make_prompt_cache(model, "plain")
    read(model, third, PROMPT)
    assert mx.array_equal(one, read(model, third, [1, 2, 3])).item()


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("reads", ["mlx-lm", "kvfun"])
def test_files_give_back_what_was_saved(name, reads, tmp_path):
    model, path = oracle.model(name), str(tmp_path / "cache.safetensors")
    caches = make_prompt_cache(model, "plain")
    read(model, caches, PROMPT)
    save_prompt_cache(path, caches, {"model": name})
    if reads == "mlx-lm":
        loaded, metadata = load_prompt_cache(path, return_metadata=True)
    else:
        loaded, metadata = load(path)
    assert metadata == {"model": name}
    same_records = zip(leaves_of(caches), leaves_of(loaded), strict=True)
    assert all(type(a) is type(b) for a, b in same_records)
    assert mx.array_equal(read(model, caches, [1, 2]), read(model, loaded, [1, 2])).item()


def test_an_empty_layer_can_be_saved(tmp_path):
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, make_prompt_cache(oracle.model("mamba2"), "plain"))
    (first, *_), _ = load(path)
    assert isinstance(first, KVFunStates)
    assert first.empty()
    assert first.size_of_layer == 2


def test_damaged_states_are_refused():
    shell = KVFunStates(2)
    shell[0] = mx.zeros((2, 3))
    shell.advance(4)
    header, size, *arrays = (
        KVFunStates.state.fget(shell)
        if not oracle.OLD_PROTOCOL
        else (
            *shell.meta_state,
            *shell.state,
        )
    )
    from kvfun.interop.mlx_lm._states import restored_states

    assert restored_states((header, size), arrays)[1].offsets == (4, 4)
    k = mx.zeros((1, 1, 3, 32))
    other = KVFunCache(kvfun.append(kvfun.empty("plain"), k, k))
    foreign, *_ = other.meta_state
    for strings, given in (
        ((header, size), []),
        ((header, size), [mx.zeros((3, 3))]),
        ((header, "0"), arrays),
        ((header, "x"), arrays),
        ((header.replace("4,4", "4,-4"), size), arrays),
        ((header.replace("[]", "7", 1), size), arrays),
        ((foreign, size), [k, k]),
        ((header,), arrays),
    ):
        with pytest.raises(CorruptError):
            restored_states(strings, given)


# -- smaller states -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear"])
def test_states_may_be_kept_in_16_bits(name):
    model = oracle.model(name)
    wide, half = [make_prompt_cache(model, "plain", states=x) for x in (None, "bf16")]
    one, other = read(model, wide, PROMPT), read(model, half, PROMPT)
    assert mx.array_equal(one, other).item()  # what is stored is rounded, what is read was not yet
    assert all(x.dtype == mx.bfloat16 for each in states(half) for x in each.record.states.values())
    assert all(each[0].dtype == mx.float32 for each in states(half))  # as the model wrote it
    one, other = read(model, wide, [3]), read(model, half, [3])
    assert 0 < oracle.spread(one, other) < 0.1
    assert sum(s.nbytes for s in states(half)) * 2 == sum(s.nbytes for s in states(wide))
    assert "bf16, recurrent" in describe(half)


# -- what mlx-lm's batches do ---------------------------------------------------------------------


MASKED = ["qwen3_next", "qwen3_5", "kimi_linear", "lfm2", "gear"]
"""Models that keep padding out of their states when their caches tell them where it is."""
ONCE = ["mamba2", "falcon_h1", "plamo2"] + ["granitemoehybrid"] * (not oracle.OLD_PROTOCOL)
"""Models that do so in one chunk; mlx-lm's scan goes wrong in the second one."""
PADDED = [(n, chunk) for n in MASKED for chunk in (9, 5)] + [(n, 9) for n in ONCE]


@pytest.mark.parametrize(("name", "chunk"), [x for x in PADDED if x[0] in RECURRENT])
def test_padded_chunks_leave_the_states_that_rows_alone_have(name, chunk):
    model = oracle.model(name)
    prompts = [archs.prompt(n, seed=n) for n in (9, 4, 7)]
    shells = [make_prompt_cache(model, "plain") for _ in prompts]
    batch = [_merged([each[i] for each in shells]) for i in range(len(shells[0]))]
    for each in states(batch):
        each.prepare(lengths=[len(p) for p in prompts], right_padding=[9 - len(p) for p in prompts])
    padded = mx.array([[*p, *[0] * (9 - len(p))] for p in prompts])
    for start in range(0, 9, chunk):  # the second one is all padding for one row
        model(padded[:, start : start + chunk], cache=batch)
    for each in states(batch):
        each.finalize()
        assert each.record.offsets == tuple(len(p) for p in prompts)
    for row, prompt in enumerate(prompts):
        alone = make_prompt_cache(model, "plain")
        for start in range(0, len(prompt), chunk):
            read(model, alone, prompt[start : start + chunk])
        pairs = zip(states(alone), states(batch), strict=True)
        mine, batched = next(pairs)  # the first layer's: others depend on the attention of padding
        for name_of_state, x in mine.record.states.items():
            got = batched.extract(row).record.states[name_of_state]
            assert mx.allclose(x, got, rtol=1e-4, atol=1e-5).item()


def _merged(entries):
    if isinstance(entries[0], KVFunCacheList):
        return KVFunCacheList(
            *[_merged(list(x)) for x in zip(*[e.caches for e in entries], strict=True)]
        )
    if isinstance(entries[0], KVFunStates):
        return entries[0].merge(entries)
    return KVFunCache(kvfun.concat([entry.record for entry in entries]))


def test_rows_of_states():
    shell = KVFunStates(2)
    assert shell.batch_size == 1
    assert shell.empty()
    assert shell[0] is None
    with pytest.raises(IndexError):
        shell[2]
    with pytest.raises(IndexError):
        shell[2] = mx.zeros((1, 3))
    assert list(shell) == [None, None]
    shell[0], shell[1] = mx.arange(6.0).reshape(3, 2), mx.ones((3, 1), mx.int32)
    shell.advance(5)
    first, second = shell
    assert (first.shape, second.dtype) == ((3, 2), mx.int32)
    shell.filter([2, 0])
    assert shell[0].tolist() == [[4, 5], [0, 1]]
    other = shell.extract(1)
    other.extend(KVFunStates(2))  # a row that has no token begins with zeros
    assert other[0].tolist() == [[0, 1], [0, 0]]
    assert other.record.offsets == (5, 0)
    assert shell.merge([shell, other]).record.offsets == (5, 5, 5, 0)
    shell[1] = None
    assert shell[1] is None
    with pytest.raises(ShapeError, match="4 rows"):
        shell[0] = mx.zeros((4, 2))


# -- ten thousand steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_ten_thousand_tokens_leave_no_graph_and_nothing_beyond_the_caches(name):
    model = oracle.model(name)
    caches = make_prompt_cache(model, "plain", max_size=64)
    token, beside, edges = mx.array([[1]]), [], []
    for step in range(10_000):
        token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
        mx.async_eval(token)  # as mlx-lm's generators do: the states ride on the tokens' graph
        if step in (999, 9_999):
            mx.eval(token)
            gc.collect()
            mx.clear_cache()
            beside.append(mx.get_active_memory() - sum(leaf.nbytes for leaf in leaves_of(caches)))
            dot = _Dot()
            mx.export_to_dot(
                dot, *[x for leaf in leaves_of(caches) for x in tree.leaves(leaf.record)]
            )
            edges.append(dot.text.count("->"))
    assert beside[1] <= beside[0] + 16_384  # two bytes a step would be 18,000
    assert edges[1] == edges[0]


class _Dot:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
