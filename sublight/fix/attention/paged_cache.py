"""Hugging Face's own `generate()` over a cache in pages, each new token's step as a CUDA graph.

    with paged_cache(model, batch=10, tokens=1152) as cache:
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=128)

Keys and values go into pages (`kv_write`), one new token of each text attends over them (`paged_attention`), and where
the next one goes the device itself counts: so a step does the same launches each time, and `sublight.graph` replays
them. Padding at the left is not stored. A prompt is prefilled at once, by the model's own attention and masks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch

from sublight.errors import BadInput, one_of
from sublight.fix.attention import one_row
from sublight.fix.attention.hugging_face import use_in_transformers
from sublight.fix.graph.backend import Backend
from sublight.fix.graph.callable import graph as graph_of
from sublight.ops.attention.kv_write import kv_write
from sublight.ops.attention.paged_attention import paged_attention

NAME = "sublight_paged"
Scope = Literal["none", "forward", "head"]
SCOPES: tuple[Scope, ...] = ("none", "forward", "head")
NOT_HERE = "a cache in pages decodes a prompt token by token, without beams: for another prompt call its reset() first"

WITHOUT_PAGES = (
    "a new token has lost its pages: give the model the cache; one that changes keys behind it needs another"
)


class Store:
    """Pages of every layer, and how many tokens each text has in them: all on the device."""

    def __init__(self, batch: int, tokens: int, page: int) -> None:
        self.batch, self.tokens, self.page = batch, tokens, page
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a layer: (pages, size, kv_heads, head_dim) each

    def begin(self, is_text: torch.Tensor) -> None:
        """Of a prompt (batch, length): which tokens are text, and no padding."""
        device, width = is_text.device, -(-self.tokens // self.page)
        if bool((is_text[:, :-1] & ~is_text[:, 1:]).any()) or not bool(is_text[:, -1].all()):
            raise BadInput("the attention mask has padding behind or inside of a text: pad on the left")
        if not self.caches:
            self.table = torch.arange(self.batch * width, dtype=torch.int32, device=device).view(self.batch, width)
            self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)
            self.slots = torch.zeros(self.batch, dtype=torch.int64, device=device)
            self.first_slots = (
                torch.arange(self.batch, device=device) * width * self.page
            )  # a text's pages are neighbours
        self.lengths.copy_(is_text.sum(1))  # in place: a graph reads them where they are
        slots = self.first_slots[:, None] + is_text.cumsum(1) - 1
        self.prompt_slots: torch.Tensor | None = torch.where(is_text, slots, -1).flatten()

    def advance(self) -> None:
        """A step begins: where each text's new token goes, and that it is there. Before all else of the step: launches
        that begin early may read both."""
        torch.add(self.first_slots, self.lengths, out=self.slots)
        self.lengths.add_(1)

    def write_prompt(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """(batch, kv_heads, length, head_dim) each."""
        if layer == len(self.caches):
            size = (self.table.numel(), self.page, k.shape[1])
            self.caches.append((k.new_zeros(*size, k.shape[3]), v.new_zeros(*size, v.shape[3])))
        assert self.prompt_slots is not None
        rows = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v)]
        kv_write(rows[0], rows[1], *self.caches[layer], self.prompt_slots)

    def write_token(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        kv_write(k[:, :, 0], v[:, :, 0], *self.caches[layer], self.slots)

    def attend(self, layer: int, q: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        """q (batch, heads, 1, head_dim); (batch, 1, heads, head_dim) out, as transformers wants it."""
        k, v = self.caches[layer]
        return paged_attention(q[:, :, 0], k, v, self.table, self.lengths, scale=scale, window=window)[:, None]


@contextlib.contextmanager
def paged_cache(
    model: Any, *, batch: int, tokens: int, page: int = 16, scope: Scope = "head", backend: Backend | None = None
) -> Iterator[Any]:
    """A cache for `model.generate(…, past_key_values=cache)`: `batch` texts of up to `tokens` each, new ones included.

    Inside, the model's attention is ours. `scope` is what a graph holds of a new token's step: "forward" the layers,
    "head" the logits, too; "none" launches. `cache.report()` says what the graphs took and brought. One text inside of
    a graph on a Hopper GPU goes by fewer launches (`one_row.py`); `cache.why_not_rows` says why it does not.
    """
    one_of("scope", scope, SCOPES)
    if batch < 1 or tokens < 2 or page < 1:
        raise BadInput(f"{batch} texts of {tokens} tokens in pages of {page}: give 1 or more, and room for a new token")
    name, before = _register(), model.config._attn_implementation
    cache = _cache_class()(batch, tokens, page)
    cache.why_not_rows = (
        "it is for one text inside of a graph" if batch > 1 or scope == "none" else one_row.why_not(model)
    )
    inner = model.get_decoder() if scope == "forward" else model
    forward, own = inner.forward, vars(inner).get("forward")
    inner.forward = cache.steps = _Steps(forward, cache, scope, backend)
    model.set_attn_implementation(name)
    try:
        with contextlib.nullcontext() if cache.why_not_rows else one_row.rows(model, cache):
            yield cache
    finally:
        if own is None:
            del inner.forward  # the class's own again
        else:
            inner.forward = own
        model.set_attn_implementation(before)


class _Steps:
    """A model's forward whose calls of one new token go by a graph; the cache counts the calls."""

    def __init__(self, forward: Any, cache: Any, scope: Scope, backend: Backend | None) -> None:
        self.forward, self.cache = forward, cache

        def step(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            cache.store.advance()
            out = forward(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
            return out[0]  # type: ignore[no-any-return]

        options: dict[str, Any] = {"backend": backend} if backend else {}
        self.step: Any = step if scope == "none" else graph_of(step, **options)
        self.output: Any = None

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        cache = self.cache
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **more}
        if past_key_values is not cache or input_ids is None:
            return self.forward(past_key_values=past_key_values, **given)
        count, length = input_ids.shape
        if count != cache.store.batch or cache.seen + length > cache.store.tokens:
            held = f"{cache.store.batch} texts of {cache.store.tokens} tokens"
            raise BadInput(f"{count} texts of {cache.seen + length} tokens do not fit a cache for {held}: make it so")
        if cache.seen and length > 1:
            raise BadInput(NOT_HERE)
        if not cache.seen:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            cache.store.begin(mask.bool())
            out = self.forward(past_key_values=cache, **given)
            cache.seen, self.output = length, type(out)
            cache.store.prompt_slots = None  # a graph would take another tensor there for a change
            return out
        if position_ids is None:
            position_ids = cache.store.lengths.long()[:, None]
        first = self.step(input_ids, position_ids.expand(count, 1).contiguous())
        cache.seen += 1
        name = "logits" if "logits" in self.output.__dataclass_fields__ else "last_hidden_state"
        return self.output(**{name: first, "past_key_values": cache})


@functools.cache
def _cache_class() -> Any:
    """A subclass of transformers' `Cache`, made when it is first needed: transformers may not be there."""
    from transformers.cache_utils import Cache

    class PagedCache(Cache):  # type: ignore[misc]
        """What transformers asks of a cache, answered by a `Store`."""

        is_compileable = False

        def __init__(self, batch: int, tokens: int, page: int) -> None:
            super().__init__(layers=[])
            self.store, self.seen = Store(batch, tokens, page), 0  # seen: tokens of a row, padding included
            self.steps: Any = None
            self.why_not_rows = ""

        def report(self) -> Any:
            """What `sublight.graph` reports; None without a graph."""
            step = self.steps.step
            return step.report() if hasattr(step, "report") else None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            write = self.store.write_token if self.seen else self.store.write_prompt
            write(layer_idx, key_states, value_states)
            key_states.sublight_pages = (self.store if self.seen else None, layer_idx)  # type: ignore[attr-defined]
            return key_states, value_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.seen

        def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
            length = query_length if isinstance(query_length, int) else len(query_length)
            return self.seen + length, 0

        def get_max_length(self, layer_idx: int | None = None) -> int:
            return self.store.tokens

        get_max_cache_shape = get_max_length

        def __len__(self) -> int:
            return len(self.store.caches)

        def reset(self) -> None:
            self.seen = 0

        def _refuse(self, *args: Any, **more: Any) -> Any:
            raise BadInput(NOT_HERE)

        reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse

    return PagedCache


@functools.cache
def _register() -> str:
    """Our attention over pages under a name of its own; a prompt's is `attn_implementation="sublight"`'s."""
    prompt = use_in_transformers()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    by_prompt = ALL_ATTENTION_FUNCTIONS[prompt]

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        store, layer = getattr(key, "sublight_pages", (None, None))
        if layer is None and query.shape[2] == 1:  # it would attend to itself alone
            raise BadInput(WITHOUT_PAGES)
        if store is None:
            return by_prompt(module, query, key, value, mask, **more)  # type: ignore[no-any-return]
        if more.get("softcap") or more.get("s_aux") is not None or more.get("position_bias") is not None:
            raise BadInput("soft caps, sinks and position biases are not for a cache in pages: use another cache")
        return store.attend(layer, query, more.get("scaling"), more.get("sliding_window")), None

    def mask(*args: Any, **more: Any) -> Any:
        """None for one new token: what it sees is a matter of lengths. Else what `sdpa` gets."""
        length = more.get("q_length", more.get("cache_position"))
        is_one = length == 1 if isinstance(length, int) else length is not None and len(length) == 1
        return None if is_one else sdpa_mask(*args, **more)

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask)
    return NAME
