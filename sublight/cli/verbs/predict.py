"""`sublight predict`: what a model will do on a GPU that is not at hand."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_lists, model_names, split
from sublight.errors import BadInput


def predict(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A known name, or a config.json or its folder.", autocompletion=model_names
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="As in h100,b200, or my.toml.", autocompletion=gpu_lists),
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(metavar="N", help="Sequences, as in 1,8,64.")] = None,
    context: Annotated[list[str] | None, typer.Option(metavar="N", help="Tokens of each, as in 4096.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="prefill, decode, train, forward; all unless told.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Of products: bf16, fp8, fp4 …")] = "",
    weights: Annotated[str, typer.Option(metavar="TYPE", help="As they are stored: int4, fp8 …")] = "",
    cache: Annotated[str, typer.Option(metavar="TYPE", help="Of the KV cache.")] = "",
    optimizer: Annotated[str, typer.Option(metavar="TYPE", help="Of Adam's averages; fp32 unless told.")] = "",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Make activations again.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Memory as PyTorch's own ops keep it.")] = False,
    lora: Annotated[int, typer.Option(metavar="RANK", help="Train adapters of this rank alone.")] = 0,
    tp: Annotated[int, typer.Option(metavar="N", help="GPUs that share each product.")] = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="GPUs that share the layers.")] = 1,
    dp: Annotated[int, typer.Option(metavar="N", help="GPUs that share the batch.")] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="GPUs that share the experts.")] = 1,
    network: Annotated[str, typer.Option(metavar="50GB", help="A GPU's bytes/s to other machines.")] = "",
    plan: Annotated[int, typer.Option(metavar="N", help="The best way to spread it over N GPUs.")] = 0,
    latency: Annotated[str, typer.Option(metavar="30ms", help="With --plan: the most that a step may take.")] = "",
    price: Annotated[str, typer.Option(metavar="$", help="Of a GPU's hour: cost of a million tokens.")] = "",
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="KNOB=2x", help="bandwidth, flops, links, memory, power.")
    ] = None,
    trace: Annotated[
        str, typer.Option("--from", metavar="TRACE", help="Instead of a model: what was recorded on another GPU.")
    ] = "",
    census: Annotated[bool, typer.Option("--census", help="Every op, its bytes, its bound, its share.")] = False,
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
    """
    from sublight.cli import predict as cli_predict
    from sublight.predict.step import Parallel
    from sublight.report.predict import data, terminal

    cli_output.check_writable(html, csv, json)
    cli_output.check_apart((html, csv, json), [model or "", trace, *(gpu or ())])
    if bool(model) == bool(trace):
        raise BadInput("name a model, as in `sublight predict llama-3-8b --gpu h100`, or a trace with --from")
    request = cli_predict.Request(
        model=model or "",
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
    )
    if trace:
        of_model = {
            "batch": batch,
            "context": context,
            "mode": mode,
            "dtype": dtype,
            "weights": weights,
            "cache": cache,
        }
        of_model |= {"optimizer": optimizer, "checkpointing": checkpointing, "eager": eager, "lora": lora, "plan": plan}
        of_model |= {"tp": tp > 1, "pp": pp > 1, "dp": dp > 1, "ep": ep > 1, "price": price, "latency": latency}
        cli_predict.refuse("--from takes GPUs alone", **of_model, census=census, csv=csv, html=html, network=network)
        return cli_predict.show_elsewhere(trace, request, json)
    if plan or latency:
        cli_predict.refuse("--plan gives one table", census=census, csv=csv, html=html)
        return cli_predict.show_plans(request, plan, latency, json)
    found_model, precision, found = cli_predict.answer(request)
    document = data.to_json(found_model, precision, found)
    cli_predict.refuse_misfit(document["predictions"])
    if html:
        cli_predict.write_html(document, found, html)
    if csv:
        cli_predict.write_csv(found, csv, census=census)
    cli_output.show(terminal.page(document, census=census), document, json)
