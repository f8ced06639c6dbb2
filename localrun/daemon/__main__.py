"""`python -m localrun.daemon`: the daemon without the terminal program."""

import sys

from localrun.daemon.serve import main

if __name__ == "__main__":
    sys.exit(main())
