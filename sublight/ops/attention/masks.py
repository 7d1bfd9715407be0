"""Which keys a query sees, in words, for PyTorch, and as ranges of blocks for kernels.

Queries are aligned to the end: the last one stands at the last key, as when new tokens follow a cache. Query i of q_len
stands at position i + kv_len - q_len, which may lie before the first key; such a query may see nothing, and its result
is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sublight.backend.jit import tl, triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Causal: no key behind the query. Window: only keys less than so many places away; 0: all."""

    causal: bool
    window: int

    def needed(self, q_len: int, kv_len: int) -> Mask:
        """The same without what hides no key at these lengths.

        >>> Mask(causal=True, window=9).needed(1, 9)
        Mask(causal=False, window=0)
        >>> Mask(causal=True, window=8).needed(2, 9)
        Mask(causal=True, window=8)
        """
        hides_ahead = q_len > 1
        reach = kv_len if self.causal else max(q_len, kv_len)  # the furthest that a key may be from a query
        return Mask(causal=self.causal and hides_ahead, window=self.window if 0 < self.window < reach else 0)

    def blind(self, q_len: int, kv_len: int) -> int:
        """So many queries, the first ones, see no key.

        >>> Mask(causal=True, window=0).blind(5, 3), Mask(causal=False, window=2).blind(5, 3)
        (2, 1)
        """
        reach = 0 if self.causal else self.window - 1
        return q_len if not kv_len else max(0, q_len - kv_len - reach) if self.causal or self.window else 0

    def matrix(self, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor | None:
        """True where a query (row) sees a key (column); None where all see all."""
        if not self.causal and not self.window:
            return None
        behind = torch.arange(q_len, device=device)[:, None] + (kv_len - q_len) - torch.arange(kv_len, device=device)
        seen = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        return seen & (behind.abs() < self.window) if self.window else seen


@triton.jit
def is_seen(position, key, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the query at a position sees a key, for keys that exist."""
    behind = position - key
    seen = behind >= 0 if CAUSAL else behind == behind
    if WINDOW:
        seen = seen & (behind < window) & (behind > -window)
    return seen


@triton.jit
def keys_seen(first, last, kv_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Of the queries from position `first` to `last`: blocks of keys from `begin` to `end` are seen by some, those from
    `inner` to `outer` whole and by all, so that they need no mask. All but `end` are multiples of BLOCK."""
    begin, inner, outer, end = 0, 0, kv_len, kv_len
    if CAUSAL:
        outer, end = tl.minimum(outer, first + 1), tl.minimum(end, last + 1)
    if WINDOW:
        begin, inner = tl.maximum(first - window + 1, 0), tl.maximum(last - window + 1, 0)
        if not CAUSAL:
            outer, end = tl.minimum(outer, first + window), tl.minimum(end, last + window)
    return _in_blocks(begin, inner, outer, end, BLOCK)


@triton.jit
def queries_seeing(first, last, q_len, kv_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Of the keys from `first` to `last`: the blocks of queries that see some, and those that see all, as above."""
    ahead = kv_len - q_len  # from a query's number to its position
    begin, inner, outer, end = 0, 0, q_len, q_len
    if CAUSAL:
        begin, inner = tl.maximum(first - ahead, 0), tl.maximum(last - ahead, 0)
    if WINDOW:
        outer, end = tl.minimum(outer, first + window - ahead), tl.minimum(end, last + window - ahead)
        if not CAUSAL:
            begin, inner = tl.maximum(first - window + 1 - ahead, 0), tl.maximum(last - window + 1 - ahead, 0)
    return _in_blocks(begin, inner, outer, end, BLOCK)


@triton.jit
def _in_blocks(begin, inner, outer, end, BLOCK: tl.constexpr):
    begin = begin // BLOCK * BLOCK  # not negative: division of negative numbers differs between compiler and Python
    inner = tl.maximum((inner + BLOCK - 1) // BLOCK * BLOCK, begin)
    outer = tl.maximum(tl.maximum(outer, 0) // BLOCK * BLOCK, inner)
    return begin, inner, outer, tl.maximum(end, 0)
