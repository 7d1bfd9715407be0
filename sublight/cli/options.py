"""What several verbs share: flags, the names that a shell completes, and how lists of words are split."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sublight.errors import one_of

INTERRUPTED = 130  # 128 + the signal, as a shell says it


def op_names(incomplete: str) -> list[str]:
    """Ops for the shell to complete, by their files: OPS would cost an import of torch at every Tab."""
    import sublight

    return [name for name in dir(sublight) if name.startswith(incomplete) and sublight._is_op(name)]


def learn_words(incomplete: str) -> list[str]:
    """The first words that `sublight learn` takes, and the exercises."""
    from sublight.cli.learn import COMMANDS
    from sublight.learn.exercises import CUDA_EXERCISES, EXERCISES

    words = [*filter(None, COMMANDS), *(each.name for each in (*EXERCISES, *CUDA_EXERCISES))]
    return [word for word in words if word.startswith(incomplete)]


def gpu_names(incomplete: str) -> list[str]:
    from sublight import gpus as known

    return [gpu.key for gpu in known.all_gpus() if gpu.key.startswith(incomplete)]


def gpu_lists(incomplete: str) -> list[str]:
    """Complete the last of several GPUs with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in gpu_names(last)]


def model_names(incomplete: str) -> list[str]:
    """Known models to complete; where none fits, the shell offers files."""
    from sublight.predict import config

    return [name for name in config.known_names() if name.startswith(incomplete)]


def way_names(incomplete: str) -> list[str]:
    from sublight.extensions.projects import WAYS

    return [way.name for way in WAYS if way.name.startswith(incomplete)]


def demo_names(incomplete: str) -> list[str]:
    from sublight.extensions.demos import DEMOS

    return [demo.name for demo in DEMOS if demo.name.startswith(incomplete)]


def like_names(incomplete: str) -> list[str]:
    from sublight.extensions.projects import STARTS

    return [name for name in STARTS if name.startswith(incomplete)]


def op_and_file_names(incomplete: str) -> list[str]:
    """Ops and files to complete: a shell that gets any names offers no files of its own."""
    import glob

    paths = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    files = [name for name in paths if Path(name).suffix in (".py", ".cu", ".ptx", ".cubin")]
    return op_names(incomplete) + files + [f"{name}/" for name in paths if os.path.isdir(name)]


Json = Annotated[str, typer.Option("--json", metavar="FILE|-", help="Write JSON to FILE; - prints JSON alone.")]
Device = Annotated[str, typer.Option(metavar="cuda|cpu", help="Default: the GPU where there is one.")]


def bare_threads(words: Sequence[str]) -> list[str]:
    """`xray KERNEL --threads` asks which thread holds what, which is --lanes; with a number it is a block's size.

    >>> bare_threads(["xray", "a.cu", "--threads"]), bare_threads(["xray", "a.cu", "--threads", "32x8", "--threads"])
    (['xray', 'a.cu', '--lanes'], ['xray', 'a.cu', '--threads', '32x8', '--lanes'])
    >>> bare_threads(["xray", "--threads", "a.py", "--", "--threads"]), bare_threads(["xray", "--threads", "many"])
    (['xray', '--lanes', 'a.py', '--', '--threads'], ['xray', '--threads', 'many'])
    """
    end = words.index("--") if "--" in words else len(words)
    following = [*words[1:end], ""]
    named = [
        "--lanes" if word == "--threads" and (not after or after.startswith("-") or "." in after) else word
        for word, after in zip(words[:end], following, strict=True)
    ]
    return [*named, *words[end:]]


def kind_of(device: str) -> Any:
    if device.lower() in ("gpu", "rocm"):  # other names for what torch calls cuda
        return "cuda"
    return one_of("device", device.lower(), ("cuda", "cpu")) if device else None


def split(words: Iterable[str] | None) -> list[str]:
    """The words of an option that may be repeated, or hold several words with commas between them."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]
