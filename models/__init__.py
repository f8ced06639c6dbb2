"""Model families and the file they come from. Knows kernels; knows nothing of requests, sampling or HTTP."""
