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
