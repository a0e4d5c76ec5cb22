"""Hypothesis profiles, and the runtime check of the shapes in signatures."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).parent.parent

# The first example compiles kernels, and a machine's step may: only speed is not judged.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("dev", max_examples=15, stateful_step_count=15, **COMMON)
settings.register_profile(
    "ci", max_examples=200, stateful_step_count=30, derandomize=True, database=None, **COMMON
)
settings.register_profile("nightly", max_examples=5000, stateful_step_count=60, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def checked_modules() -> list[str]:
    """Modules with shapes in their signatures.

    Not the verbs: they check what they are given themselves and say more, and tests of bad input
    must see their errors. Everything below them is called with what they have checked.
    """
    files = [path for path in (ROOT / "kvfun").rglob("*.py") if "caches" not in path.parts]
    shaped = [path for path in files if "from jaxtyping import" in path.read_text()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in shaped]


if os.environ.get("KVFUN_TYPECHECK", "1") != "0" and "kvfun" not in sys.modules:
    install_import_hook(checked_modules(), "beartype.beartype")
