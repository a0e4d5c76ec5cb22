"""Speculative generation says what plain generation says, on every architecture."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import kvfun
from kvfun.errors import ShapeError, UnsupportedError
from kvfun.interop.mlx_lm import (
    DraftModel,
    PromptLookup,
    Proposal,
    attention,
    make_prompt_cache,
    speculative_generate,
)
from kvfun.interop.mlx_lm import _generate as g
from kvfun.scheme import KvScheme
from tests.interop import architectures as archs
from tests.interop import oracle
from tests.interop.test_architectures import NAMES

REFUSED = {"deepseek_v41"}
if "gemma3n" in archs.CHUNKS_DIFFER:  # in older mlx-lm it depends on how tokens are fed
    REFUSED |= {"gemma3n"}
LENGTH = 24
REPEATING = archs.prompt(13) * 3


class Oracle:
    """Drafts the true continuation, wrong from a place on that moves: every length is accepted."""

    def __init__(self, truth, prompt):
        self.truth, self.prompt, self.round = list(truth), len(prompt), 0

    def propose(self, tokens, most):
        said = len(tokens) - self.prompt
        drafts = self.truth[said : said + most]
        wrong = self.round % (most + 2)
        self.round += 1
        return Proposal([t if i < wrong else (t + 1) % archs.VOCAB for i, t in enumerate(drafts)])


def plain(model, prompt, count=LENGTH, **options):
    """One token at a time, the likeliest."""
    caches = make_prompt_cache(model, **options)
    said, step = [], mx.array([prompt])
    for _ in range(count):
        token = mx.argmax(model(step, cache=caches)[0, -1]).item()
        said.append(token)
        step = mx.array([[token]])
    return said


def spoken(model, prompt, drafter, count=LENGTH, **options):
    made = speculative_generate(model, prompt, drafter, max_tokens=count, **options)
    return list(made)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_it_says_what_plain_generation_says(name):
    model, prompt = oracle.model(name), archs.prompt(30)
    truth = plain(model, prompt, spec="plain")
    found = spoken(model, prompt, Oracle(truth, prompt), num_drafts=3)
    assert [each.token for each in found] == truth
    assert 0 < sum(each.from_draft for each in found) < LENGTH


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_and_in_a_window_with_sinks_from_other_weights(name):
    model, prompt = oracle.model(name, 1), archs.prompt(26, 1)
    options = {"spec": "plain", "max_size": 11, "sinks": 2}
    try:
        truth = plain(model, prompt, 20, **options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    found = spoken(model, prompt, Oracle(truth, prompt), 20, num_drafts=4, **options)
    assert [each.token for each in found] == truth


WINDOWED = [n for n in ("llama", "gemma3", "gpt_oss", "llama4", "qwen3_next") if n in NAMES]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [5, 12, 40])
def test_windows_of_any_size_and_other_seeds(name, seed, size):
    model, prompt = oracle.model(name, seed), archs.prompt(30, seed)
    options = {"spec": "plain", "max_size": size, "sinks": 2}
    try:
        truth = plain(model, prompt, 40, **options)
    except UnsupportedError:
        assert name == "llama4"  # its chunk is wider
        return
    drafts = 1 + 2 * seed
    found = spoken(model, prompt, Oracle(truth, prompt), 40, num_drafts=drafts, **options)
    assert [each.token for each in found] == truth


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "mamba2", "falcon_h1", "jamba"])
@pytest.mark.parametrize("other", ["llama", "qwen3_next", "gemma3"])
def test_draft_models_of_any_kind(name, other):
    """A draft model with a window or a recurrent state goes back as exactly as the other."""
    model, prompt = oracle.model(name), archs.prompt(30)
    truth = plain(model, prompt, spec="plain")
    found = spoken(model, prompt, DraftModel(oracle.model(other, seed=1)), num_drafts=3)
    assert [each.token for each in found] == truth


def test_windows_of_a_draft_model_can_take_back_a_whole_round():
    drafter = DraftModel(oracle.model("gemma3", seed=1))
    spoken(oracle.model("llama"), archs.prompt(30), drafter, 8, num_drafts=3)
    reserves = {shell.record.geometry.policy.reserve for shell in drafter.reader._shells}
    assert min(reserves) >= 3


def test_a_draft_model_that_is_the_model_is_always_right():
    for name in ("gemma3", "qwen3_next"):
        model, prompt = oracle.model(name), archs.prompt(30)
        found = spoken(model, prompt, DraftModel(model), num_drafts=3)
        assert [each.token for each in found] == plain(model, prompt, spec="plain")
        accepted = sum(each.from_draft for each in found)
        assert accepted >= LENGTH * 3 // 4 - 1


@pytest.mark.parametrize("spec", ["kv8-g32", "bf16", "rot-k5v4", "kv4-g32-start33"])
def test_encoded_caches_and_delayed_ones(spec):
    """The truth is read token by token from the same kind of cache."""
    model, prompt, scheme = oracle.model("llama"), archs.prompt(30), KvScheme.of(spec)
    with attention(model):
        caches = make_prompt_cache(model, scheme)
        step, truth = mx.array([prompt[:-1]]), []
        model(step, cache=caches)
        step = mx.array([prompt[-1:]])
        for _ in range(LENGTH):
            truth.append(mx.argmax(model(step, cache=caches)[0, -1]).item())
            step = mx.array([truth[-1:]])
    found = spoken(model, prompt, Oracle(truth, prompt), num_drafts=3, spec=scheme)
    assert [each.token for each in found] == truth


def test_prompt_lookup_finds_what_was_said_before():
    lookup = PromptLookup(3)
    assert lookup.propose([1, 2, 3, 4, 9, 2, 3], 3).tokens == [4, 9, 2]
    assert lookup.propose([7, 1, 8, 1], 2).tokens == [8, 1]
    assert lookup.propose([1, 2, 3], 4).tokens == []
    assert lookup.propose([5], 4).tokens == []
    assert lookup.propose([1, 2, 1, 2, 1], 0).tokens == []
    # the longest match, and of those the latest
    assert lookup.propose([1, 2, 3, 4, 8, 2, 3, 5, 1, 2, 3], 1).tokens == [4]
    assert lookup.propose([2, 3, 5, 2, 3, 6, 2, 3], 1).tokens == [6]


def test_repeated_text_is_said_faster():
    model = oracle.model("llama")
    reads = []
    original = g.Reader.read

    class Counting(g.Reader):
        def read(self, tokens):
            reads.append(len(tokens))
            return original(self, tokens)

    truth = plain(model, REPEATING, 60, spec="plain")
    old, g.Reader = g.Reader, Counting
    try:
        found = spoken(model, REPEATING, None, 60, num_drafts=4)
    finally:
        g.Reader = old
    assert [each.token for each in found] == truth
    assert len(reads) < 60


def test_it_stops_where_it_should():
    model, prompt = oracle.model("llama"), archs.prompt(30)
    truth = plain(model, prompt, spec="plain")
    for count in (0, 1, 2, 7):
        assert [t.token for t in spoken(model, prompt, Oracle(truth, prompt), count)] == truth[
            :count
        ]
    end = truth[9]
    found = list(speculative_generate(model, prompt, Oracle(truth, prompt), stop=[end]))
    assert [each.token for each in found] == truth[: truth.index(end) + 1]
    assert len(list(speculative_generate(model, prompt[:1], max_tokens=3))) == 3
    assert len(list(speculative_generate(model, prompt, num_drafts=0, max_tokens=3))) == 3


# -- sampling -------------------------------------------------------------------------------------


def chances(seed, count, sharp=1.5):
    return mx.softmax(sharp * mx.random.normal((count, 12), key=mx.random.key(seed)), axis=-1)


def chi_squared(found, expected, draws):
    """The statistic over its degrees of freedom; about 1 where they agree."""
    expected = np.array(expected) * draws
    counts = np.array([found.get(i, 0) for i in range(len(expected))])
    large = expected > 5
    rest = counts[~large].sum(), expected[~large].sum()
    terms = (counts[large] - expected[large]) ** 2 / expected[large]
    total = terms.sum() + ((rest[0] - rest[1]) ** 2 / rest[1] if rest[1] > 5 else 0)
    return total / max(1, large.sum() - 1)


@pytest.mark.parametrize("certain", [False, True])
def test_the_first_token_of_a_round_is_distributed_as_the_models_own(certain):
    """4,000 rounds with drafts from another distribution, or always the same one."""
    mx.random.seed(3)
    p, q, draws = chances(1, 3), chances(2, 2), 4000
    found = Counter()
    for _ in range(draws):
        drafts = [4, 7] if certain else [g._drawn(each) for each in q]
        count, following = g._accepted(p, drafts, None if certain else list(q))
        found[drafts[0] if count else following] += 1
    assert chi_squared(found, p[0], draws) < 2.5
    wrong = Counter({i: int(draws * float(x)) for i, x in enumerate(q[0].tolist())})
    assert chi_squared(wrong, p[0], draws) > 10  # it would see the drafts' own distribution


def test_what_a_model_says_with_a_draft_is_distributed_as_without():
    """The first token of many short outputs, at a temperature."""
    model, prompt, draws = oracle.model("llama"), archs.prompt(12), 400
    mx.random.seed(5)
    logits = model(mx.array([prompt]))[0, -1]
    first = mx.softmax(logits / 2.0)
    found = Counter()
    for _ in range(draws):
        drafter = DraftModel(oracle.model("llama", seed=1), temp=3.0)
        made = speculative_generate(model, prompt, drafter, num_drafts=2, max_tokens=2, temp=2.0)
        found[next(made).token] += 1
    assert chi_squared(found, first, draws) < 2.5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"num_drafts": -1}, "num_drafts"),
        ({"num_drafts": 1.5}, "num_drafts"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temp": -1}, "temp"),
        ({"temp": "hot"}, "temp"),
        ({"temp": float("nan")}, "temp"),
    ],
)
def test_bad_input_is_refused_at_the_call(arguments, named):
    values = {"prompt": [1, 2], **arguments}
    with pytest.raises(ShapeError, match=named):
        speculative_generate(oracle.model("llama"), values.pop("prompt"), **values)


def test_caches_that_cannot_go_back_are_refused():
    import mlx_lm.models.cache as mlx_lm_cache

    with pytest.raises(UnsupportedError, match="KVCache"):
        g.Reader(oracle.model("llama"), [mlx_lm_cache.KVCache()])
    reader = g.Reader(oracle.model("llama"), make_prompt_cache(oracle.model("llama"), "plain"))
    reader.read([1, 2, 3])
    reader.back_to(3)
    with pytest.raises(UnsupportedError, match="decided"):
        reader.back_to(1)
    assert kvfun.offsets(reader.caches[0].record) == (3,)
