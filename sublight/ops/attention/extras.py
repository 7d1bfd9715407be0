"""What a call may have beside its mask: packed sequences, a bias by distance, sinks, dropout; kernels pay for it only
where it is there.

Packed: sequences of any lengths lie one after another, and `cu_seqlens` says where each begins. It stays on the device:
the grid has room for every way to cut so many tokens into so many sequences, and a program finds its own by search.
Dropout: whether a weight stays depends on a seed and on the numbers of sequence and head, query and key alone, so that
any tile of any pass draws the same, and nothing is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sublight.backend.jit import tl, triton
from sublight.ops.attention.mods import mods_named

DRAWS = 2**31  # a weight's draw is a whole number below


class Extras(NamedTuple):
    """What the plan of one call depends on besides q, k and v; the tensors behind it go by their names."""

    sequences: int = 0  # packed ones; 0: a batch of equal lengths
    has_slopes: bool = False
    has_sinks: bool = False
    dropout: float = 0.0
    has_prefix: bool = False
    mods: str = ""  # the caller's own functions, by name
    mod_tensors: int = 0
    is_invariant: bool = False  # the same bits as over pages, and whatever else is in the batch

    def names(self) -> str:
        """Of the kernels' pointers; one that is not there is never read, and any tensor may stand for it."""
        cu = "cu_seqlens_q cu_seqlens_k" if self.sequences else "lse lse"
        slopes, sinks = "alibi_slopes" if self.has_slopes else "lse", "sinks" if self.has_sinks else "lse"
        mods = (*("mod_a", "mod_b")[: self.mod_tensors], "lse", "lse")[:2]
        prefix = "prefix" if self.has_prefix else "lse"
        return f"{cu} {slopes} {sinks} {'seed' if self.dropout else 'lse'} {prefix} {' '.join(mods)}"

    def numbers(self) -> tuple[int, int, float]:
        return self.sequences, least_kept(self.dropout), 1 / (1 - self.dropout)

    def flags(self) -> dict[str, Any]:
        mods = mods_named(self.mods)
        return {
            "PACKED": self.sequences > 0,
            "ALIBI": self.has_slopes,
            "SINKS": self.has_sinks,
            "DROPOUT": self.dropout > 0,
            "PREFIX": self.has_prefix,
            "SCORE_MOD": mods.score,
            "MASK_MOD": mods.mask,
            "MOD_TENSORS": self.mod_tensors,
        }

    def words(self) -> str:
        """The extras that a call has, in words, for the reason of a plan."""
        given = {
            "packed sequences": self.sequences, "ALiBi": self.has_slopes, "sinks": self.has_sinks,
            "dropout": self.dropout, "a prefix": self.has_prefix, "own functions": self.mods,
            "the batch-invariant mode": self.is_invariant,
        }  # fmt: skip
        return ", ".join(name for name, value in given.items() if value)


NONE = Extras()


def least_kept(dropout: float) -> int:
    """The smallest draw that keeps a weight."""
    return round(dropout * DRAWS)


@triton.jit
def sequence_at(block, cu_ptr, sequences, tokens, ROWS: tl.constexpr):
    """Of a block of rows: its sequence, its first row there, the sequence's first token and its length.

    Sequence i has the blocks from cu[i] // ROWS + i on, at least as many as it needs: some begin past its end.
    """
    low = block * 0
    high = low + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(cu_ptr + middle).to(tl.int32) // ROWS + middle <= block
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    start, length = span_of(low, cu_ptr, tokens)
    return low, (block - start // ROWS - low) * ROWS, start, length


@triton.jit
def span_of(sequence, cu_ptr, tokens):
    """A sequence's first token and its length; never past the tokens, whatever the numbers are."""
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence).to(tl.int32), 0), tokens)
    end = tl.minimum(tl.load(cu_ptr + sequence + 1).to(tl.int32), tokens)
    return start, tl.maximum(end - start, 0)


@triton.jit
def in_units(x, EXACT: tl.constexpr):
    """A score in the units that `power` takes."""
    return x if EXACT else x * 1.4426950408889634


@triton.jit
def kept(weights, seed, entry, row, key, least, growth):
    """Weights after dropout; row and key have the weights' shape but for dimensions of one."""
    none = row * 0 + key * 0
    draw, _, _, _ = tl.philox(seed, none + key, none + row, none + entry, none)
    return tl.where((draw >> 1).to(tl.int32) >= least, weights * growth, 0.0)


def kept_by_torch(seed: torch.Tensor, entries: torch.Tensor, q_len: int, kv_len: int, dropout: float) -> torch.Tensor:
    """What `kept` keeps, (entries, q_len, kv_len), in PyTorch's ops: Philox 4x32 with ten rounds."""
    device, low = seed.device, 0xFFFFFFFF
    key = torch.arange(kv_len, device=device)[None, None, :]
    row = torch.arange(q_len, device=device)[None, :, None]
    c0, c1, c2, c3 = key, row, entries[:, None, None], torch.zeros_like(key)
    key_a, key_b = seed.flatten()[0] & low, (seed.flatten()[0] >> 32) & low

    def product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The high and the low 32 bits; x * factor may pass 2**63, so that x goes in halves."""
        bottom, top = (x & 0xFFFF) * factor, (x >> 16) * factor
        middle = top + (bottom >> 16)
        return middle >> 16, ((middle << 16) | (bottom & 0xFFFF)) & low

    for _ in range(10):
        high_a, low_a = product(c0, 0xD2511F53)
        high_b, low_b = product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ key_a, low_b, high_a ^ c3 ^ key_b, low_a
        key_a, key_b = (key_a + 0x9E3779B9) & low, (key_b + 0xBB67AE85) & low
    return (c0 >> 1) >= least_kept(dropout)
