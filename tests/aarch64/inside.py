"""What the emulated Python does first, as a pytest plugin or imported: it has kernels compiled natively, see compiler.py."""

from __future__ import annotations

import os
import sys

if "TESTS_COMPILER" in os.environ:
    sys.executable = os.environ["TESTS_COMPILER"]
