"""Speculative rounds: a block of tokens that is read first and decided on afterwards.

A round is a value around a cache. The verify block (the pending token and the drafts behind it) is
appended to it and attends like any other; then all of it is kept (:func:`commit`), or its first
tokens (:func:`rollback`). To abandon a round is to drop it.

>>> import kvfun, mlx.core as mx
>>> k = mx.random.normal((1, 2, 5, 64))
>>> cache = kvfun.append(kvfun.empty("kv4", window=8), k, k)
>>> turn = begin(cache, drafts=4)
>>> turn = kvfun.append(turn, k, k)                 # the pending token and four drafts
>>> out = kvfun.attend(turn, mx.random.normal((1, 8, 5, 64)), phase="window")
>>> cache = rollback(turn, keep=3)                  # two drafts were accepted
>>> kvfun.offsets(cache)
(8,)

A model's caches go through a round together: every function takes a tuple or list of them, one a
layer, and returns such a one.

Drafts may branch: :func:`begin_tree` verifies a tree of them in one block, and :func:`select`
keeps one path.

>>> k = mx.random.normal((1, 2, 4, 64))
>>> turn = begin_tree(cache, parents=[-1, 0, 0, 2])  # two drafts behind the pending token, and one
>>> turn.depths, turn.positions.tolist()
((0, 1, 1, 2), [[8, 9, 9, 10]])
>>> turn = kvfun.append(turn, k, k)                 # keys after RoPE at those positions
>>> out = kvfun.attend(turn, mx.random.normal((1, 8, 4, 64)), phase="window")
>>> kvfun.offsets(select(turn, [0, 2, 3]))
(11,)
"""

from ._rounds import Round, begin, commit, rollback
from ._trees import TreeRound, begin_tree, select

__all__ = ["Round", "TreeRound", "begin", "begin_tree", "commit", "rollback", "select"]
