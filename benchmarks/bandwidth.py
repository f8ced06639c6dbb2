"""What this machine can do at most: bytes a second read from memory (read only, several sizes), 8-bit multiply-adds a second by
instruction set.

    python benchmarks/bandwidth.py [--threads 1,2]
"""

from __future__ import annotations

import argparse
import sys

import host

sys.path.insert(0, str(host.ROOT))

from localrun.engine.machine import Yardstick
from localrun.kernels_cpu import isa
from localrun.models.load import default_threads

SIZES = (1, 16, 100, 400, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, default_threads()}))))
    options = parser.parse_args()
    threads = [int(word) for word in options.threads.split(",")]
    print(f"machine: {host.describe()}\n")
    print("reading, GB/s     " + "".join(f"{size:>8} MiB" for size in SIZES))
    for n in threads:
        with Yardstick(n) as yardstick:
            speeds = [yardstick.read_bytes_s(size << 20) / 1e9 for size in SIZES]
        print(f"{n:>3} threads       " + "".join(f"{speed:>12.1f}" for speed in speeds), flush=True)
    print("\n8-bit multiply-adds, G/s" + "".join(f"{name:>10}" for name in isa.available()))
    for n in threads:
        found = []
        for name in isa.available():
            with Yardstick(n, name) as yardstick:
                found.append(yardstick.multiply_adds_s() / 1e9)
        print(f"{n:>3} threads             " + "".join(f"{speed:>10.0f}" for speed in found), flush=True)
    print(f"\nload average at the end: {host.load_average()}")


if __name__ == "__main__":
    main()
