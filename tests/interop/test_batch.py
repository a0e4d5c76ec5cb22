"""A ragged batch of any architecture says in every row what the row says alone."""

from __future__ import annotations

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from kvfun.errors import ShapeError, UnsupportedError
from kvfun.interop.mlx_lm import Batch, attention_where_possible, make_prompt_cache
from kvfun.interop.mlx_lm._states import leaves_of
from tests.interop import architectures as archs
from tests.interop import oracle

RECURRENT = archs.RECURRENT
OTHERS = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "mimo_v2_flash"]
PROMPTS = [archs.prompt(n, seed=n) for n in (5, 17, 1, 9)]
LATE = archs.prompt(6, seed=3)


def alone(model, caches, *blocks):
    """Logits behind every token of a row that is read by itself, block after block."""
    with attention_where_possible(model):
        parts = [model(mx.array([list(block)]), cache=caches)[0] for block in blocks]
    return mx.concatenate(parts)


def likeliest(logits):
    return mx.argmax(logits[-1]).item()


@pytest.mark.parametrize("spec", ["plain", "kv8-g32"])
@pytest.mark.parametrize("name", [n for n in [*RECURRENT, *OTHERS] if n in archs.available()])
def test_rows_say_what_they_say_alone(name, spec):
    """Prompts of four lengths, decoding, second blocks of other lengths, rows that leave."""
    model = oracle.model(name)

    def made():
        return make_prompt_cache(model, spec)

    try:
        batch = Batch(model, [made() for _ in PROMPTS])
    except UnsupportedError as error:
        pytest.skip(str(error))
    fed = [[list(prompt)] for prompt in PROMPTS]
    found = [[x] for x in batch.read(PROMPTS)]

    def step(blocks):
        for row, (block, logits) in enumerate(zip(blocks, batch.read(blocks), strict=True)):
            if block:
                fed[row].append(list(block))
                found[row].append(logits)

    for _ in range(6):
        step([[likeliest(x[-1])] for x in found])
    step([[3, 1, 4], [], [1, 5, 9, 2, 6], [5]])
    for _ in range(3):
        step([[likeliest(x[-1])] for x in found])
    batch.rows([3, 0])
    fed, found = [fed[3], fed[0]], [found[3], found[0]]
    step([[2, 7], []])
    for blocks, parts in zip(fed, found, strict=True):
        wanted = alone(model, made(), *blocks)
        got = mx.concatenate(parts)
        assert oracle.spread(wanted, got) < 2e-3
        same = mx.argmax(wanted, axis=-1) == mx.argmax(got, axis=-1)
        assert mx.all(same).item()
    assert batch.offsets == tuple(sum(map(len, blocks)) for blocks in fed)
    assert batch.groups == ((0, 1),) or batch.groups == ((1, 0),)


@pytest.mark.parametrize("name", [n for n in ("recurrent_gemma", "qwen3_next") if n in RECURRENT])
def test_a_row_that_has_not_begun_is_by_itself_until_it_has(name):
    model = oracle.model(name)
    batch = Batch(model, [make_prompt_cache(model, "plain") for _ in range(2)])
    batch.read([PROMPTS[0], []])
    assert batch.groups == ((0,), (1,))
    second = batch.read([[4], LATE])[1]
    assert oracle.spread(alone(model, make_prompt_cache(model, "plain"), LATE), second) < 1e-3
    assert sorted(batch.groups[0]) == [0, 1]


def test_texts_that_were_read_before_come_along():
    model = oracle.model("qwen3_next")
    first, second = [make_prompt_cache(model, "plain") for _ in range(2)]
    model(mx.array([PROMPTS[1]]), cache=first)
    model(mx.array([PROMPTS[3]]), cache=second)
    batch = Batch(model, [first, second])
    assert batch.groups == ((0, 1),)
    assert batch.offsets == (17, 9)
    found = batch.read([[7], LATE])
    for prompt, block, got in zip((PROMPTS[1], PROMPTS[3]), ([7], LATE), found, strict=True):
        wanted = alone(model, make_prompt_cache(model, "plain"), prompt, block)[len(prompt) :]
        assert oracle.spread(wanted, got) < 1e-3


def test_a_row_is_to_be_had_by_itself():
    model = oracle.model("falcon_h1")
    batch = Batch(model, [make_prompt_cache(model, "plain") for _ in PROMPTS])
    batch.read(PROMPTS)
    caches = batch.row(3)
    wanted = alone(model, make_prompt_cache(model, "plain"), PROMPTS[3], [5])[-1]
    got = alone(model, caches, [5])[-1]
    assert mx.max(mx.abs(wanted - got)).item() < 1e-3


@pytest.mark.parametrize("options", [{"residual": 8, "block": 4}, {"max_size": 8, "sinks": 2}])
def test_residual_windows_and_short_ones(options):
    """Blocks of a residual window are encoded for good: rows that stand still are set apart."""
    model = oracle.model("llama")

    def made():
        return make_prompt_cache(model, "kv4-g32", **options)

    batch = Batch(model, [made() for _ in PROMPTS])
    fed = [[list(prompt)] for prompt in PROMPTS]
    found = [[x] for x in batch.read(PROMPTS)]
    for _ in range(9):
        blocks = [[likeliest(x[-1])] for x in found]
        for row, logits in enumerate(batch.read(blocks)):
            fed[row].append(blocks[row])
            found[row].append(logits)
    for (prompt, *steps), parts in zip(fed, found, strict=True):
        # a block is read in pieces as long as the rows' blocks go together
        cuts = [prompt[a:b] for a, b in ((0, 1), (1, 5), (5, 9), (9, 17)) if a < len(prompt)]
        wanted, got = alone(model, made(), *cuts, *steps), mx.concatenate(parts)
        assert oracle.spread(wanted, got) < 1e-3


def test_what_a_batch_refuses():
    model = oracle.model("llama")
    with pytest.raises(ShapeError, match="at least one row"):
        Batch(model, [])
    batch = Batch(model, [make_prompt_cache(model, "plain") for _ in range(2)])
    for blocks in ([[1]], [[], []]):
        with pytest.raises(ShapeError, match="blocks"):
            batch.read(blocks)
    batch.read([[1], [2]])
    with pytest.raises(ShapeError, match="rows"):
        batch.rows([0, 5])
    from mlx_lm.models.cache import KVCache

    with pytest.raises(UnsupportedError, match="KVCache"):
        Batch(model, [[KVCache()]])


def test_memory_is_one_rows_worth_for_each_row():
    model = oracle.model("mamba2")
    batch = Batch(model, [make_prompt_cache(model, "plain") for _ in PROMPTS])
    batch.read(PROMPTS)
    batch.evaluate()
    one = sum(leaf.nbytes for leaf in leaves_of(batch.row(0)))
    assert batch.nbytes == len(PROMPTS) * one
