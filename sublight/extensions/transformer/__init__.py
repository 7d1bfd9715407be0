"""The transformer's ops in CUDA C++, forward and backward, and a GPT-2 step on them alone."""
