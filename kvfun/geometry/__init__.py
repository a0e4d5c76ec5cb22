"""Geometry: which columns of a buffer hold which positions of which row, and who may see whom.

Host integers only: nothing here knows what an array is, except :func:`mask_array`, the one
function that turns the description of a mask into an array.
"""

from ._geometry import Geometry, Plan, Relayout, Row, Write, concat_layout, stride
from ._mask import Mask, MaskArray, mask_array
from ._policy import STEP, Policy, round_up

__all__ = [
    "STEP",
    "Geometry",
    "Mask",
    "MaskArray",
    "Plan",
    "Policy",
    "Relayout",
    "Row",
    "Write",
    "concat_layout",
    "mask_array",
    "round_up",
    "stride",
]
