"""Well-known models, and what their caches take."""

from __future__ import annotations

from collections import Counter

import pytest

from kvfun import scheme as s
from kvfun.scheme import Model

from .families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_kinds_and_bytes_of_published_configs(name):
    family = FAMILIES[name]
    model = Model.from_config(family.config)
    assert Counter(layer.kind for layer in model.layers) == family.kinds
    assert sum(layer.donor is not None for layer in model.layers) == family.shared
    assert model.max_positions == family.positions
    assert model.dtype == "bfloat16"
    found = s.kv_geometry(model)
    assert (found.full, found.sliding, found.chunked, found.latent, found.state, found.window) == (
        family.full,
        family.sliding,
        family.chunked,
        family.latent,
        family.state,
        family.bound,
    )
    for tokens in (1, 1000, 8192, 32768):
        assert s.kv_bytes_at(model, tokens) == family.at(tokens)


def test_the_largest_models_in_round_numbers():
    """Known sizes at 32,768 tokens, in GiB."""

    def gib(name):
        return s.kv_bytes_at(Model.from_config(FAMILIES[name].config), 32768) / 2**30

    assert gib("Llama-3.1-8B") == 4.0
    assert gib("DeepSeek-V3") == pytest.approx(2.14, abs=0.01)
    assert gib("gpt-oss-20b") == pytest.approx(0.75, abs=0.01)
    assert gib("Gemma-3-4B") == pytest.approx(0.74, abs=0.01)
