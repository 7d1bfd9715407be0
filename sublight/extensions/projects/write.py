"""Write a project: templates with a name filled in, into a folder that was not there; never over a person's files."""

from __future__ import annotations

import io
import keyword
import os
import re
import sys
import tempfile
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from sublight.errors import BadInput, one_of
from sublight.extensions.projects.ways import STARTS, TEMPLATES, Way, way_of, words_about

PLACEHOLDER = "op_name"
MOST_LETTERS = 40
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_INCLUDED = re.compile(r"^@([\w.]+)@$", re.MULTILINE)
# PyTorch's own libraries of ops, names that the C++ compiler defines, targets that CMake has, files that a project has
_TAKEN = (
    *("aten", "prim", "prims", "quantized", "c10d", "inductor", "mkldnn", "debugprims", "rngprims", "higher_order"),
    *("linux", "unix", "all", "clean", "install", "package", "help", "cases", "build", "csrc", "setup", "forward"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project that was written."""

    name: str
    way: str
    start: str
    folder: Path
    files: Mapping[str, str]  # path in the folder -> what it is


def check_name(name: str) -> str:
    """The name, if a Python package, a library of ops and C++ functions can have it.

    >>> check_name("my_norm")
    'my_norm'
    """
    if not _NAME.fullmatch(name) or len(name) > MOST_LETTERS:
        plain = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_0123456789")
        near = f", as in {plain[:MOST_LETTERS].rstrip('_')}" if plain else ""
        raise BadInput(
            f"{name!r} cannot be an op's name: use small letters, digits and single _, at most {MOST_LETTERS}{near}"
        )
    if keyword.iskeyword(name) or name in _TAKEN or name in sys.stdlib_module_names:
        raise BadInput(f"{name!r} is taken, by Python, PyTorch or CMake: use another name, as in my_{name}")
    if _is_installed(name):
        raise BadInput(f"{name!r} is an installed package, which the op would hide: use another name, as in my_{name}")
    return name


def _is_installed(name: str) -> bool:
    """A folder of this name where the user stands is no package: it may be the project, made before."""
    here = Path.cwd().resolve()
    return PathFinder.find_spec(name, [path for path in sys.path if Path(path).resolve() != here]) is not None


def write(name: str, way: str, start: str, folder: Path) -> Project:
    """A project in `folder`, which must not be there, or be empty; all of it or nothing."""
    check_name(name)
    chosen, start = way_of(way), one_of("op to begin with", start, tuple(STARTS))
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise BadInput(f"{folder} is there already: name another folder with --into, or move it away")
    files = contents(chosen, start)
    if name in _names_in(files):
        raise BadInput(f"{name!r} is a name that the project's own code uses: use another one, as in my_{name}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
            made = Path(temporary) / name
            for path, text in files.items():
                target = made / path.replace(PLACEHOLDER, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text.replace(PLACEHOLDER, name), encoding="utf-8")
            os.rename(made, folder)  # fails where a file has appeared there meanwhile
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror}; name another folder with --into") from None
    listed = {path.replace(PLACEHOLDER, name): words_about(path) for path in sorted(files)}
    return Project(name=name, way=way, start=start, folder=folder, files=listed)


def contents(way: Way, start: str) -> dict[str, str]:
    """Every file of a project, by its path in it; the op still has the placeholder's name."""
    begin = TEMPLATES / "starts" / start
    files = {
        "op_name/__init__.py": _read(begin / "op.py"),
        "cases.py": _read(begin / "cases.py"),
        **{place: _read(begin / source) for source, place in way.sources.items()},
    }
    for path in sorted((TEMPLATES / "ways" / way.name).glob("*.in")):
        name = path.name.removesuffix(".in")
        inside = f"op_name/{name}" if name == "_library.py" else name
        files[inside] = _INCLUDED.sub(lambda match: _as_text(_read(begin / match[1])), _read(path.with_suffix("")))
    for path in sorted((TEMPLATES / "common").glob("*.in")):
        files[path.name.removesuffix(".in")] = _read(path.with_suffix(""))
    rows = [f"| `{path}` | {words_about(path)} |" for path in sorted(files)]
    needs = ", ".join(NEEDS[tool] for tool in way.tools)
    words = {
        "build_command": f"\t{way.build}\n" if way.build else "",
        "way_words": way.summary,
        "needs": f"Needs PyTorch 2.11 or later{', ' + needs if needs else ''}.",
        "files": "\n".join(rows),
        "arithmetic": way.arithmetic,
    }
    for name in ("Makefile", "README.md"):
        for word, text in words.items():
            files[name] = files[name].replace(f"@{word}@\n" if word == "build_command" else f"@{word}@", text)
    return files


def _names_in(files: Mapping[str, str]) -> set[str]:
    """Every variable, function and module of the Python files; what stands behind a dot is somebody else's."""
    names = set()
    for path, text in files.items():
        if path.endswith(".py"):
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
            pairs = zip([None, *tokens], tokens, strict=False)
            names |= {
                each.string for last, each in pairs if each.type == tokenize.NAME and not (last and last.string == ".")
            }
    return names


NEEDS = {
    "compiler": "a C++ compiler",
    "ninja": "ninja (`pip install ninja`)",
    "cmake": "CMake 3.20 or later",
    "triton": "Triton",
    "nvcc": "for a GPU nvcc of PyTorch's CUDA version",
}


def _as_text(source: str) -> str:
    """A C++ file as it stands in a string behind its header."""
    return source.replace("#pragma once\n", "").replace('#include "kernels.h"\n', "").strip()


def _read(path: Path) -> str:
    return path.with_name(f"{path.name}.in").read_text(encoding="utf-8")
