"""SIMD kernels in Python. Knows numbers and bytes; knows nothing of models, files or requests. Importing this package imports no Numba."""
