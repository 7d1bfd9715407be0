"""`sublight predict`: what a model will do on a GPU that is not at hand."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli.options import Json, gpu_lists, model_names, split


def predict(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A known name (none: lists them), or a config.json or its folder.",
            autocompletion=model_names,
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="As in h100,b200; my.toml, mine.json.", autocompletion=gpu_lists),
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(metavar="N", help="Sequences, as in 1,8,64.")] = None,
    context: Annotated[list[str] | None, typer.Option(metavar="N", help="Tokens of each, as in 4096.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="prefill, decode, train, forward; default: all.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Of products: bf16, fp8, fp4 …")] = "",
    weights: Annotated[str, typer.Option(metavar="TYPE", help="As they are stored: int4, fp8 …")] = "",
    cache: Annotated[str, typer.Option(metavar="TYPE", help="Of the KV cache.")] = "",
    optimizer: Annotated[str, typer.Option(metavar="TYPE", help="Of Adam's averages; default: fp32.")] = "",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Make activations again.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Memory, and norms apart, as PyTorch's own ops.")] = False,
    lora: Annotated[int | None, typer.Option(metavar="RANK", help="Train adapters of this rank alone.")] = None,
    tp: Annotated[int, typer.Option(metavar="N", help="GPUs that share each product.")] = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="GPUs that share the layers.")] = 1,
    dp: Annotated[int, typer.Option(metavar="N", help="GPUs that share the batch.")] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="GPUs that share the experts.")] = 1,
    network: Annotated[str, typer.Option(metavar="50GB", help="A GPU's bytes/s to other machines.")] = "",
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Of --dp: gradients travel during the backward pass.")
    ] = True,
    plan: Annotated[int | None, typer.Option(metavar="N", help="The best way to spread it over N GPUs.")] = None,
    latency: Annotated[str, typer.Option(metavar="30ms", help="With --plan: the most that a step may take.")] = "",
    price: Annotated[str, typer.Option(metavar="$", help="Of a GPU's hour: cost of a million tokens.")] = "",
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="KNOB=2x", help="bandwidth, flops, l2, links, memory, power.")
    ] = None,
    trace: Annotated[
        str, typer.Option("--from", metavar="TRACE", help="Instead of a model: what was recorded on another GPU.")
    ] = "",
    calibrate: Annotated[
        str,
        typer.Option(metavar="FILE", help="Measure this machine's GPU for a minute: --gpu FILE predicts with that."),
    ] = "",
    census: Annotated[bool, typer.Option("--census", help="Every op, its bytes, its bound, its share.")] = False,
    precisions: Annotated[
        bool, typer.Option("--precisions", help="bf16, int8, int4, fp8, fp4 side by side, with their accuracy.")
    ] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="A page: roofline, bottlenecks, GPUs.")] = "",
    csv: Annotated[str, typer.Option(metavar="FILE", help="A line a prediction; with --census an op.")] = "",
    json: Json = "",
) -> None:
    """What a model will do on a GPU: times with their floors, memory, cost. Needs no GPU and no torch.

    \b
    sublight predict llama-3-8b --gpu h100,h200,b200 --batch 1,8,64 --context 4096
    sublight predict path/to/config.json --gpu h100 --weights int4 --mode decode --census
    sublight predict mixtral-8x7b --gpu my.toml --what-if bandwidth=2x
    sublight predict llama-3-70b --gpu h100 --plan 8 --latency 30ms
    sublight predict --from trace.json.gz --gpu b200
    sublight predict --calibrate mine.json; sublight predict llama-3-8b --gpu mine.json
    """
    from sublight.cli import predict as cli_predict
    from sublight.cli.predict_words import Request
    from sublight.predict.step import Parallel

    cli_predict.command(
        Request(
            model=model or "",
            trace=trace,
            calibrate=calibrate,
            gpus=split(gpu) or ["h100"],
            batches=split(batch),
            contexts=split(context),
            modes=split(mode),
            dtype=dtype,
            weights=weights,
            cache=cache,
            optimizer=optimizer,
            checkpointing=checkpointing,
            eager=eager,
            lora=lora,
            price=price,
            changes=what_if or (),
            network=network,
            parallel=Parallel(tensor=tp, pipeline=pp, data=dp, expert=ep),
            overlap=overlap,
            plan=plan,
            latency=latency,
            census=census,
            precisions=precisions,
            html=html,
            csv=csv,
            json=json,
        )
    )
