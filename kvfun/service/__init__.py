"""Where state is held for servers: boxes around values.

>>> AdmissionPool(1 << 30).state.used
0
"""

from ._admission import AdmissionPool, Lease

__all__ = ["AdmissionPool", "Lease"]
