"""Methods to make a step faster: traces, CUDA graphs, fused and compiled kernels."""
