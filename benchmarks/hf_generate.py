"""Hugging Face's `generate()` over our cache in pages: what graphs bring, by batch and by what a graph holds.

    PYTHONPATH=. python benchmarks/hf_generate.py --json hf_generate.json       a Llama of 1.2 B, 1024 tokens in
    PYTHONPATH=. python benchmarks/hf_generate.py --tiny --device cpu           to see that it runs

A row is what one more token of each text takes, from one call of a logits processor to the next: generate()'s own
Python is in it, and it waits for the device at each token. `dynamic` is Hugging Face's own cache. Of ours, `none`
launches; a graph of scope `forward` holds the layers, `head` the logits, too; `sampling` is a loop of our own, whose
graph holds the choice of the token as well. `patched` and `int4` are `head` after `sublight.patch` and
`sublight.quantize`: an AWQ folder is packed as `int4` is. `…-loop` is the same model without generate(): a call of the
model and the largest logit, waited for at each token. The floor is what the weights and the cache take to read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sublight.results import write_json

SCOPES = ("dynamic", "none", "forward", "head", "sampling", "patched", "patched-loop", "int4", "int4-loop")
READ_BYTES_PER_S = 4.6e12  # an H200's memory, as `sublight limits` measured it


def model_of(device: str, *, tiny: bool) -> Any:
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
    }
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    if tiny:
        sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


class Stamps:
    """A logits processor that changes nothing and notes the time of each call."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.at_s.append(time.perf_counter())
        return scores

    def per_token_s(self, skipped: int) -> float:
        return (self.at_s[-1] - self.at_s[skipped]) / (len(self.at_s) - 1 - skipped)


def generate_s(model: Any, few: int, many: int, inputs: dict[str, Any], cache: Any = None) -> float:
    """Seconds of a token in a run of `many`; the run of `few` before it captures all graphs."""
    for count in (few, many):
        stamps = Stamps()
        if cache is not None:
            cache.reset()
            inputs = inputs | {"past_key_values": cache}
        model.generate(**inputs, max_new_tokens=count, logits_processor=[stamps])
    return stamps.per_token_s(2)


def loop_s(run: Callable[[int], None], few: int, many: int, device: str) -> float:
    """Seconds of a step in a loop that never waits: the difference of two runs."""
    import torch

    def timed(count: int) -> float:
        begin = time.perf_counter()
        run(count)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    timed(few)
    return (min(timed(many) for _ in range(2)) - min(timed(few) for _ in range(2))) / (many - few)


def waited_s(model: Any, cache: Any, ids: Any, few: int, many: int, device: str) -> float:
    """The median of a loop's steps, each waited for, after a run that captures what there is to capture."""
    import torch

    for count in (few, many):
        cache.reset()
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        times = []
        for _ in range(count - 1):
            begin = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(model: Any, scope: str, batch: int, length: int, new: tuple[int, int], device: str) -> dict[str, Any]:
    import torch

    import sublight
    from sublight.fix.attention.paged_cache import paged_cache

    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    few, many = new
    row: dict[str, Any] = {"scope": scope, "batch": batch, "context": length}
    if scope == "dynamic":
        return row | {"s": generate_s(model, few, many, inputs)}
    holds: Any = {"none": "none", "sampling": "none", "forward": "forward"}.get(scope, "head")
    with paged_cache(model, batch=batch, tokens=length + many, scope=holds) as cache:
        if scope == "sampling":
            launched = cache.steps.step
            graphed = sublight.graph(lambda ids, at: launched(ids, at)[:, -1:].argmax(-1))

            def run(count: int) -> None:
                cache.reset()
                token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
                for _ in range(count - 1):
                    token = graphed(token, cache.store.lengths.long()[:, None])

            row["s"] = loop_s(run, few, many, device)
            report = graphed.report()
        elif scope.endswith("-loop"):
            row["s"] = waited_s(model, cache, ids, few, many, device)
            report = cache.report()
        else:
            row["s"] = generate_s(model, few, many, inputs, cache)
            report = cache.report()
    row["why_not_rows"] = cache.why_not_rows
    if report is not None:
        row |= {"graphs": len(report.graphs), "graph_bytes": report.pool_bytes}
    return row


