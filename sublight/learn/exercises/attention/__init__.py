"""Attention: from three passes over the keys for each query to flash attention, its gradient, and paged decoding."""
