"""Where state is held for servers: boxes around values.

>>> AdmissionPool(1 << 30).state.used
0
"""

from ._admission import AdmissionPool, Lease
from ._encoder import EncoderCache

__all__ = ["AdmissionPool", "EncoderCache", "Lease"]
