"""What `patch` brings to Hugging Face's attention: steps of two layers before and after, the host's time included.

    python benchmarks/attention_patched.py --json attention_patched.json     five steps of a GPU, half a minute
    python benchmarks/attention_patched.py --tiny                            small ones, anywhere

The rule `sdpa` alone is swapped, so the difference is attention's. Sliding windows are looked at value by value, for
which the host waits: that is in these times. The swapped model is held against float64 by `patch(verify=…)`, on a
shorter text that still has the window. Needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.rules.sdpa import HF_SDPA, SHORTEST
from sublight.results import write_json

CASES = (  # name, family, batch, tokens, window, with gradients
    ("window of 1024 in 8192", "Mistral", 1, 8192, 1024, False),
    ("the same, training", "Mistral", 1, 8192, 1024, True),
    ("window of 256 in 2048", "Mistral", 2, 2048, 256, False),
    ("the same, training", "Mistral", 2, 2048, 256, True),
    ("causal, 4096", "Llama", 4, 4096, None, False),
)
STEPS = 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--limit", type=float, default=30.0, help="seconds after which no further case is begun")
    options.add_argument("--tiny", action="store_true", help="small models")
    args = options.parse_args()
    try:
        import transformers
    except ImportError:
        options.error("needs transformers: pip install transformers")
    device, began, rows = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic(), []
    for case in CASES:
        if time.monotonic() - began > args.limit:
            print(f"stopped at the limit, before {case[0]}")
            break
        rows.append(measured(transformers, case, device, tiny=args.tiny))
        row = rows[-1]
        times = f"{1e3 * row['before_s']:8.2f} ms, patched {1e3 * row['after_s']:8.2f} ms"
        print(f"{row['name']:26} {times}: {row['verdict']}")
        if args.json:
            gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
            head = {"gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__}
            date = datetime.now().astimezone().isoformat(timespec="seconds")
            write_json({**head, "date": date, "rows": rows}, args.json)


def measured(transformers: Any, case: tuple[Any, ...], device: str, *, tiny: bool) -> dict[str, Any]:
    name, family, batch, tokens, window, trains = case
    width, heads = (128, 2) if tiny else (4096, 32)
    tokens, window = (tokens // 64, window and window // 64) if tiny else (tokens, window)
    sizes = {
        **{"vocab_size": 512, "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2},
        **{"num_attention_heads": heads, "num_key_value_heads": heads // 4 or 1, "max_position_embeddings": tokens},
        **{"pad_token_id": 0, "attn_implementation": "sdpa"},
    }
    config = getattr(transformers, f"{family}Config")(**sizes, **({"sliding_window": window} if window else {}))
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}Model")(config).to(torch.bfloat16)
        ids = torch.randint(1, 512, (batch, tokens))
    model.train(trains)

    def step() -> None:
        with torch.set_grad_enabled(trains):
            out = model(ids, use_cache=False)[0]
        if trains:
            out.sum().backward()

    before_s = median_s(step, device)
    patched = patch(model, ids, rules=(HF_SDPA,))
    after_s = median_s(step, device)
    (row,) = patched.rows
    unpatch(model)
    verdict, short = row.reason, ids[:1, :SHORTEST]  # the float64 run holds every score in memory: it gets a short text
    if row.is_swapped:
        checked = patch(model, verify={"input_ids": short, "use_cache": False}, rules=(HF_SDPA,))
        verdict = checked.verdict.sentence if checked.verdict else checked.rows[0].reason
        unpatch(model)
    return {"name": name, "before_s": before_s, "after_s": after_s, "is_swapped": row.is_swapped, "verdict": verdict}


def median_s(step: Callable[[], None], device: str) -> float:
    """The median time of whole steps, each waited for, after two that warm up."""
    times = []
    for _ in range(STEPS + 2):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
