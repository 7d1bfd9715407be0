"""What `patch` and `graph` bring to whole models, beside what a user would pick instead; one process a row.

    python benchmarks/end_to_end.py --json benchmarks/end_to_end_h200.json     everything, about five minutes
    python benchmarks/end_to_end.py --only llama-train                         one part of it
    python benchmarks/end_to_end.py --tiny                                     small models, to try it on a CPU

Each row is timed in a process of its own, forked before the GPU is touched: the first step then pays for its own
compilation, and the peak of memory is its own. Needs transformers; Liger's rows say so where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

PARTS: dict[str, tuple[str, ...]] = {
    "llama-train": ("eager", "compile", "liger", "patched", "patched+compile"),
    "gpt2-train": ("eager", "compile", "patched", "patched+compile"),
    "llama-decode": ("eager", "compile", "patched", "graph", "patched+graph"),
    "llama-curve": ("eager", "eager (seed 1)", "patched"),
    "gpt2-curve": ("eager", "eager (seed 1)", "patched"),
}
STEPS, CURVE_STEPS, CONTEXT = 20, 100, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"parts, with commas: {', '.join(PARTS)}")
    parser.add_argument("--variants", help="of those parts, these variants only, with commas")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tiny", action="store_true", help="small models, on whatever device there is")
    parser.add_argument("--profile", type=Path, help="folder for a table of each row's kernels")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    import torch  # noqa: F401 (once, not once a row; the GPU is left alone)
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    if not args.tiny:  # in a user's session it is built in the background, within half a minute
        subprocess.run([sys.executable, "-c", "from sublight.backend import native; native.wait()"], check=True)
    rows = []
    for part in chosen:
        wanted = [name for name in PARTS[part] if not args.variants or name in args.variants.split(",")]
        together = len(wanted) if part.endswith("curve") else 1  # losses take no harm from company
        for begin in range(0, len(wanted), together):
            for row in apart(part, wanted[begin : begin + together], args):
                rows.append(row)
                print(sentence(row), flush=True)
                if args.json:
                    write(args.json, rows)


def apart(part: str, variants: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The variants' rows, each measured by a process with empty compilers' caches."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(len(variants))]
        processes = []
        for variant, place in zip(variants, places, strict=True):
            place.mkdir()
            processes.append(context.Process(target=child, args=(part, variant, args, place)))
            processes[-1].start()
        for process in processes:
            process.join()
        return [found(part, variant, place) for variant, place in zip(variants, places, strict=True)]


def child(part: str, variant: str, args: argparse.Namespace, place: Path) -> None:
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ[name] = str(place / folder)
    output = os.open(place / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    row = one(part, variant, tiny=args.tiny, profile=args.profile)
    (place / "row.json").write_text(json.dumps(row))


def found(part: str, variant: str, place: Path) -> dict[str, Any]:
    """The row that a process wrote, or the last line of its output."""
    if (place / "row.json").exists():
        return {"part": part, "variant": variant, **json.loads((place / "row.json").read_text())}
    lines = (place / "said").read_text().strip().splitlines() or ["it said nothing"]
    return {"part": part, "variant": variant, "unavailable": lines[-1]}


def one(part: str, variant: str, *, tiny: bool, profile: Path | None) -> dict[str, Any]:
    family, kind = part.split("-")
    do = {"train": train, "decode": decode, "curve": curve}[kind]
    row = do(family, variant, tiny=tiny, profile=profile)
    return {"gpu": gpu_name(), **row}


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if device() == "cuda" else "none: a CPU"


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(family: str, *, tiny: bool, seed: int = 0) -> Any:
    """Random weights in bf16 (float32 on a CPU), Hugging Face's class."""
    import torch
    import transformers

    torch.manual_seed(seed)
    if family == "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        if not tiny:
            sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
            sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8}
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=4096, tie_word_embeddings=True)
        kind = transformers.LlamaForCausalLM
    else:
        small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 257} if tiny else {}
        config = transformers.GPT2Config(**small, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        kind = transformers.GPT2LMHeadModel
    dtype = torch.float32 if device() == "cpu" else torch.bfloat16
    with torch.device(device()):
        return kind(config).to(dtype)


def batch_of(model: Any, *, tiny: bool, seed: int = 0) -> dict[str, Any]:
    """Tokens that can be learnt: each follows its predecessor by one of four steps."""
    import torch

    is_gpt2 = model.config.model_type == "gpt2"
    rows, length = (2, 32) if tiny else (16, 1024) if is_gpt2 else (4, 2048)
    vocabulary = model.config.vocab_size
    draw = torch.Generator().manual_seed(seed)
    steps = torch.tensor([1, 7, 31, 101])[torch.randint(4, (rows, length), generator=draw)]
    first = torch.randint(vocabulary, (rows, 1), generator=draw)
    ids = ((first + steps.cumsum(1)) % min(vocabulary, 4096)).to(device())
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def prepared(model: Any, optimizer: Any, variant: str, batch: Any) -> Callable[..., Any]:
    """The model, patched or compiled as the variant says; the optimizer is patched in place."""
    import torch

    import sublight

    if variant == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if "patched" in variant:
        sublight.patch(optimizer, quiet=True)  # its kernels compile in the background
        sublight.patch(model, batch, quiet=True)
    return torch.compile(model) if "compile" in variant else model


def wait() -> None:
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()


def train(family: str, variant: str, *, tiny: bool, profile: Path | None) -> dict[str, Any]:
    import torch

    model = model_of(family, tiny=tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = batch_of(model, tiny=tiny)
    wait()
    begin = time.perf_counter()
    forward = prepared(model, optimizer, variant, batch)
    patch_s = time.perf_counter() - begin

    def step() -> Any:
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    loss = float(step())
    first_s = time.perf_counter() - begin
    for _ in range(4):
        step()
    wait()
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(step, STEPS)
    row = {"first_step_s": first_s, "of_which_patch_s": patch_s, **summary(times), "peak_bytes": peak()}
    row |= {"first_loss": loss}
    if profile:
        kernels(step, profile / f"{family}-train-{variant}.txt")
    return row


def decode(family: str, variant: str, *, tiny: bool, profile: Path | None) -> dict[str, Any]:
    import torch
    import transformers

    import sublight

    model = model_of(family, tiny=tiny).eval()
    context, tokens = (16, 8) if tiny else (CONTEXT, 64)
    with torch.inference_mode():
        cache = transformers.StaticCache(config=model.config, max_cache_len=context + 2 * tokens + 40)
        ids = torch.randint(model.config.vocab_size, (1, context), device=device())
        token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        wait()
        begin = time.perf_counter()
        if "patched" in variant:
            sublight.patch(model, {"input_ids": token}, quiet=True)
        patch_s = time.perf_counter() - begin

        def forward(token: Any) -> Any:
            return model(token, past_key_values=cache, use_cache=True).logits

        if variant == "compile":
            forward = torch.compile(forward, mode="reduce-overhead")
        if "graph" in variant:
            forward = sublight.graph(forward)

        chosen = []

        def step() -> None:
            nonlocal token
            token = forward(token)[:, -1:].argmax(-1)
            chosen.append(token)

        step()
        wait()
        first_s = time.perf_counter() - begin
        for _ in range(7):
            step()
        wait()
        warm_s = time.perf_counter() - begin
        times = timed(step, tokens)
        row = {"first_call_s": first_s, "of_which_patch_s": patch_s, "first_eight_calls_s": warm_s}
        row |= {**summary(times), "peak_bytes": peak()}
        row["tokens"] = [int(token) for token in chosen[:16]]
        if "graph" in variant:
            row["report"] = str(forward.report())
        if profile:
            kernels(step, profile / f"{family}-decode-{variant}.txt")
    return row


def curve(family: str, variant: str, *, tiny: bool, profile: Path | None) -> dict[str, Any]:
    """The losses of a hundred steps, each on a batch of its own."""
    import torch

    seed = 1 if "seed 1" in variant else 0
    model = model_of(family, tiny=tiny, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = prepared(model, optimizer, variant, batch_of(model, tiny=tiny))
    losses = []
    for number in range(10 if tiny else CURVE_STEPS):
        loss = forward(**batch_of(model, tiny=tiny, seed=1000 * seed + number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return {"losses": [float(loss) for loss in losses]}


def timed(step: Callable[[], Any], count: int) -> list[float]:
    """Wall seconds of each step with the device waited for, as a loop that reads its result sees them."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - begin)
    return times


def summary(times: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(times, n=4)
    return {"median_s": statistics.median(times), "spread_s": quarters[2] - quarters[0], "n": len(times)}


def peak() -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if device() == "cuda" else None


def kernels(step: Callable[[], Any], file: Path) -> None:
    """Device time of three steps by kernel, and how long the device was busy."""
    from torch.profiler import ProfilerActivity, profile

    file.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        wait()
    table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=100)
    file.write_text(table)


def sentence(row: dict[str, Any]) -> str:
    who = f"{row['part']:14} {row['variant']:20}"
    if "unavailable" in row:
        return f"{who} unavailable: {row['unavailable']}"
    if "losses" in row:
        return f"{who} loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
    first = row.get("first_step_s", row.get("first_call_s"))
    memory = f", {row['peak_bytes'] / 2**30:6.2f} GiB" if row["peak_bytes"] else ""
    return f"{who} {row['median_s'] * 1e3:8.3f} ms ± {row['spread_s'] * 1e3:.3f}{memory}, first {first:.2f} s"


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    import torch

    from sublight.bench import commit

    gpu = next((row["gpu"] for row in rows if "gpu" in row), "unknown")  # as the rows' processes say: this one has none
    head = {"gpu": gpu, "torch": torch.__version__, "commit": commit()}
    head |= {"date": datetime.now().astimezone().isoformat(timespec="seconds")}
    plain = [{name: value for name, value in row.items() if name != "gpu"} for row in rows]
    part = file.with_suffix(".part")
    part.write_text(json.dumps({**head, "rows": plain}, indent=1) + "\n")
    part.replace(file)


if __name__ == "__main__":
    main()
