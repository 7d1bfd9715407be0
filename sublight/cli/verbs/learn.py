"""`sublight learn`: exercises from the first copy on, judged by correctness and by the limit."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json, gpu_names, learn_words


def learn(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="show, start, check, watch, hint, solution, ask, submit, next, goal, export or import; else the map.",
            autocompletion=learn_words,
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="An exercise, or the file to check, export to or import; else the one you worked on last.",
            autocompletion=learn_words,
        ),
    ] = "",
    anyway: Annotated[bool, typer.Option("--anyway", help="With solution or submit: before having passed.")] = False,
    by: Annotated[str, typer.Option(metavar="2027-01-31", help="With goal: until when; never takes it back.")] = "",
    lang: Annotated[str, typer.Option(metavar="en|zh", help="The texts' language; default: from LANG.")] = "",
    gpu: Annotated[
        str,
        typer.Option(
            metavar="h200", help="Compile for this GPU; else this machine's, or h200.", autocompletion=gpu_names
        ),
    ] = "",
    question: Annotated[str, typer.Option(metavar="TEXT", help="With ask: what you would like to know.")] = "",
    out: Annotated[str, typer.Option(metavar="FILE", help="With ask: write the prompt there; send nothing.")] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Of the map: the roadmap as a page.")] = "",
    json: Json = "",
) -> None:
    """Learn to write GPU kernels, with or without a GPU: the map, and what to do next.

    \b
    sublight learn                  the map: what is done, what is next; --html roadmap.html
    sublight learn start copy       read the page, get learn/copy.py to fill in
    sublight learn check copy       what is wrong and where, or how near the limit it is
    sublight learn watch copy       check again whenever you save
    sublight learn hint copy        one hint more, of three; then all of them again
    sublight learn solution copy    once you have passed
    sublight learn ask copy         a prompt for your own assistant, or its answer (SUBLIGHT_ASK_URL)
    sublight learn submit copy      to a leaderboard (SUBLIGHT_BOARD_URL, SUBLIGHT_BOARD_TOKEN)
    sublight learn goal softmax --by 2027-01-31
    """
    from sublight.cli import learn as cli_learn

    cli_output.check_named(html=html, out=out)
    cli_output.check_writable(html, json)
    request = cli_learn.Request(
        what=what,
        name=name,
        anyway=anyway,
        by=by,
        language=lang,
        gpu=gpu,
        question=question,
        out=out,
        html=html,
        json=json,
    )
    status = cli_learn.command(request)
    if status:
        raise typer.Exit(status)
