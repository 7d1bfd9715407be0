"""The code in the docs runs: Python blocks as they are, commands as they are, shown output as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
COMMAND_S = 900  # a command that hangs; on a busy machine some take minutes
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def commands() -> list[tuple[str, str]]:
    return [
        (page.name, line) for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line
    ]


def consoles() -> list[tuple[str, str]]:
    return [(page.name, block) for page in PAGES for block in blocks(page, "console")]


def environment(folder: Path, *, interpreted: bool = True) -> dict[str, str]:
    """The checkout's package, a cache for these tests, a wide screen; kernels run without a GPU, or are compiled."""
    given = {"TRITON_INTERPRET": "1" if interpreted else "0"}
    return {
        **os.environ,
        **given,
        "PYTHONPATH": str(ROOT),
        "SUBLIGHT_CACHE": str(folder.parent / "cache"),
        "SUBLIGHT_LEARN": str(folder / "learn.sqlite"),
        "COLUMNS": "200",
    }


def sublight(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words.split()]
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, interpreted=False),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check(line: str, folder: Path) -> None:
    """Run one line of a bash block, or hold what it names against the file that defines it."""
    verb, _, rest = line.partition(" ")
    if verb == "make":  # running it here would set up an environment, or run these tests in themselves
        assert rest in targets(), f"the Makefile has no target {rest!r}"
    elif verb == "sublight":
        done = sublight(line, folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout, "nothing was printed"
    elif line.startswith("pip install"):
        named = re.search(r"\[(\w+)\]", line)
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert named is None or named[1] in extras
    else:
        raise AssertionError(f"no check is known for {line!r}")


def show(block: str, folder: Path) -> None:
    """A console block's output is what its command prints."""
    first, *expected = block.splitlines()
    assert first.startswith("$ sublight "), first
    done = sublight(first.removeprefix("$ "), folder)
    assert [line.rstrip() for line in done.stdout.splitlines()] == expected


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_run(page: str, line: str, tmp_path: Path) -> None:
    check(line, tmp_path)


@pytest.mark.parametrize(("page", "block"), consoles())
def test_shown_output_is_what_is_printed(page: str, block: str, tmp_path: Path) -> None:
    show(block, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """A page's blocks follow one another; from a file, since Triton reads the source of its kernels."""
    script, code = tmp_path / "blocks.py", "\n\n".join(blocks(page, "python"))
    script.write_text(code)
    given = environment(tmp_path, interpreted="sublight.xray" not in code)
    done = subprocess.run([sys.executable, script], env=given, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    names = re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for name in (first or second for first, second in names):
        assert name.startswith("http") or (page.parent / name).exists(), f"{page.name} points to {name}"


TO_BE_WRITTEN = ("sublight/ops/pointwise/relu.py", "sublight/limits/threads.py")  # by whoever follows CONTRIBUTING.md


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.])(?:benchmarks|examples|sublight)/[\w./-]+\.(?:py|json|gz|cu|toml)\b", text))
    assert not [name for name in named - {*TO_BE_WRITTEN} if not (ROOT / name).exists()]


def test_code_inside_sentences_names_real_targets() -> None:
    text = "".join(_BLOCK.sub("", page.read_text(encoding="utf-8")) for page in PAGES)
    named = set(re.findall(r"`make ([\w-]+)`", text))
    assert named
    assert named <= targets()


@pytest.mark.parametrize("line", ["make coffee", "sublight gpus h2000", "pip install '.[nothing]'", "rm -rf /"])
def test_the_checker_finds_a_wrong_line(line: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(line, tmp_path)


def test_the_checker_finds_wrong_output(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        show("$ sublight --version\nsublight 9.9.9\n", tmp_path)


def test_every_verb_says_where_it_works() -> None:
    """A row for each verb and no other, in words that the page explains; every GPU of another vendor is named."""
    from sublight import gpus
    from sublight.cli.main import app
    from sublight.xray.amd import NVIDIA_ONLY, PLANS

    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {row[0].strip("`") for row in rows} == verbs | {"our kernels"}
    words = set(re.findall(r"\*\*([\w-]+)\*\*:", text))
    assert {cell for row in rows for cell in row[1:]} <= words
    assert all(gfx in text for gfx in PLANS) and f"the {['no', 'one', 'two'][len(NVIDIA_ONLY)]}" in text.lower()
    for gpu in gpus.all_gpus():
        assert gpu.vendor == "NVIDIA" or gpu.name.removeprefix("Instinct ").removeprefix("Arc ") in text, gpu.name
