"""CUDA C++ submissions: played on a CPU under watch, compiled by nvcc, held to the same goal."""
