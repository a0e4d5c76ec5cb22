"""Sinks beside a window that has moved away: one slice with a mask = the visible columns alone."""

import pytest

from kvfun.errors import UnsupportedError
from kvfun.interop.mlx_lm import KVFunCache, make_prompt_cache
from kvfun.testing import small_steps
from tests.interop import architectures

MAX_SIZE = 16


def shells(cache):
    parts = [part for entry in cache for part in getattr(entry, "caches", [entry])]
    return [part for part in parts if isinstance(part, KVFunCache)]


@pytest.mark.parametrize("name", architectures.available())
@pytest.mark.parametrize("spec", ["plain", "kv8-g32"])
def test_one_slice_is_as_good_as_the_exact_columns(name, spec):
    model, prompt = architectures.build(name), architectures.prompt(41, 0)
    with small_steps(8, 8):
        try:
            sliced, exact = (make_prompt_cache(model, spec, MAX_SIZE) for _ in range(2))
        except UnsupportedError as refusal:
            pytest.skip(str(refusal))
        for shell in shells(exact):
            shell.exact = True
        found = architectures.greedy(model, prompt, 24, cache=sliced, step=7)
        assert found == architectures.greedy(model, prompt, 24, cache=exact, step=7)
        for shell in shells(sliced):
            if shell.record.geometry.policy.sinks and not shell.exact:
                assert len(shell.record.geometry.spans()) == 2, "the window never moved away"


def test_a_model_that_asks_no_mask_for_one_token_is_handed_only_what_it_sees(monkeypatch):
    from mlx_lm.models import llama

    asks = llama.create_attention_mask

    def only_for_blocks(h, cache=None, **options):
        return asks(h, cache, **options) if h.shape[1] > 1 else None

    model, prompt = architectures.build("llama"), architectures.prompt(41, 0)
    with small_steps(8, 8):
        usual = make_prompt_cache(model, "plain", MAX_SIZE)
        wanted = architectures.greedy(model, prompt, 24, cache=usual, step=7)
        monkeypatch.setattr(llama, "create_attention_mask", only_for_blocks)
        cache = make_prompt_cache(model, "plain", MAX_SIZE)
        assert all(shell.exact for shell in shells(cache))
        assert architectures.greedy(model, prompt, 24, cache=cache, step=7) == wanted
