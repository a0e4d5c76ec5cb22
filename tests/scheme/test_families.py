"""Well-known models, as they are published, and what their caches take."""

from __future__ import annotations

from collections import Counter

import pytest

from kvfun import scheme as s
from kvfun.scheme import Model

from .expected import FAMILIES
from .models import config_of, names


def test_every_config_has_its_numbers():
    assert sorted(FAMILIES) == names()
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("name", FAMILIES)
def test_kinds_and_bytes_of_published_configs(name):
    expected, model = FAMILIES[name], Model.from_config(config_of(name))
    assert len(model.layers) == expected.layers
    assert Counter(layer.kind for layer in model.layers) == {
        kind: count for kind, count in expected.kinds.items() if count
    }
    assert sum(layer.donor is not None for layer in model.layers) == expected.shared
    assert model.max_positions == expected.max_positions
    assert model.dtype == "bfloat16"
    found = s.kv_geometry(model)
    assert (found.full, found.sliding, found.chunked, found.latent) == (
        expected.full_per_token,
        expected.sliding_per_token,
        expected.chunked_per_token,
        expected.latent_per_token,
    )
    assert (found.state, found.window) == (expected.state, expected.window)
    assert s.kv_bytes_at(model, 32768) == expected.at_32768
    bound = expected.window or 0
    for tokens in (0, 1, 700):
        near = min(tokens, bound)
        grows = (expected.full_per_token + expected.latent_per_token) * tokens
        near = (expected.sliding_per_token + expected.chunked_per_token) * near
        assert s.kv_bytes_at(model, tokens) == grows + near + expected.state


def test_the_largest_models_in_round_numbers():
    """Known sizes at 32,768 tokens, in GiB."""

    def gib(name):
        return s.kv_bytes_at(Model.from_config(config_of(name)), 32768) / 2**30

    assert gib("llama-3.1-8b") == 4.0
    assert gib("deepseek-v3") == pytest.approx(2.14, abs=0.01)
    assert gib("gpt-oss-20b") == pytest.approx(0.75, abs=0.01)
    assert gib("gemma-3-4b-it") == pytest.approx(0.74, abs=0.01)
