"""A server under load, with clients that go away, killed in the middle: what a user of `sublight serve` may rely on.

    python benchmarks/serve_load.py                           512 requests on a CPU, about two minutes
    python benchmarks/serve_load.py --requests 64 --json out.json

A tiny random model is written to a folder and served by a process of its own. Ragged requests come from 32 threads; one
of eight goes away in the middle of its stream; three come from processes that are killed (kill -9). Then: every text is
compared with the same request alone, every page is free. Then the server is killed under load and started again on the
same port. Every claim is checked; the exit status is 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sublight.results import write_json

VOCAB, CONTEXT, THREADS = 97, 160, 32
SIZES = {
    **{"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6},
}
CLIENT = """
import http.client, sys
c = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1])); c.request("POST", "/v1/completions", sys.argv[2])
r = c.getresponse(); print(r.read(20), flush=True)
while r.read(1): pass
"""


def write_model(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    dim, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (VOCAB, dim), "lm_head.weight": (VOCAB, dim)}
    for number in range(int(SIZES["num_hidden_layers"])):
        layer = f"model.layers.{number}"
        for name, rows, cols in (("q", dim, dim), ("k", dim // 2, dim), ("v", dim // 2, dim), ("o", dim, dim)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, cols)
        for name, rows, cols in (("gate", inner, dim), ("up", inner, dim), ("down", dim, inner)):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (rows, cols)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    norms = [f"model.layers.{n}.{name}_layernorm" for n in range(2) for name in ("input", "post_attention")]
    tensors |= {f"{name}.weight": torch.ones(dim) for name in (*norms, "model.norm")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES))


@contextmanager
def server(folder: Path, port: int, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "sublight", "serve", str(folder), "--port", str(port), "--queue", "1000"]
    process = subprocess.Popen([*command, "--batch", "16", "--cache", "1024", *words])
    try:
        until(lambda: get(port, "/health") is not None, 120, "the server is up")
        yield process
    finally:
        process.kill()
        process.wait()


def until(is_so: Callable[[], bool], most_s: float, event: str) -> None:
    end = time.monotonic() + most_s
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"serve_load: it never came to be that {event}")
        time.sleep(0.05)


def get(port: int, path: str) -> str | None:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except OSError:
        return None


def gauge(port: int, name: str) -> float:
    lines = (get(port, "/metrics") or "").splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"sublight_{name} ")), -1.0)


def ask(port: int, data: dict[str, Any], leave_after: int | None = None) -> str | None:
    """The text of a streamed answer; None for a client that leaves after some bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps({**data, "stream": True}))
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode()[:300])
    if leave_after is not None:
        response.read(leave_after)
        connection.close()
        return None
    pieces = [line[6:] for line in response.read().decode().split("\n\n") if line.startswith("data: ")]
    if pieces[-1] != "[DONE]":
        raise RuntimeError(f"a stream ended with {pieces[-1][:200]}")
    return "".join(choice["text"] for piece in pieces[:-1] for choice in json.loads(piece)["choices"])


def requests_of(count: int) -> list[dict[str, Any]]:
    """Requests of many lengths: a third begin alike, half are sampled."""
    chance = random.Random(7)
    made = []
    for place in range(count):
        shared = [5] * 40 if place % 3 == 0 else []
        prompt = shared + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 60))]
        how = {"temperature": 0.8, "seed": place} if place % 2 else {"temperature": 0}
        made.append({"prompt": prompt, "max_tokens": chance.randint(1, 50), **how})
    return made


def load(port: int, count: int) -> dict[str, Any]:
    made = requests_of(count)
    leaving = {place: 20 + place % 400 for place in range(count) if place % 8 == 5}
    total = gauge(port, "pages_total")
    begin = time.monotonic()
    long = json.dumps({"prompt": [1, 2, 3], "max_tokens": 150, "stream": True})
    killed = [
        subprocess.Popen([sys.executable, "-c", CLIENT, str(port), long], stdout=subprocess.PIPE) for _ in range(3)
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        texts = list(pool.map(lambda at: ask(port, made[at], leaving.get(at)), range(count)))
    for process in killed:
        assert process.stdout is not None
        process.stdout.readline()  # waits until a stream is under way
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - begin
    until(lambda: gauge(port, "pages_free") == total, 60, "every page is free")
    sample = [at for at in range(count) if texts[at] is not None][:: max(1, count // 64)]
    differ = [at for at in sample if ask(port, made[at]) != texts[at]]
    return {
        **{"requests": count, "seconds": round(seconds, 1), "left": len(leaving), "killed": len(killed)},
        **{"compared_alone": len(sample), "differ": len(differ), "pages_lost": total - gauge(port, "pages_free")},
        "preempted": gauge(port, "preempted_total"),
    }


def kill_and_restart(folder: Path, port: int, words: list[str]) -> bool:
    """kill -9 under load: clients see an end, not a wait; the next server takes the port and answers as before."""
    with server(folder, port, words) as process, ThreadPoolExecutor(8) as pool:
        fields = {"prompt": [1, 2, 3], "max_tokens": 120, "temperature": 0}
        whole = ask(port, fields)
        running = [pool.submit(ask, port, fields) for _ in range(8)]
        until(lambda: gauge(port, "running") > 0, 60, "a text is under way")
        process.kill()
        for each in running:
            each.exception(timeout=60)  # an error, or a text that was done already
    with server(folder, port, words):
        return ask(port, fields) == whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the result here as well")
    args = parser.parse_args()
    words = ["--device", args.device, *(["--mode", "eager"] if args.device == "cpu" else [])]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with server(Path(folder), args.port, words):
            result = load(args.port, args.requests)
        result["same_after_restart"] = kill_and_restart(Path(folder), args.port, words)
    for name, value in result.items():
        print(f"{name:20} {value}")
    if args.json:
        write_json(result, Path(args.json))
    if result["differ"] or result["pages_lost"] or not result["same_after_restart"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
