"""llama.cpp's server out of the xllamacpp package: `xllamacpp_server.py MODEL THREADS SLOTS CONTEXT PORT`. Run by peer.py in the
environment that has the package; serves until it is ended."""

from __future__ import annotations

import sys
import threading

import xllamacpp  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    model, threads, slots, context, port = sys.argv[1], *(int(word) for word in sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx, params.port = slots, context, port
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
