"""A decoding loop like gpt-fast's, for engines.py: PyTorch's ops over a contiguous cache, torch.compile, a graph.

The function that is compiled is one layer, called for each: it compiles in seconds where the unrolled model took more
than two minutes. A layer begins with the sum that the last one left, so that its norm is fused with it as in the whole
model. The step, head and choice of the token included, is then captured as one CUDA graph, which is what
mode="reduce-overhead" does, and nothing but its replay is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sublight.engines.generate.config import Config
    from sublight.engines.generate.llama import Weights


class Loop:
    """Texts of `context` tokens, whose next ones are chosen on the device; `step()` makes one of each."""

    def __init__(
        self, config: Config, made: Weights, batch: int, context: int, device: str, compiled: Callable[..., Any]
    ) -> None:
        import torch

        from sublight.engines.generate.llama import Llama

        self.config, self.made, self.batch, self.device = config, made, batch, device
        turning = Llama(config, made, mode="eager")
        self.cos, self.sin = (torch.cat((x, x), -1) for x in (turning.cos, turning.sin))
        rows = (config.layers, batch * config.longest, config.kv_heads, config.head_dim)
        self.k, self.v = (torch.randn(rows, device=device).to(made.tokens.dtype) for _ in range(2))
        self.ids = torch.arange(batch, device=device) % config.vocab
        self.positions = torch.full((batch,), context, dtype=torch.int64, device=device)
        self.first = torch.arange(batch, device=device) * config.longest
        self.layer, self.head = compiled(self._layer), compiled(self._head)
        self.graph: Any = None

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        import torch.nn.functional as F

        return F.rms_norm(x, x.shape[-1:], weight, self.config.eps)

    def _layer(
        self, x: Any, residual: Any, norm_1: Any, qkv: Any, out: Any, norm_2: Any, gate_up: Any, down: Any,
        k_cache: Any, v_cache: Any, cos: Any, sin: Any, slots: Any, seen: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """One layer: returns what it adds, and the sum that this is to be added to."""
        import torch
        import torch.nn.functional as F

        config, batch = self.config, self.batch
        residual = x + residual
        heads = F.linear(self._norm(residual, norm_1), qkv).view(batch, -1, config.head_dim)
        q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), 1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]

        k_cache[slots], v_cache[slots] = turned(k), v
        keys, values = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (k_cache, v_cache))
        y = F.scaled_dot_product_attention(turned(q)[:, :, None], keys, values, attn_mask=seen, enable_gqa=True)
        residual = residual + F.linear(y.reshape(batch, -1), out)
        gate, up = F.linear(self._norm(residual, norm_2), gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down), residual

    def _head(self, x: Any, residual: Any, norm: Any, head: Any) -> Any:
        import torch.nn.functional as F

        return F.linear(self._norm(x + residual, norm), head).argmax(-1)

    def launch(self) -> None:
        """Make one token for each text, launch by launch."""
        import torch
        import torch.nn.functional as F

        x = F.embedding(self.ids, self.made.tokens)
        residual = torch.zeros_like(x)
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        slots = self.first + self.positions
        seen = (torch.arange(self.config.longest, device=self.device) <= self.positions[:, None])[:, None, None]
        for number, block in enumerate(self.made.blocks):
            weights = (
                block.norm_1,
                block.qkv.weight,
                block.out.weight,
                block.norm_2,
                block.gate_up.weight,
                block.down.weight,
            )
            x, residual = self.layer(x, residual, *weights, self.k[number], self.v[number], cos, sin, slots, seen)
        self.ids.copy_(self.head(x, residual, self.made.norm, self.made.head.weight))
        self.positions.add_(1)

    def step(self) -> None:
        import torch

        with torch.no_grad():
            if self.device != "cuda":
                return self.launch()
            if self.graph is None:
                beside = torch.cuda.Stream()
                with torch.cuda.stream(beside):
                    for _ in range(3):  # compiled, and workspaces there
                        self.launch()
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.launch()
            self.graph.replay()
        return None
