"""The engine inside a runner process: block pool, scheduler, sampler, step. Knows models as `models.model.Model`; knows nothing of HTTP."""

import os

# NumPy's linear algebra is not used here, and its threads, started with the import, would take the kernels' cores for the first tenths
# of a second.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
