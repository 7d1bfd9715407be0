"""Imports point down the design's list, and what a folder holds is listed in its tuple."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent
ROWS = (  # an import goes down, or stays inside its own part
    ("__main__",),
    ("cli", "api"),
    ("report",),
    ("engines", "learn"),
    ("diagnose",),
    ("fix", "predict", "xray", "top", "pyprof", "doctor"),
    ("bench",),
    ("limits", "ops", "extensions", "trace"),
    ("op",),
    ("timing", "correct", "sampling"),
    ("backend",),
    ("results",),
    ("health",),
    ("cost", "gpus", "nvml"),
    ("units", "folder"),
    ("errors",),
    ("__init__",),  # the package itself: its version, and lazy names that are no imports
)
RANK = {part: rank for rank, row in enumerate(ROWS) for part in row}
TESTS_OF_THE_WHOLE = ("conftest.py",)  # may look anywhere, as tests may


def part_of(path: Path) -> str:
    """The row's name for a file: its folder in the package, or its own name."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks ask of a file."""

    imports: tuple[str, ...]  # with dots, those inside functions included, those for type checkers too
    peaks: tuple[str, ...]  # figures of 1e12 and more: a GPU's peak
    untyped: tuple[str, ...]  # public functions that leave an argument or the result untyped; Triton types its own


@functools.cache  # several checks ask, and to take all files apart costs seconds
def facts(source: str) -> Facts:
    imports: list[str] = []
    peaks: list[str] = []
    untyped: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, float) and _is_peak(node.value):
            peaks.append(str(node.value))
        elif isinstance(node, ast.FunctionDef) and _is_untyped(node):
            untyped.append(node.name)
    return Facts(imports=tuple(imports), peaks=tuple(peaks), untyped=tuple(untyped))


def _is_peak(value: float) -> bool:
    return 1e12 <= value < 1e17 and value not in {10.0**power for power in range(12, 19)}  # powers of ten are units


def _is_untyped(node: ast.FunctionDef) -> bool:
    if node.name.startswith("_") or any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [arg for arg in every if arg.arg not in ("self", "cls")]
    return node.returns is None or any(arg.annotation is None for arg in named)


def facts_of_all() -> dict[str, Facts]:
    """By the file's path in the package."""
    return {str(path.relative_to(PACKAGE)): facts(path.read_text(encoding="utf-8")) for path in sources()}


def imported(source: str) -> Iterator[str]:
    """The parts of sublight that a file imports."""
    for name in facts(source).imports:
        package, _, rest = name.partition(".")
        if package == "sublight":
            part = rest.split(".")[0]
            yield part if part in RANK else "__init__"


def upward(part: str, source: str) -> list[str]:
    """The imports of a file that point up, or sideways to another part on its row."""
    return [name for name in imported(source) if name != part and RANK[name] <= RANK[part]]


def sources() -> list[Path]:
    tests = ("_test.py", *TESTS_OF_THE_WHOLE)
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.name.endswith(tests))


def test_imports_point_down() -> None:
    without = {part_of(path) for path in sources()} - RANK.keys()
    assert not without, "these have no row: add them to ROWS and to the design"
    wrong = {
        str(path.relative_to(PACKAGE)): upward(part_of(path), path.read_text(encoding="utf-8")) for path in sources()
    }
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("part", "source", "found"),
    [
        ("units", "from sublight import op", ["op"]),
        ("units", "def f():\n    from sublight.limits.run import run", ["limits"]),
        ("ops", "import sublight.limits.run", ["limits"]),  # the same row: sideways is not down
        ("limits", "from sublight import nvml, gpus\nfrom sublight.limits import run", []),
        ("op", "from sublight import __version__", []),
        ("gpus", "from sublight import nvml", ["nvml"]),
    ],
)
def test_the_checker_finds_wrong_imports(part: str, source: str, found: list[str]) -> None:
    assert upward(part, source) == found


