"""`sublight serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import engine_options
from sublight.cli.options import Device


def serve(
    model: engine_options.Model,
    host: Annotated[str, typer.Option(metavar="HOST", help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes a free one.")] = 8000,
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the model; default: the folder's.")] = "",
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="SUBLIGHT_API_KEY", help="What clients must send; default: none.")
    ] = "",
    batch: engine_options.Batch = 64,
    queue: Annotated[int, typer.Option(metavar="N", help="Requests that may wait; more are refused.")] = 256,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Until a request is given up.")] = 600.0,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a text; default: the model's.")] = 0,
    cache: engine_options.Cache = 0,
    chunk: engine_options.Chunk = 512,
    weights: engine_options.Weights = "",
    dtype: engine_options.Dtype = "",
    mode: engine_options.Mode = "ours",
    graphs: engine_options.Graphs = True,
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
            engine=engine_options.EngineOptions(
                model=model,
                batch=batch,
                chunk=chunk,
                cache=cache,
                mode=mode,
                dtype=dtype,
                weights=weights,
                graphs=graphs,
                device=device,
            ),
            host=host,
            port=port,
            name=name,
            key=api_key,
            queue=queue,
            time_limit_s=time_limit,
            context=context,
        )
    )
