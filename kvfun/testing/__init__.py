"""Testing: strategies, laws and a state machine for any cache record.

The laws are part of the product: the author of another cache runs them on it. Needs hypothesis
and numpy (``kvfun[test]``), which nothing else in kvfun imports. In a test module::

    from kvfun.testing import CacheMachine, Recipe, law_suite
    import hypothesis.strategies as st

    mine = Recipe(None, make=MyCache, window=8)     # who sees whom, for the oracle
    TestLaws = law_suite(mine, allowed=("append", "rollback"), convertible=False)

    class Machine(CacheMachine):
        recipes = st.just(mine)
        allowed = ("append", "rollback")

    TestMachine = Machine.TestCase

A cache whose tokens are raw for a while says so in its recipe (``residual``, ``block``,
``raw_sinks``), and is compared with tokens that are raw for as long; see :func:`chains`. One that
can be sealed allows ``"seal"`` beside :data:`VERBS`. The author of another recurrence runs
:func:`check_recurrence` on it.
"""

from ._checks import attends, digest, holds, observe, same
from ._history import (
    Append,
    Convert,
    Handle,
    Join,
    Rollback,
    Seal,
    Take,
    Verb,
    World,
    refused,
    resolve,
)
from ._laws import LAWS, Case, check_laws
from ._machine import CacheMachine
from ._oracle import BOUNDS, Reference, Schedule, Visibility, attention_bound, dense_attention
from ._recipes import Recipe, Shape, bound, small_steps
from ._recurrences import RECURRENCES, check_recurrence, spans
from ._strategies import (
    SPECS,
    VERBS,
    blocks,
    caches,
    cases,
    chains,
    codecs,
    histories,
    layouts,
    policies,
    shapes,
    specs,
    tokens,
    verbs,
)
from ._suite import law_suite

__all__ = [
    "BOUNDS",
    "LAWS",
    "RECURRENCES",
    "SPECS",
    "VERBS",
    "Append",
    "CacheMachine",
    "Case",
    "Convert",
    "Handle",
    "Join",
    "Recipe",
    "Reference",
    "Rollback",
    "Schedule",
    "Seal",
    "Shape",
    "Take",
    "Verb",
    "Visibility",
    "World",
    "attends",
    "attention_bound",
    "blocks",
    "bound",
    "caches",
    "cases",
    "chains",
    "check_laws",
    "check_recurrence",
    "codecs",
    "dense_attention",
    "digest",
    "histories",
    "holds",
    "law_suite",
    "layouts",
    "observe",
    "policies",
    "refused",
    "resolve",
    "same",
    "shapes",
    "small_steps",
    "spans",
    "specs",
    "tokens",
    "verbs",
]
