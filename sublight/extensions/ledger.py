"""What nvcc made of our CUDA C++, by a hash of the source: a file that has not changed is not compiled again.

`compiled.json` holds registers, spilled bytes and static shared memory of every kernel for sm_80, sm_90 and sm_100, as
one release of nvcc made them. `python -m sublight.extensions.ledger` compiles what changed, and writes the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sublight.extensions import LADDERS, build
from sublight.extensions.build import Usage
from sublight.extensions.demos import DEMOS
from sublight.results import write_file

FILE = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A file of kernels and what it should hold."""

    source: str
    kernels: tuple[str, ...]
    spilling: frozenset[str]  # kernels whose spills are explained


def files() -> tuple[Compiled, ...]:
    """Every file of kernels once, although several ladders or demonstrations may share it."""
    named: dict[str, list[str]] = {}
    for ladder in LADDERS:
        for rung in ladder.rungs:
            named.setdefault(rung.source or ladder.source, []).extend(rung.kernels)
    for demo in DEMOS:
        named.setdefault(demo.source, []).extend(demo.kernels)
    spilling = frozenset(name for ladder in LADDERS for name in ladder.spilling)
    return tuple(
        Compiled(source=source, kernels=tuple(dict.fromkeys(names)), spilling=spilling)
        for source, names in named.items()
        if source
    )


Figures = dict[str, dict[str, Usage]]  # key -> kernel -> what it takes


def key_of(source: str, target: int) -> str:
    digest = hashlib.sha256(build.text_of(source).encode()).hexdigest()[:16]
    return f"{source.removeprefix('../')} sm_{target} {digest}"


def read(path: Path = FILE) -> tuple[str, Figures]:
    """nvcc's release and the figures in the ledger; both empty where there is no such file."""
    if not path.exists():
        return "", {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    figures = {
        key: {
            name: Usage(registers=registers, spill_bytes=spilled, shared_bytes=shared)
            for name, (registers, spilled, shared) in kernels.items()
        }
        for key, kernels in kept["compiled"].items()
    }
    return kept["nvcc"], figures


def write(release: str, figures: Mapping[str, Mapping[str, Usage]], path: Path = FILE) -> None:
    lines = []
    for key in sorted(figures):
        kernels = {name: [used.registers, used.spill_bytes, used.shared_bytes] for name, used in figures[key].items()}
        lines.append(f"  {json.dumps(key)}: {json.dumps(kernels, sort_keys=True)}")
    write_file(f'{{"nvcc": {json.dumps(release)}, "compiled": {{\n' + ",\n".join(lines) + "\n}}\n", path)


def problems(file: Compiled, target: int, kernels: Mapping[str, Usage]) -> list[str]:
    """What must not ship: a spill that nothing explains, a kernel that the file lacks or that is not listed."""
    sentences = [
        f"{name} sm_{target}: spills {used.spill_bytes} bytes a thread"
        for name, used in kernels.items()
        if used.spill_bytes and name not in file.spilling
    ]
    sentences += [f"{file.source} sm_{target}: has no {name}" for name in file.kernels if name not in kernels]
    sentences += [f"{file.source} sm_{target}: {name} is not listed" for name in kernels if name not in file.kernels]
    return sentences


def main() -> None:
    release, kept = read()
    mine = build.nvcc_release(build.nvcc())
    figures: Figures = {}
    wrong: list[str] = []
    cases = [(file, target) for file in files() for target in build.targets(file.source)]
    for file, target in cases:
        key = key_of(file.source, target)
        figures[key] = kept[key] if key in kept and release == mine else dict(build.compiled(file.source, target)[1])
        for name, used in figures[key].items():
            print(
                f"sm_{target:<4} {name:<30} {used.registers:>3} registers {used.shared_bytes:>6} B shared", flush=True
            )
        wrong += problems(file, target, figures[key])
    write(mine, figures)
    print("\n".join(wrong) or f"{sum(map(len, figures.values()))} kernels, none spills")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
