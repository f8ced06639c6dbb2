"""Weights made smaller: quantizers for ggml's tensor types, and whole GGUF files through them. Knows files; neither the store nor HTTP.

`python -m localrun.quantize IN OUT TYPE` runs in a process of its own, since it loads NumPy and Numba.
"""
