"""How modules of this package are run in processes of their own, and where they leave results."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def command(module: str, python: str = sys.executable) -> list[str]:
    """Returns the words that run a module of this package, from any directory: "faults.kills"."""
    return [python, str(ROOT / "evaluation"), module]
