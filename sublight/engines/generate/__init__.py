"""Llama-like models decoded over a cache in pages: pages, scheduler, model, sampling, and the engine around them."""
