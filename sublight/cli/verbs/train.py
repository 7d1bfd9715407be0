"""`sublight train`: a GPT-2 from scratch, on our ops."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli.options import Device, Json


def train(
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="A text, a folder or a .bin of uint16 tokens; none: Python's library."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A toy model, under a minute on a CPU.")] = False,
    depth: Annotated[int | None, typer.Option(metavar="N", help="Layers; all other sizes follow. 12 is GPT-2.")] = None,
    size: Annotated[str, typer.Option(metavar="NAME", help="gpt2 (124M), gpt2-medium, gpt2-large, gpt2-xl.")] = "",
    weights: Annotated[str, typer.Option("--from", metavar="FOLDER", help="Begin with Hugging Face's weights.")] = "",
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Of the run; default: the next in runs/.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, bit for bit.")] = False,
    tokens: Annotated[
        str, typer.Option(metavar="KIND", help="char, bytes, bpe, bpe:8192, gpt2 or a tokenizer.json.")
    ] = "",
    steps: Annotated[int | None, typer.Option(metavar="N", help="Changes of the weights.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences of a step.")] = None,
    accumulate: Annotated[int | None, typer.Option(metavar="N", help="Parts that a step is computed in.")] = None,
    context: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sequence.")] = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="The highest learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(metavar="N", help="Steps until it is reached.")] = None,
    weight_decay: Annotated[float | None, typer.Option(metavar="X", help="Of matrices; default: 0.1.")] = None,
    clip: Annotated[float | None, typer.Option(metavar="X", help="Longest gradient; default: 1; 0: any.")] = None,
    beta2: Annotated[float | None, typer.Option(metavar="X", help="Of AdamW's squares; default: 0.95.")] = None,
    dropout: Annotated[float | None, typer.Option(metavar="P", help="Of attention and what it adds to.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of weights, data and dropout.")] = None,
    mode: Annotated[str, typer.Option(metavar="NAME", help="ours, eager or compile.")] = "",
    attention: Annotated[str, typer.Option(metavar="NAME", help="ours, naive, torch, flash or cudnn.")] = "",
    parallel: Annotated[str, typer.Option(metavar="HOW", help="Under torchrun: ddp, fsdp, tp or pp.")] = "",
    graph: Annotated[bool, typer.Option("--graph/--no-graph", help="Mode ours as a CUDA graph, on a GPU.")] = True,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="On a GPU: the same bits every time.")] = False,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Default: bf16 on a GPU, fp32 on a CPU.")] = "",
    eval_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between evaluations.")] = None,
    save_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between checkpoints.")] = None,
    time_limit: Annotated[str, typer.Option(metavar="10min", help="Stop then, with a checkpoint.")] = "",
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the sample at the end begins with.")] = "",
    device: Device = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="The loss curve; default: in the run's folder.")] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="At the end: where a step's time goes, as a page.")
    ] = False,
    json: Json = "",
) -> None:
    """Train a GPT-2 from scratch, on this machine's GPU or CPU; kill it at any time and --resume.

    \b
    sublight train --quick
    sublight train my-texts/ --depth 6 --tokens bpe
    sublight train train.bin --size gpt2 --batch 512 --accumulate 16 --steps 20000
    sublight train --resume --out runs/001
    torchrun --nproc-per-node 2 -m sublight train my-texts/ --parallel ddp
    """
    from sublight.cli import output
    from sublight.cli import train as cli_train

    output.check_named(html=html)
    cli_train.command(
        cli_train.Request(
            data=data or "",
            out=out,
            resume=resume,
            quick=quick,
            depth=depth,
            size=size,
            weights=weights,
            tokens=tokens,
            context=context,
            batch=batch,
            accumulate=accumulate,
            steps=steps,
            lr=lr,
            warmup=warmup,
            beta2=beta2,
            dropout=dropout,
            clip=clip,
            weight_decay=weight_decay,
            seed=seed,
            mode=mode,
            attention=attention,
            parallel=parallel,
            graph=graph,
            deterministic=deterministic,
            dtype=dtype,
            eval_every=eval_every,
            save_every=save_every,
            time_limit=time_limit,
            prompt=prompt,
            device=device,
            html=html,
            explain=explain,
            json=json,
        )
    )
