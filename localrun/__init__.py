"""localrun: language models on one's own machine.

The repository keeps `kernels_cpu`, `models` and `cli` beside this folder so that a reader finds them at the top level; installed,
they live under this package (pyproject maps them). Run from a checkout, the lines below make the same names resolve there.
"""

from pathlib import Path

__version__ = "0.1.0"

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "kernels_cpu").is_dir() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))
