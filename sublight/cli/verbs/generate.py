"""`sublight generate`: text from a Llama, Qwen2 or Mistral, over a cache in pages."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import engine_options
from sublight.cli.options import Device, Json


def generate(
    model: engine_options.Model,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="May be given several times.")] = None,
    prompts: Annotated[str, typer.Option(metavar="FILE", help="A prompt a line.")] = "",
    max_new: Annotated[int, typer.Option(metavar="N", help="New tokens of each, at most.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Draw from the N most likely; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Draw from the likeliest that make up P.")] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="P", help="Leave out what is less likely than P of the best.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first text; the next has N + 1.")] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 1: tokens there already count less.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(metavar="X", help="Off the logit of a token the text has.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(metavar="X", help="The same, each time it has it.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text.")] = None,
    batch: engine_options.Batch = 64,
    chunk: engine_options.Chunk = 512,
    cache: engine_options.Cache = 0,
    mode: engine_options.Mode = "ours",
    dtype: engine_options.Dtype = "",
    weights: engine_options.Weights = "",
    graphs: engine_options.Graphs = True,
    device: Device = "",
    json: Json = "",
) -> None:
    """Text from a model's folder: many prompts at once, over a paged cache. Without tokenizer.json: token numbers.

    \b
    sublight generate path/to/llama --prompt "The sky is"
    sublight generate path/to/qwen2 --prompts prompts.txt --temperature 0.7 --top-p 0.9 --json out.json
    """
    from sublight.cli import generate as cli_generate

    cli_generate.command(
        cli_generate.Request(
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
            prompts=prompt or (),
            file=prompts,
            most_new=max_new,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition=repetition_penalty,
            presence=presence_penalty,
            frequency=frequency_penalty,
            stop=stop or (),
            json=json,
        )
    )
