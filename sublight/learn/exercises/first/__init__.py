"""Chapter 1: first kernels. What a program is, which elements are its own, and why memory decides the time."""
