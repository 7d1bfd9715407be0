"""What `sublight learn` does, word by word."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sublight.cli import output
from sublight.errors import BadInput, one_of
from sublight.learn import path
from sublight.learn.exercises import CUDA_EXERCISES, EXERCISES, find
from sublight.learn.progress import Progress, parse_due
from sublight.learn.record import CUDA, Exercise
from sublight.learn.texts import HINTS, LANGUAGES, text_of
from sublight.learn.verdict import Verdict
from sublight.learn.words import say
from sublight.report import learn as report
from sublight.report import roadmap
from sublight.results import write_file

FOLDER = Path("learn")
LOOK_S = 0.3  # `watch` looks at the file so often


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line."""

    what: str
    name: str
    anyway: bool = False
    by: str = ""
    language: str = ""
    gpu: str = ""
    question: str = ""
    out: str = ""
    html: str = ""
    json: str = ""

    @property
    def lang(self) -> str:
        if self.language:
            return one_of("language", self.language.lower(), tuple(LANGUAGES))
        chosen = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG") or ""
        return "zh" if chosen.startswith("zh") else "en"


def command(request: Request) -> int:
    """Run one of learn's words; the exit status is 1 where a check has not passed."""
    if request.what in {each.name for each in (*EXERCISES, *CUDA_EXERCISES)} and not request.name:
        request = replace(request, what="show", name=request.what)  # `sublight learn copy`
    if request.anyway and request.what not in ("solution", "submit"):
        raise BadInput("--anyway goes with `sublight learn solution NAME` or `submit NAME`: leave it out")
    if request.by and request.what != "goal":
        raise BadInput("--by goes with `sublight learn goal NAME`: leave it out")
    if request.html and request.what:
        raise BadInput("--html goes with the map: `sublight learn --html roadmap.html`")
    if (request.question or request.out) and request.what != "ask":
        raise BadInput("--question and --out go with `sublight learn ask NAME`: leave them out")
    if request.what:
        one_of("word", request.what, tuple(filter(None, COMMANDS)))
    return COMMANDS[request.what](request)


def _map(request: Request) -> int:
    progress = Progress()
    states, goals, today = progress.states(), progress.goals(), datetime.date.today()
    if request.html:
        write_file(roadmap.page(states, goals, request.lang, today), Path(request.html))
    shown = report.map_page(states, goals, request.lang, today)
    output.show(shown, report.map_json(states, goals), request.json)
    return 0


def _chosen(request: Request) -> Exercise:
    """The exercise that is named; else the one whose file was changed last."""
    if _is_file(request.name):
        name = Path(request.name).name.removesuffix(".py")
        if name not in {each.name for each in (*EXERCISES, *CUDA_EXERCISES)}:
            words = "{file} has the name of no exercise: call it as in copy.py; `sublight learn` shows all"
            raise BadInput(say(request.lang, words, file=request.name))
        return find(name)
    if request.name:
        return find(request.name)
    begun = [each for each in (*EXERCISES, *CUDA_EXERCISES) if (FOLDER / each.file).is_file()]
    if begun:
        return max(begun, key=lambda each: (FOLDER / each.file).stat().st_mtime)
    following = path.next_one(Progress().states()) or EXERCISES[0]
    words = "which exercise? Name one, or begin with `sublight learn start {name}`"
    raise BadInput(say(request.lang, words, name=following.name))


def _file(request: Request, exercise: Exercise) -> Path:
    is_named = _is_file(request.name) and request.name != exercise.name
    file = Path(request.name) if is_named else FOLDER / exercise.file
    if not file.is_file():
        words = "there is no {file}: `sublight learn start {name}` writes learn/{written}"
        raise BadInput(say(request.lang, words, file=file, name=exercise.name, written=exercise.file))
    return file


def _is_file(name: str) -> bool:
    """Whether a word names a file, not an exercise: add.cu, say, without a folder."""
    return name.endswith(".py") or (name.endswith(CUDA) and Path(name).name != name)


