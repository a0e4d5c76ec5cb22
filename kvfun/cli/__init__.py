"""The command line: ``kvfun compare``, ``kvfun generate``, ``kvfun version``.

Importing this package is cheap; typer, rich and mlx-lm are imported when a command runs.
"""

from __future__ import annotations

import importlib.util
import sys

_REQUIRED = ("typer", "rich", "mlx_lm")

__all__ = ["main"]


def main() -> None:
    """Runs the command line with the arguments of the process."""
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"The kvfun command needs {', '.join(missing)}, which is not installed.\n"
            "Install it with: pip install 'kvfun[demo]'"
        )
    from kvfun.cli._app import run

    run()
