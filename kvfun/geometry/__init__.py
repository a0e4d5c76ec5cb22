"""Geometry: which columns of a buffer hold which positions of which row, and who may see whom.

Host integers only: nothing here knows what an array is, except :func:`mask_array`, the one
function that turns the description of a mask into an array.
"""

from ._geometry import Geometry, Plan, Relayout, Row, Write, concat_layout, stride
from ._mask import Block, JoinedMask, Mask, MaskArray, for_kernel, mask_array, mask_block
from ._policy import STEP, Policy, round_up
from ._segments import Ageing, ChainPlan, Segments, body_part, check_sealable, front_part

__all__ = [
    "STEP",
    "Ageing",
    "Block",
    "ChainPlan",
    "Geometry",
    "JoinedMask",
    "Mask",
    "MaskArray",
    "Plan",
    "Policy",
    "Relayout",
    "Row",
    "Segments",
    "Write",
    "body_part",
    "check_sealable",
    "concat_layout",
    "for_kernel",
    "front_part",
    "mask_array",
    "mask_block",
    "round_up",
    "stride",
]
