"""pip in a process of its own that ends when whoever started it does.

    python -P pip_child.py TEMPORARY_FOLDER download ...

Standard input is a pipe that the parent holds open: its end, however the parent came to it, ends this process. The folder is where pip
keeps what it is downloading, so that the parent can see it grow. Run as a script; imports nothing of ours.
"""

import os
import runpy
import sys
import tempfile
import threading


def _follow_parent() -> None:
    # os.read, not sys.stdin: a thread that waits inside a buffered reader would break the interpreter's shutdown
    while os.read(0, 1):
        pass
    os._exit(130)


if __name__ == "__main__":
    threading.Thread(target=_follow_parent, daemon=True).start()
    tempfile.tempdir = sys.argv.pop(1)
    sys.argv[0] = "pip"
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
