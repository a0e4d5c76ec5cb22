"""The laws as a class that pytest collects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ._laws import LAWS, Case, Law
from ._recipes import Recipe
from ._strategies import VERBS, cases

SLOW = ("compiled_is_eager",)
"""Laws that compile code for every example; a suite tries ``1 / RARE`` as many of them."""

RARE = 25


def law_suite(
    empty: Callable[[], Any] | st.SearchStrategy[Recipe],
    *,
    laws: Mapping[str, Law] = LAWS,
    data: st.SearchStrategy[Case] | None = None,
    allowed: Sequence[str] = VERBS,
    convertible: bool = True,
) -> type:
    """A class with one test a law, for pytest to collect.

    Assign it to a name that starts with ``Test``. How many examples are tried is Hypothesis'
    business: its settings and profiles apply.

    Args:
        empty: builds an empty cache (a :class:`Recipe` also says who sees whom), or a strategy of
            recipes.
        laws: which laws.
        data: the cases, by default :func:`cases`.
        allowed: the verbs of the histories that the cache has, of :data:`VERBS`, and ``"seal"``.
        convertible: whether it has ``convert``.

    >>> import kvfun
    >>> TestFull = law_suite(lambda: kvfun.empty("plain"))
    >>> hasattr(TestFull, "test_append_is_associative")
    True
    """
    recipes = empty if isinstance(empty, st.SearchStrategy) else st.just(Recipe.of(empty))
    drawn = cases(allowed=allowed, convertible=convertible) if data is None else data
    return type(
        "LawSuite", (), {f"test_{name}": _test(laws[name], recipes, drawn) for name in laws}
    )


def _test(law: Law, recipes: st.SearchStrategy[Recipe], drawn: st.SearchStrategy[Case]) -> Any:
    @given(recipe=recipes, case=drawn)
    def test(self: Any, recipe: Recipe, case: Case) -> None:
        law(recipe, case)

    test.__doc__ = law.__doc__
    if law.__name__ in SLOW:
        test = settings(
            max_examples=max(2, settings().max_examples // RARE),
            suppress_health_check=[HealthCheck.too_slow],
        )(test)
    return test
