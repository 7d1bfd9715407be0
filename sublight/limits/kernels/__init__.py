"""The kernels that measure this machine; apart from their probes, so that reading cached limits needs no Triton."""
