"""Calls as CUDA graphs: captured per kind of call, guarded before each replay, refused with a reason."""
