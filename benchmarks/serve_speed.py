"""`sublight serve` at speed: concurrent streams of a random model of 1.2 B, some of which are closed halfway.

    python benchmarks/serve_speed.py --json serve.json        on a GPU, about 40 s
    python benchmarks/serve_speed.py --tiny                   a tiny model on a CPU, to see that it runs

A model in the shape of Llama-3.2-1B with random weights is written to a folder and served by a process of its own. Two
rounds of streams: in the first one kernels are compiled and graphs captured, the second is the figure. Prints tokens a
second, the time to the first token, and whether pages of closed streams are free again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from sublight.results import write_json

SIZES = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
    **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
}
TINY = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
}


def write_model(folder: Path, sizes: dict[str, Any], device: str) -> None:
    import torch
    from safetensors.torch import save_file

    dim, inner, size = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    rows = {"q": sizes["num_attention_heads"] * size, "k": sizes["num_key_value_heads"] * size}
    rows["v"] = rows["k"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], dim)}
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (count, dim) for name, count in rows.items()}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (dim, rows["q"])
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, dim) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (dim, inner)
        shapes |= {f"{layer}.{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (dim,)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    tensors = {
        name: (torch.ones(shape, **made) if len(shape) == 1 else torch.randn(shape, **made) * 0.02).cpu()
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def gauge(port: int, name: str) -> float:
    lines = get(port, "/metrics").splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"sublight_{name} ")), -1.0)


def stream(port: int, prompt: list[int], tokens: int, leave_after: int, results: list[dict[str, Any]]) -> None:
    """One request; how many tokens came, and when the first did."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    if response.status != 200:
        results.append({"error": response.read().decode()[:200]})
        return
    count, first_s = 0, None
    for line in response:
        if line.startswith(b"data: {"):
            first_s = first_s or time.perf_counter() - begin
            count += 1
            if count == leave_after:
                break
    connection.close()
    results.append({"tokens": count, "first_s": first_s, "left": count == leave_after})


def round_of(port: int, vocab: int, streams: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
    draw, results = random.Random(seed), list[dict[str, Any]]()
    threads = [
        threading.Thread(
            target=stream,
            args=(port, [draw.randrange(vocab) for _ in range(prompt)], tokens, 10 if at % 8 == 5 else -1, results),
        )
        for at in range(streams)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    errors = [each["error"] for each in results if "error" in each]
    firsts = sorted(each["first_s"] for each in results if each.get("first_s"))
    return {
        "streams": streams,
        "answered": len(results) - len(errors),
        "closed": sum(each.get("left", False) for each in results),
        "errors": errors[:3],
        "seconds": seconds,
        "events_per_s": sum(each.get("tokens", 0) for each in results) / seconds,
        "first_s_median": statistics.median(firsts) if firsts else None,
        "first_s_last": firsts[-1] if firsts else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU: shows that it runs")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    args = parser.parse_args()
    sizes = SIZES | TINY if args.tiny else SIZES
    device, prompt, tokens = ("cpu", 20, 30) if args.tiny else ("cuda", 256, 128)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), sizes, device)
        command = [sys.executable, "-m", "sublight", "serve", folder, "--port", str(args.port), "--queue", "1000"]
        begin = time.perf_counter()
        server = subprocess.Popen([*command, "--batch", str(args.streams)], stdout=sys.stderr)
        try:
            while True:
                try:
                    get(args.port, "/health")
                    break
                except OSError:
                    if server.poll() is not None or time.perf_counter() - begin > 60:
                        raise SystemExit("the server did not come up") from None
                    time.sleep(0.1)
            ready_s = time.perf_counter() - begin
            rows = [
                round_of(args.port, sizes["vocab_size"], args.streams, prompt, tokens, seed) | {"round": name}
                for seed, name in enumerate(("first", "second"))
            ]
            time.sleep(0.5)
            free, total = gauge(args.port, "pages_free"), gauge(args.port, "pages_total")
        finally:
            server.kill()
            server.wait()
    print(f"ready after {ready_s:.1f} s; {args.streams} streams of {prompt} + {tokens} tokens")
    for row in rows:
        firsts = [f"{row[name]:.2f}" if row[name] else "–" for name in ("first_s_median", "first_s_last")]
        print(
            f"{row['round']:7}{row['events_per_s']:>8.0f} tokens/s  first token {firsts[0]} s, the last one's "
            f"{firsts[1]} s  {row['answered']} answered, {row['closed']} closed halfway  {'; '.join(row['errors'])}"
        )
    print(f"pages free afterwards: {free:.0f} of {total:.0f}")
    if args.json:
        write_json({"ready_s": ready_s, "rounds": rows, "pages_free": free, "pages_total": total}, Path(args.json))
    if free != total or any(row["errors"] for row in rows):
        raise SystemExit("not as it should be")


if __name__ == "__main__":
    main()