def module_of(path: Path) -> str:
    """sublight.report.bench; a folder's __init__.py is the folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(source: str, known: Collection[str]) -> set[str]:
    """Of these modules, those that a file imports."""
    found = set()
    for name in facts(source).imports:
        while name and name not in known:
            name = name.rpartition(".")[0]
        found |= {name} - {"", "sublight"}
    return found


def cycles(imports: Mapping[str, Collection[str]]) -> set[frozenset[str]]:
    """Modules that import one another, however far round.

    >>> [sorted(each) for each in cycles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})]
    [['a', 'b', 'c']]
    """
    reached: dict[str, set[str]] = {}
    for name in imports:
        seen: set[str] = set()
        ahead = list(imports[name])
        while ahead:
            each = ahead.pop()
            if each not in seen:
                seen.add(each)
                ahead += imports.get(each, ())
        reached[name] = seen
    return {
        frozenset({name, *(each for each in reached[name] if name in reached.get(each, ()))})
        for name in imports
        if any(name in reached.get(each, ()) for each in reached[name] - {name})
    }


def test_no_module_imports_one_that_imports_it() -> None:
    files = {module_of(path): path for path in sources()}
    found = cycles(
        {name: modules_imported(path.read_text(encoding="utf-8"), files) - {name} for name, path in files.items()}
    )
    assert not found


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ({"a": ["b"], "b": [], "c": ["a", "b"]}, set()),
        ({"a": ["b"], "b": ["a"], "c": ["a"]}, {frozenset("ab")}),
        ({"a": ["b"], "b": ["c"], "c": ["d"], "d": ["b"], "e": ["f"], "f": ["e"]}, {frozenset("bcd"), frozenset("ef")}),
    ],
)
def test_the_checker_finds_cycles(imports: dict[str, list[str]], found: set[frozenset[str]]) -> None:
    assert cycles(imports) == found


def defining(folder: str, record: str) -> set[str]:
    """The names assigned from a call of `record` at the top of the folder's files."""
    names = set()
    for path in (PACKAGE / folder).rglob("*.py"):
        if path.name.endswith("_test.py"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == record:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def listed(folder: str, name: str) -> set[str]:
    for node in ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                return {element.id for element in node.value.elts if isinstance(element, ast.Name)}
    raise AssertionError(f"{folder}/__init__.py has no tuple {name}")


@pytest.mark.parametrize(
    ("folder", "record", "name"),
    [
        ("ops", "Op", "OPS"),
        ("limits", "Probe", "LIMITS"),
        ("diagnose/rules", "Rule", "RULES"),
        ("fix/patch/rules", "Rule", "RULES"),
        ("fix/cure", "Cure", "CURES"),
        ("learn/exercises", "Exercise", "EXERCISES"),
        ("extensions", "Ladder", "LADDERS"),
        ("extensions/demos", "Demo", "DEMOS"),
    ],
)
def test_every_record_is_listed(folder: str, record: str, name: str) -> None:
    found = defining(folder, record)
    assert found, f"no {record} is defined in {folder}"
    assert found == listed(folder, name)


def test_every_op_is_named_after_its_file() -> None:
    """`sublight.softmax` finds the op by its file, without importing torch to ask."""
    import sublight
    from sublight import ops

    assert {op.name for op in ops.OPS} == {name for name in dir(sublight) if sublight._is_op(name)}
    assert all(getattr(sublight, op.name) is op.call for op in ops.OPS)


def test_peaks_live_in_the_table_alone() -> None:
    made_up = {"report/fakes.py", "diagnose/fakes.py"}  # machines that are made up have made-up peaks
    assert {file for file, each in facts_of_all().items() if each.peaks} == made_up


def test_no_decorator_loads_torch_compile() -> None:
    """`@torch.compiler.disable` and its like import torch._dynamo, a second or more of every process's first call:
    `private.disable_dynamo` and `constant_when_compiled` (`backend/state.py`) do not."""
    loads = re.compile(r"^\s*@torch\.(?:compiler|_dynamo)\.", re.MULTILINE)
    assert loads.search("    @torch.compiler.disable\n") and not loads.search("@private.disable_dynamo\n")
    assert not [path.name for path in sources() if loads.search(path.read_text(encoding="utf-8"))]


def test_the_checker_finds_a_peak() -> None:
    assert facts("PEAK = 989.4e12\nTERA = 1e12").peaks == ("989400000000000.0",)


def test_public_signatures_are_typed() -> None:
    assert {file: each.untyped for file, each in facts_of_all().items() if each.untyped} == {}


def test_the_checker_finds_an_untyped_function() -> None:
    source = "def f(x: int): ...\ndef g(x) -> int: ...\ndef h(x: int) -> int: ...\n@triton.jit\ndef k(x): ..."
    assert facts(source).untyped == ("f", "g")


LEFT_OUT = re.compile(r"(_test|conftest|fakes?|trials)$")  # a wheel does not hold modules with these endings
ON_THEIR_OWN = {  # modules that no other module imports, and what they are for
    "__main__": "python -m sublight",
    "extensions/transformer/step": "docs/cuda.md: a GPT-2 step to call",
    "fix/attention/paged_cache": "docs/attention.md: a cache for Hugging Face's generate()",
    "fix/prune": "examples/lottery_ticket.py",
    "learn/grade/interpret": "a process of its own, by its file",
    "learn/grade/launch": "a process of its own, by its file",
    "ops/attention/features": "prints a table of docs/attention.md",
    "predict/fit_low_bits": "benchmarks/predict_fit.py",
    "pyprof/child/sitecustomize": "Python imports it by its name",
    "report/draw/shares": "examples/lottery_ticket.py",
    "report/ladders": "make docs",
    "report/pictures": "make docs",
    "xray/amd": "make check-compile-amd",
}


def test_wheels_hold_no_tests_and_no_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **words: given.update(words))
    runpy.run_path(str(PACKAGE.parent / "setup.py"))
    command = given["cmdclass"]["build_py"](setuptools.Distribution({"script_name": "setup.py"}))
    held = {name for _, name, _ in command.find_package_modules("sublight.trace.read", str(PACKAGE / "trace" / "read"))}
    assert "chrome" in held and not [name for name in held if LEFT_OUT.search(name)]


