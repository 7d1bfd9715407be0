"""What is left out at the start changes no answer: values and complaints are typer's own."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer

from sublight.cli import main, start
from sublight.cli.start import command_for

app = typer.Typer(rich_markup_mode=None)
given: list[tuple[Any, ...]] = []


@app.callback()
def begin() -> None: ...


@app.command()
def measure(
    words: Annotated[list[str] | None, typer.Argument()] = None,
    name: Annotated[str, typer.Option("--name", "-n")] = "none",
    at: Annotated[str | None, typer.Option()] = None,
    steps: Annotated[int, typer.Option(min=1, max=9)] = 4,
    share: Annotated[float | None, typer.Option()] = None,
    every: Annotated[list[str] | None, typer.Option()] = None,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    scaled: Annotated[str, typer.Option(parser=lambda text: 2 * int(text))] = "1",
) -> None:
    given.append((words, name, at, steps, share, every, quick, scaled))


@app.command("other-verb")
def other() -> None: ...


def answer(command: Any, line: str) -> Any:
    """What the verb was given, or the complaint."""
    given.clear()
    try:
        command(args=line.split(), standalone_mode=False)
    except Exception as error:
        return type(error).__name__, str(error)
    return given[:]


@pytest.mark.parametrize(
    "line",
    [
        "measure", "measure a b", "measure --name x -n y", "measure --at 3", "measure --steps 5 --share 0.5 --quick a",
        "measure --steps 0", "measure --steps many", "measure --share 1e400", "measure --share -inf", "measure --steps",
        "measure --every a --every b -- --quick", "measure --scaled 4", "measure --scaled x", "measure --nam x", "",
        "measur", "other-verb a", "measure --name=", "measure --every 4",
    ],
)  # fmt: skip
def test_a_line_means_what_it_means_to_typer(line: str) -> None:
    assert answer(command_for(app, line.split()), line) == answer(typer.main.get_command(app), line)


def test_only_the_verb_that_is_named_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(command_for(main.app, ["explain", "a.json"]).commands) == ["explain"]
    every = list(command_for(main.app, ["--help"]).commands)
    assert {"explain", "limits", "doctor"} < set(every)
    monkeypatch.setenv(start.COMPLETES, "complete_bash")
    assert list(command_for(main.app, ["explain"]).commands) == every
    assert len(main.app.registered_commands) == len(every)  # the next line may name another verb
