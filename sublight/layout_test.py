"""Imports point down the design's list, and what a folder holds is listed in its tuple."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Collection, Iterator, Mapping
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
    ("timing", "correct", "backend", "sampling"),
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


def imported(source: str) -> Iterator[str]:
    """The parts of sublight that a file imports, those inside functions included, those for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
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


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in RANK, f"{part} has no row: add it to ROWS and to the design"
    assert upward(part, path.read_text(encoding="utf-8")) == []


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
    """Of these modules, those that a file imports, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
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


def peaks(source: str) -> list[str]:
    """Figures of 1e12 and more: a GPU's peak written where it does not belong."""
    numbers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [str(node.value) for node in numbers if isinstance(node.value, float) and _is_peak(node.value)]


def _is_peak(value: float) -> bool:
    return 1e12 <= value < 1e17 and value not in {10.0**power for power in range(12, 19)}  # powers of ten are units


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_peaks_live_in_the_table_alone(path: Path) -> None:
    if path.name == "fakes.py" and path.parent.name in ("report", "diagnose"):
        assert peaks(path.read_text(encoding="utf-8"))  # made-up machines have made-up peaks
    else:
        assert peaks(path.read_text(encoding="utf-8")) == []


def test_the_checker_finds_a_peak() -> None:
    assert peaks("PEAK = 989.4e12\nTERA = 1e12") == ["989400000000000.0"]


def _is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def untyped(source: str) -> list[str]:
    """Public functions that leave an argument or the result untyped; Triton types its own."""
    bad = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not _is_kernel(node):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [arg for arg in every if arg.arg not in ("self", "cls")]
            if node.returns is None or any(arg.annotation is None for arg in named):
                bad.append(node.name)
    return bad


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_signatures_are_typed(path: Path) -> None:
    assert untyped(path.read_text(encoding="utf-8")) == []


def test_the_checker_finds_an_untyped_function() -> None:
    assert untyped(
        "def f(x: int): ...\ndef g(x) -> int: ...\ndef h(x: int) -> int: ...\n@triton.jit\ndef k(x): ..."
    ) == ["f", "g"]


LEFT_OUT = re.compile(r"(_test|conftest|fakes?)$")  # of a wheel


def test_wheels_hold_no_tests_and_no_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **words: given.update(words))
    runpy.run_path(str(PACKAGE.parent / "setup.py"))
    command = given["cmdclass"]["build_py"](setuptools.Distribution({"script_name": "setup.py"}))
    held = {name for _, name, _ in command.find_package_modules("sublight.trace.read", str(PACKAGE / "trace" / "read"))}
    assert "chrome" in held and not [name for name in held if LEFT_OUT.search(name)]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_is_installed_needs_what_is_left_out(path: Path) -> None:
    if not LEFT_OUT.search(path.stem):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        modules = [name for name in names if (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()]
        assert [name for name in modules if LEFT_OUT.search(name)] == []
