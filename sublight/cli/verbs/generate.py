"""`sublight generate`: text from a Llama, Qwen2 or Mistral, over a cache in pages."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli.options import Device, Json


def generate(
    model: Annotated[str, typer.Argument(metavar="FOLDER", help="With config.json, *.safetensors, tokenizer.json.")],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="May be given several times.")] = None,
    prompts: Annotated[str, typer.Option(metavar="FILE", help="A prompt a line.")] = "",
    max_new: Annotated[int, typer.Option(metavar="N", help="New tokens of each, at most.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Draw from the N most likely; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Draw from the likeliest that make up P.")] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="P", help="Leave out what is less likely than P of the best.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 1: tokens there already count less.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(metavar="X", help="Off the logit of a token the text has.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(metavar="X", help="The same, each time it has it.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text.")] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Texts at a time, at most.")] = 64,
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens of a step: longer prompts are cut.")] = 512,
    cache: Annotated[
        int, typer.Option(metavar="N", help="Tokens that the cache holds; enough for all unless told.")
    ] = 0,
    mode: Annotated[str, typer.Option(metavar="NAME", help="ours or eager.")] = "ours",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16 on a GPU, fp32 on a CPU, unless told.")] = "",
    weights: Annotated[str, typer.Option(metavar="WAY", help="Pack them: int4, int8, fp8, w4a16, w8a8 …")] = "",
    graphs: Annotated[bool, typer.Option(help="Replay decoding as CUDA graphs.")] = True,
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
            model=model,
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
            batch=batch,
            chunk=chunk,
            cache=cache,
            mode=mode,
            dtype=dtype,
            weights=weights,
            graphs=graphs,
            device=device,
            json=json,
        )
    )
