"""A daemon as a process of its own, with a scripted model: `program.py FOLDER [idle seconds | loading]`. Prints its port.

loading: its model never comes to an end of loading.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from localrun.daemon.serve import serve
from localrun.settings import Settings
from localrun.store import Store
from tests import fakes
from tests.daemon.serving import add_model
from tests.daemon.test_lifetimes import load_silently as load_for_ever


def ready(host: str, port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    loading = "loading" in sys.argv[2:]
    idle_exit = float(sys.argv[2]) if len(sys.argv) > 2 and not loading else 0.0
    settings = Settings(port=0, models=folder / "models", cache=Path(os.environ["LOCALRUN_CACHE"]), idle_exit=idle_exit)
    add_model(Store(settings.models), "tiny")
    load = load_for_ever if loading else functools.partial(fakes.load_scripted, reply="word " * 3000, delay=0.01)
    serve(settings, ready=ready, load=load, warm=False)