def _read(file: Path, language: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = "cannot read {file}: {error}; it must be a text file in UTF-8"
        raise BadInput(say(language, words, file=file, error=error)) from None


def _show(request: Request) -> int:
    exercise = _chosen(request)
    text = text_of(exercise, request.lang)
    output.show(report.markdown(text.page), {"exercise": exercise.name, "page": text.page}, request.json)
    return 0


def _start(request: Request) -> int:
    progress = Progress()
    following = path.next_one(progress.states(), progress.goals())
    exercise = find(request.name) if request.name else following
    if exercise is None:
        raise BadInput(say(request.lang, "every exercise has passed: name one to do it again"))
    text, file = text_of(exercise, request.lang), FOLDER / exercise.file
    is_new = not file.exists()
    if is_new:
        try:
            FOLDER.mkdir(exist_ok=True)
            with file.open("x", encoding="utf-8") as target:  # "x": an existing file is never overwritten
                target.write(exercise.starter())
        except OSError as error:
            words = "cannot write {file}: {error}; go to a folder of your own"
            raise BadInput(say(request.lang, words, file=file, error=error.strerror)) from None
    data = {"exercise": exercise.name, "file": str(file), "is_new": is_new, "page": text.page}
    output.show(report.start_page(exercise, text, file, is_new=is_new), data, request.json)
    return 0


def _check(request: Request) -> int:
    from sublight.learn.grade import standing
    from sublight.learn.grade.crew import Crew
    from sublight.learn.target import target

    exercise = _chosen(request)
    file = _file(request, exercise)
    source = _read(file, request.lang)
    try:
        if not standing.is_wanted():
            raise standing.Unreachable
        verdict = standing.check(exercise, source, gpu=request.gpu, file=str(file))
        Progress().add(verdict, source)
    except standing.Unreachable:
        gpu = target(request.gpu)
        with Crew() as crew:
            verdict = _checked(exercise, source, file, crew, gpu)
    output.show(report.verdict_page(verdict, request.lang), verdict.to_json(), request.json)
    return 0 if verdict.has_passed else 1


def _checked(exercise: Exercise, source: str, file: Path, crew: object, gpu: object) -> Verdict:
    from sublight.learn.grade.check import check

    verdict = check(exercise, source, crew=crew, gpu=gpu, file=str(file))  # type: ignore[arg-type]
    Progress().add(verdict, source)
    return verdict


def _watch(request: Request) -> int:
    from sublight.learn.grade.crew import Crew
    from sublight.learn.target import target

    exercise = _chosen(request)
    file, gpu, seen = _file(request, exercise), target(request.gpu), ""
    passed = False
    with Crew() as crew:
        try:
            while not passed:
                source = _read(file, request.lang) if file.is_file() else seen  # gone: an editor replaces it just now
                if source == seen or not source:
                    time.sleep(LOOK_S)
                    continue
                seen = source
                verdict = _checked(exercise, source, file, crew, gpu)
                output.show(
                    report.verdict_page(verdict, request.lang, is_watched=True), verdict.to_json(), request.json
                )
                passed = verdict.has_passed
        except KeyboardInterrupt:
            return 0
    return 0


def _hint(request: Request) -> int:
    exercise = _chosen(request)
    level = Progress().show_hint(exercise.name, HINTS)
    text = text_of(exercise, request.lang)
    data = {"exercise": exercise.name, "hint": min(level, HINTS), "of": HINTS, "text": text.hint(level)}
    output.show(report.hint_page(exercise.name, text, level, HINTS), data, request.json)
    return 0


def _solution(request: Request) -> int:
    exercise = _chosen(request)
    if not request.anyway and not Progress().state(exercise.name).has_passed:
        words = "{name} has not passed yet: `sublight learn hint {name}` helps on, --anyway shows it"
        raise BadInput(say(request.lang, words, name=exercise.name))
    text = text_of(exercise, request.lang)
    data = {"exercise": exercise.name, "code": exercise.solution(), "text": text.explanation}
    output.show(report.solution_page(exercise, text), data, request.json)
    return 0


def _ask(request: Request) -> int:
    """Send the prompt to SUBLIGHT_ASK_URL; print it where that is not set, write it where --out names a file."""
    from rich.text import Text as RichText

    from sublight.learn import ask
    from sublight.learn.grade.crew import Crew
    from sublight.learn.target import target
    from sublight.results import write_file

    exercise = _chosen(request)
    file = _file(request, exercise)
    address = None if request.out else ask.address_of()
    output.check_writable(request.out)
    output.check_apart((request.out, request.json), [str(file)])
    source, verdict, note = _read(file, request.lang), None, ""
    try:
        gpu = target(request.gpu)
        with Crew() as crew:
            verdict = _checked(exercise, source, file, crew, gpu)
    except (BadInput, ModuleNotFoundError) as error:  # no Linux or Triton: ask without a verdict
        note = f"it could not be checked here: {error}"
    text = text_of(exercise, request.lang)
    prompt = ask.prompt_of(exercise, text, source, verdict, question=request.question, note=note)
    data: dict[str, object] = {"exercise": exercise.name, "prompt": prompt, "sent_to": None, "answer": None}
    if request.out:
        write_file(prompt, Path(request.out))
        written = say(request.lang, "written to {file}: give it to your assistant", file=request.out)
        output.show(written, data, request.json)
    elif address is None:
        output.show(RichText(prompt), data, request.json, whole_lines=True)
        if request.json != "-":
            words = "paste this to your assistant, or set {variable} to send it"
            print(f"sublight: {say(request.lang, words, variable=ask.URL)}", file=sys.stderr)
    else:
        words = "{model} at {url} is asked"
        print(f"sublight: {say(request.lang, words, model=address.model, url=address.url)}", file=sys.stderr)
        answer = output.stream(ask.answer_of(address, prompt), silent=request.json == "-")
        data |= {"sent_to": address.url, "answer": answer}
        output.show("", data, request.json)
    return 0


def _submit(request: Request) -> int:
    """Submit what has passed here to the board; the exit status is 1 where it has not passed there."""
    from sublight.learn.grade.crew import Crew
    from sublight.learn.submit import board_of
    from sublight.learn.target import target
    from sublight.report.draw import console

    exercise = _chosen(request)
    if exercise.goal is None:
        words = "{name} is right or wrong, and has no ranking: `sublight learn check` says which"
        raise BadInput(say(request.lang, words, name=exercise.name))
    if exercise.kind == "cuda":
        words = "boards take Triton alone: `sublight learn submit {name}`"
        raise BadInput(say(request.lang, words, name=exercise.function))
    board = board_of()
    file, gpu = _file(request, exercise), target(request.gpu)
    source = _read(file, request.lang)
    with Crew() as crew:
        verdict = _checked(exercise, source, file, crew, gpu)
    if not verdict.has_passed and not request.anyway:
        output.show(report.verdict_page(verdict, request.lang), verdict.to_json(), request.json)
        words = "{name} has not passed here, so nothing was sent: --anyway sends it all the same"
        raise BadInput(say(request.lang, words, name=exercise.name))
    sent = board.send(verdict, source)
    with console.progress("board") as progress:
        entry = board.outcome(sent["id"], progress=progress and (lambda state: progress(state, 0, 1)))
    shown = report.entry_page(entry, board.url, request.lang)
    output.show(shown, {**entry, "page": f"{board.url}/entry/{entry['id']}"}, request.json)
    return 1 if entry["state"] == "rejected" else 0


def _next(request: Request) -> int:
    if request.name:
        raise BadInput("`sublight learn next` takes no name: `sublight learn start NAME` does")
    progress = Progress()
    following = path.next_one(progress.states(), progress.goals())
    data = {"next": following.name if following else None}
    output.show(report.next_page(following, request.lang), data, request.json)
    return 0


def _drop_goal(progress: Progress, name: str, request: Request) -> int:
    if not progress.drop_goal(name):
        words = "{name} is no goal of yours: `sublight learn` shows your goals"
        raise BadInput(say(request.lang, words, name=name))
    output.show(say(request.lang, "{name} is no goal any more", name=name), {"dropped": name}, request.json)
    return 0


def _goal(request: Request) -> int:
    progress = Progress()
    if request.name:
        if request.by == "never":
            return _drop_goal(progress, find(request.name).name, request)
        due = parse_due(request.by) if request.by else ""
        if due and due < datetime.date.today().isoformat():
            raise BadInput(say(request.lang, "--by {due} is past: name a day to come", due=due))
        progress.set_goal(find(request.name).name, due)
    goals, states = progress.goals(), progress.states()
    if not goals:
        words = "no goal is set: `sublight learn goal softmax --by 2027-01-31` sets one"
        raise BadInput(say(request.lang, words))
    goal = next((each for each in goals if each.exercise == request.name), None) or next(
        (each for each in goals if path.way_to(find(each.exercise), states)), goals[0]
    )
    way = path.way_to(find(goal.exercise), states)
    data = {"goal": goal.exercise, "by": goal.due or None, "left": [each.name for each in way]}
    output.show(report.goal_page(goal, way, request.lang), data, request.json)
    return 0


def _export(request: Request) -> int:
    from sublight.results import write_json

    if not request.name:
        raise BadInput("export to which file? `sublight learn export progress.json`")
    output.check_writable(request.name)
    data = Progress().to_json()
    write_json(data, Path(request.name))
    count = len(data["attempts"])
    words = say(request.lang, "{count} checks written to {file}", count=count, file=request.name)
    output.show(words, {"file": request.name, "attempts": count}, request.json)
    return 0


def _import(request: Request) -> int:
    if not request.name:
        raise BadInput("import which file? `sublight learn import progress.json`")
    count = Progress().merge(Path(request.name))
    words = say(request.lang, "{count} rows of {file} were new", count=count, file=request.name)
    output.show(words, {"file": request.name, "rows": count}, request.json)
    return 0


COMMANDS: dict[str, Callable[[Request], int]] = {
    "": _map,
    "show": _show,
    "start": _start,
    "check": _check,
    "watch": _watch,
    "hint": _hint,
    "solution": _solution,
    "ask": _ask,
    "submit": _submit,
    "next": _next,
    "goal": _goal,
    "export": _export,
    "import": _import,
}
