"""CUDA kernels: the same arithmetic as kernels_cpu, to the bit, on a card or emulated on the host. Only card.py imports CuPy."""
