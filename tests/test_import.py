"""What ``import kvfun`` brings along, seen in a fresh process."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import kvfun
print(json.dumps(sorted(sys.modules)))
"""


def imported():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(run.stdout)


def test_nothing_heavy_comes_along():
    modules = imported()
    heavy = {"mlx_lm", "matplotlib", "rich", "typer", "transformers", "hypothesis", "beartype"}
    assert not heavy & {name.partition(".")[0] for name in modules}
    assert "kvfun" in modules
