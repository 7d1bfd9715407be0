"""The end-to-end proofs: a GPT-2 trained on our ops (`train/`), Llama-like models decoded over a paged cache
(`generate/`)."""
