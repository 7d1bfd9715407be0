"""Races and bounds of Triton kernels, on the CPU, under an instrumented interpreter."""
