"""Llama-like models decoded over a cache in pages: allocator, scheduler, model, sampling, and the engine around them."""
