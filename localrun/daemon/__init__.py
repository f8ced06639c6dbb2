"""The daemon process: HTTP app, loaded models, lifetimes. Imports neither Numba nor NumPy."""
