"""`sublight serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli.options import Device


def serve(
    model: Annotated[str, typer.Argument(metavar="FOLDER", help="With config.json, *.safetensors, tokenizer.json.")],
    host: Annotated[str, typer.Option(metavar="HOST", help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes a free one.")] = 8000,
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the model; the folder's unless told.")] = "",
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="SUBLIGHT_API_KEY", help="What clients must send; none unless told.")
    ] = "",
    batch: Annotated[int, typer.Option(metavar="N", help="Texts at a time, at most.")] = 64,
    queue: Annotated[int, typer.Option(metavar="N", help="Requests that may wait; more are refused.")] = 256,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Until a request is given up.")] = 600.0,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a text; the model's unless told.")] = 0,
    cache: Annotated[int, typer.Option(metavar="N", help="Tokens that the cache holds; what fits unless told.")] = 0,
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens of a step: longer prompts are cut.")] = 512,
    weights: Annotated[str, typer.Option(metavar="WAY", help="Pack them: int4, int8, fp8, w4a16, w8a8 …")] = "",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16 on a GPU, fp32 on a CPU, unless told.")] = "",
    mode: Annotated[str, typer.Option(metavar="NAME", help="ours or eager.")] = "ours",
    graphs: Annotated[bool, typer.Option(help="Replay decoding as CUDA graphs.")] = True,
    device: Device = "",
) -> None:
    """Serve a model's folder: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

    \b
    sublight serve path/to/llama
    curl localhost:8000/v1/completions -d '{"prompt": "The sky is", "max_tokens": 40}'
    """
    from sublight.cli import serve as cli_serve

    cli_serve.command(
        cli_serve.Request(
            model=model,
            host=host,
            port=port,
            name=name,
            key=api_key,
            batch=batch,
            queue=queue,
            time_limit_s=time_limit,
            context=context,
            cache=cache,
            chunk=chunk,
            weights=weights,
            dtype=dtype,
            mode=mode,
            graphs=graphs,
            device=device,
        )
    )
