"""Recurrences: how the state of a layer takes in tokens.

A recurrence is a record with the weights of its layer and two methods::

    recurrence.start(inputs) -> states                     # before the first token
    recurrence.run(states, inputs, spans) -> out, states   # over a block of tokens

* ``states``: arrays by name, ``[batch, ...]``;
* ``inputs``: arrays by name, ``[batch, tokens, ...]``, each computed from its own token alone;
* ``spans``: for each row the columns ``[start, stop)`` of the block that are tokens of its own,
  ``None`` where all are. The others are padding: they enter no state, and what comes out for them
  means nothing.

Two things are promised: a row's result does not depend on its padding, and the states after a block
are, bit for bit, those after the same tokens in any other blocks. So a state is taken back by
running the tokens that stay from the state before, and a row of a batch is the row alone.
:func:`kvfun.testing.check_recurrence` tests both.

:class:`GatedDelta`, :class:`Mamba2`, :class:`SelectiveScan` (Mamba), :class:`LinearAttention`,
:class:`GatedLinearUnit` (RG-LRU) and :class:`ShortConv` are recurrences; :func:`causal_conv`,
:func:`gated_delta` and :func:`scanned` are what they are made of.
"""

from ._conv import ShortConv, causal_conv
from ._gated_delta import GatedDelta, gated_delta
from ._linear import LinearAttention
from ._mamba import Mamba2, SelectiveScan
from ._protocol import Inputs, Recurrence, Spans, States
from ._rglru import GatedLinearUnit
from ._scan import scanned, valid_columns

__all__ = [
    "GatedDelta",
    "GatedLinearUnit",
    "Inputs",
    "LinearAttention",
    "Mamba2",
    "Recurrence",
    "SelectiveScan",
    "ShortConv",
    "Spans",
    "States",
    "causal_conv",
    "gated_delta",
    "scanned",
    "valid_columns",
]
