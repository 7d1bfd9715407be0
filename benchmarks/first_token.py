"""From the start of a process to a first token: Llama-3-8B's shape from a folder of safetensors, random weights.

    PYTHONPATH=. python benchmarks/first_token.py --json first_token.json       writes 16 GB under --folder first
    PYTHONPATH=. python benchmarks/first_token.py --tiny --device cpu           to see that it runs

Two processes, one after the other: the first compiles kernels, the second has them. Each says what it waited for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sublight.results import write_json

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    **{"rms_norm_eps": 1e-5, "rope_theta": 5e5},
}
TINY = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256}
LIMIT_S = 60.0  # time limit of a process


def write_folder(folder: Path, data: dict[str, Any], device: str) -> None:
    """Write a folder as Hugging Face does: config.json, a file for every eight layers, and their index."""
    import torch
    from safetensors.torch import save_file

    dim, inner, vocab = data["hidden_size"], data["intermediate_size"], data["vocab_size"]
    kv = dim // data["num_attention_heads"] * data["num_key_value_heads"]
    block = {
        **{"self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim)},
        **{"self_attn.o_proj": (dim, dim), "mlp.gate_proj": (inner, dim), "mlp.up_proj": (inner, dim)},
        **{"mlp.down_proj": (dim, inner), "input_layernorm": (dim,), "post_attention_layernorm": (dim,)},
    }
    outside = {"model.embed_tokens": (vocab, dim), "lm_head": (vocab, dim), "model.norm": (dim,)}
    files = [outside] + [
        {f"model.layers.{number}.{name}": size for number in range(first, first + 8) for name, size in block.items()}
        for first in range(0, data["num_hidden_layers"], 8)
    ]
    where = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for count, sizes in enumerate(files):
        name = f"model-{count + 1:05d}-of-{len(files):05d}.safetensors"
        made = {f"{key}.weight": torch.randn(size, device=device, dtype=dtype) * 0.02 for key, size in sizes.items()}
        save_file({key: x.cpu() for key, x in made.items()}, folder / name)
        where |= dict.fromkeys(made, name)
    (folder / "config.json").write_text(json.dumps(data | {"torch_dtype": str(dtype)[6:]}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def first_token(folder: Path, device: str, begun_s: float) -> dict[str, Any]:
    """Do what `sublight generate` does until it has a token; times count from the start of the process."""
    times: dict[str, float] = {}

    def note(event: str) -> None:
        times[event] = time.time() - begun_s - sum(times.values())

    import torch

    from sublight.engines.generate.build import Build, build
    from sublight.engines.generate.engine import Request

    if device == "cuda":
        torch.zeros(1, device="cuda")
    note("python, torch, CUDA")
    engine = build(Build(folder=folder, device=device, batch=8, cache=8192 if device == "cuda" else 256, mode="ours"))
    if device == "cuda":
        torch.cuda.synchronize()
    note("weights")
    request = Request(list(range(1, 33)), 2)
    tokens = engine.run([request])
    next(tokens)
    note("first token")
    next(tokens)
    note("second token, with its graph")
    return {"parts_s": times, "first_token_s": sum(list(times.values())[:3])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", default="", help="where the model is written, and left; else a temporary folder")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        row = first_token(Path(args.child[0]), args.device, float(args.child[1]))
        print(json.dumps(row))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.time()
        if not (folder / "config.json").exists():
            write_folder(folder, TINY if args.tiny else LLAMA, args.device)
        print(
            f"folder of {sum(f.stat().st_size for f in folder.iterdir()) / 1e9:.1f} GB in {time.time() - begin:.0f} s"
        )
        rows = []
        for which in ("first process", "second process"):
            command = [sys.executable, __file__, "--device", args.device, "--child", str(folder), str(time.time())]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
                result = (
                    json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-600:]}
                )
            except subprocess.TimeoutExpired:
                result = {"error": f"not done within {LIMIT_S:.0f} s"}
            rows.append({"process": which, **result})
            if args.json:
                write_json(rows, Path(args.json))
            if "error" in result:
                print(f"{which}: {result['error']}")
                continue
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result["parts_s"].items())
            print(f"{which}: first token after {result['first_token_s']:.1f} s ({parts})")


if __name__ == "__main__":
    main()