def left_out_modules(source: str) -> list[str]:
    """The modules that a file imports and a wheel does not hold."""
    names = [module for name in facts(source).imports for module in (name.rpartition(".")[0], name)]
    modules = [name for name in names if (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()]
    return [name for name in modules if LEFT_OUT.search(name)]


def test_nothing_that_is_installed_needs_what_is_left_out() -> None:
    installed = [path for path in sources() if not LEFT_OUT.search(path.stem)]
    wrong = {str(path): left_out_modules(path.read_text(encoding="utf-8")) for path in installed}
    assert {file: names for file, names in wrong.items() if names} == {}


def imported_by_none(sources_of: Mapping[str, str]) -> set[str]:
    """The modules (path without .py -> source) that no other one imports, or names in a text to start it by."""
    used: set[str] = set()
    for path, source in sources_of.items():
        imports = facts(source).imports
        names = {*imports, *(name.rpartition(".")[0] for name in imports), *re.findall(r"sublight(?:\.\w+)+", source)}
        used |= {name.removeprefix("sublight.").replace(".", "/") for name in names} - {path}
    return sources_of.keys() - used


def test_every_module_is_imported_or_has_a_reason_to_stand_alone() -> None:
    """Else only tests use it, and it belongs out of wheels; or nobody does, and it goes."""
    installed = {
        str(path.relative_to(PACKAGE).with_suffix("")): path.read_text(encoding="utf-8")
        for path in sources()
        if path.name != "__init__.py" and not LEFT_OUT.search(path.stem) and "exercises" not in path.parts
    }
    packages = {str(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("__init__.py")}
    alone = imported_by_none({**packages, **installed}) & installed.keys()
    assert alone == ON_THEIR_OWN.keys()


def test_the_checker_finds_a_module_that_nobody_imports() -> None:
    of_two = {"a": "from sublight.b import f", "b": "def f(): ...", "c": "import sublight.c", "d": "run('sublight.e')"}
    assert imported_by_none({**of_two, "e": ""}) == {"a", "c", "d"}


def test_the_checker_finds_what_is_left_out() -> None:
    source = "from sublight.report import fakes, bench\nfrom sublight.diagnose.fakes import trace\nimport sublight.op"
    assert left_out_modules(source) == ["sublight.report.fakes", "sublight.diagnose.fakes"]