def floor_s(model: Any, batch: int, length: int) -> float:
    """The embedding's table is the head, so all parameters are read; and every text's keys and values."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights += sum(x.numel() * x.element_size() for x in model.buffers() if x.dim() == 2)  # packed ones
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return (weights + batch * length * token_bytes) / READ_BYTES_PER_S


def table(rows: list[dict[str, Any]]) -> str:
    """A line a batch, a column a scope; below, memory and what failed."""
    batches = sorted({row["batch"] for row in rows})
    scopes = [scope for scope in SCOPES if any(row["scope"] == scope for row in rows)]
    lines = ["ms a token  " + "".join(f"{scope:>13}" for scope in scopes) + f"{'floor':>10}"]
    for batch in batches:
        mine = {row["scope"]: row for row in rows if row["batch"] == batch}
        cells = [f"{1e3 * mine[scope]['s']:>13.3f}" if "s" in mine.get(scope, {}) else f"{'–':>13}" for scope in scopes]
        floors = [row["floor_s"] for row in mine.values() if "int4" not in row["scope"] and "floor_s" in row]
        lines.append(f"batch {batch:<6}" + "".join(cells) + (f"{1e3 * floors[0]:>10.2f}" if floors else ""))
    for row in rows:
        if "graph_bytes" in row:
            lines.append(f"{row['scope']}, batch {row['batch']}: {row['graph_bytes'] / 1e6:.0f} MB of graphs")
        if "error" in row:
            lines.append(f"{row['scope']}, batch {row['batch']}: {row['error']}")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]]) -> str:
    """The table of docs/engines.md: ms a token, a line a batch, and below each the megabytes that its graphs took."""
    scopes = [scope for scope in SCOPES if any(row["scope"] == scope and "s" in row for row in rows)]
    lines = [f"| batch | {' | '.join(f'`{scope}`' for scope in scopes)} | floor |", "| --- " * (len(scopes) + 2) + "|"]
    for batch in sorted({row["batch"] for row in rows}):
        mine = {row["scope"]: row for row in rows if row["batch"] == batch and "s" in row}
        cells = [f"{1e3 * mine[scope]['s']:.2f}" if scope in mine else "–" for scope in scopes]
        floors = [row["floor_s"] for row in mine.values() if "int4" not in row["scope"]]
        lines.append(f"| {batch} | {' | '.join(cells)} | {1e3 * floors[0]:.2f} |")
        held = [mine.get(scope, {}).get("graph_bytes") for scope in scopes]
        lines.append(f"| graphs | {' | '.join('' if size is None else f'{size / 1e6:.0f} MB' for size in held)} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="no row begins later")
    parser.add_argument("--batches", default="1,10,64")
    parser.add_argument("--scopes", default=",".join(SCOPES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    import torch

    import sublight

    begin = time.perf_counter()
    length, new = (12, (6, 9)) if args.tiny else (1024, (8, 40))
    rows: list[dict[str, Any]] = []
    wanted = args.scopes.split(",")
    model, state = model_of(args.device, tiny=args.tiny), ""
    for scope in (each for each in SCOPES if each in wanted):
        before, state = state, scope.split("-")[0]
        if state == "patched" and before != state:
            example = {"input_ids": torch.ones(1, 1, dtype=torch.int64, device=args.device)}
            sublight.patch(model, example, quiet=True)
        if state == "int4" and before != state:
            model = model_of(args.device, tiny=args.tiny)
            sublight.quantize(model, "w4a16", group=32 if args.tiny else 128, rounds=0, keep=False, quiet=True)
        for batch in (int(each) for each in args.batches.split(",")):
            if time.perf_counter() - begin > args.seconds:
                rows.append({"scope": scope, "batch": batch, "error": f"not begun within {args.seconds:.0f} s"})
                continue
            try:
                with torch.inference_mode():
                    row = measure(model, scope, batch, length, new, args.device)
                rows.append(row | {"floor_s": floor_s(model, batch, length)})
            except Exception as error:
                rows.append({"scope": scope, "batch": batch, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            if args.json:
                write_json(rows, Path(args.json))
    print(table(rows))


if __name__ == "__main__":
    main()
