"""Kernels of a user's Python file: importing it runs it, then its JIT functions are there to be compiled."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from sublight.backend import private
from sublight.backend.record import OPTIONS, Launch, no_interpreter
from sublight.errors import BadInput, nearest
from sublight.gpus import find as find_gpu
from sublight.xray.inputs.signature import Typed, parse_constants, parse_signature, parse_type, parse_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A kernel of a file, and what its decorators say of its constants."""

    name: str
    jit: Any
    constants: Mapping[str, Any] = field(default_factory=dict)  # of the first configuration that autotune would try
    options: Mapping[str, Any] = field(default_factory=dict)
    heuristics: Mapping[str, Any] = field(default_factory=dict)  # name -> function of the arguments


def launches_in(
    file: Path, kernel: str, signature: str, constants: Sequence[str], numbers: Mapping[str, int | float]
) -> list[Launch]:
    """What is to be compiled of that file: the kernel named, or every one whose arguments are known."""
    module = imported(file)
    kernels = kernels_in(module, file)
    if not kernels:
        raise BadInput(f"{file} defines no kernel: decorate one with @triton.jit, or name the file that does")
    if kernel:
        if kernel not in kernels:
            raise BadInput(f"{file} has no kernel {kernel!r}: it has {nearest(kernel, list(kernels))}")
        return [specialised(kernels[kernel], signature, constants, numbers, module, file)]
    wanted = _not_called_by_another(kernels)
    if len(wanted) == 1:
        return [specialised(wanted[0], signature, constants, numbers, module, file)]
    launches, complaints = [], []
    for each in wanted:
        try:
            launches.append(specialised(each, signature, constants, numbers, module, file))
        except BadInput as error:
            complaints.append(str(error))
    if not launches:
        names = ", ".join(each.name for each in wanted)
        raise BadInput(f"{file.name} has {len(wanted)} kernels, name one of {names}; {complaints[0]}")
    return launches


def imported(file: Path) -> ModuleType:
    """The user's file, run as an import runs it."""
    no_interpreter()
    file = file.resolve()
    root, name = file.parent, file.stem
    while (root / "__init__.py").is_file():  # a file of a package may import its neighbours by a dot
        root, name = root.parent, f"{root.name}.{name}"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))  # and it stays: what the file imports later lies beside it, too
    with _guarded(file):
        if "." in name:
            found = importlib.import_module(name)
            if _is_of(found, file):
                return found
            name = file.stem  # a package of that name is installed, too, and comes first
        here = sys.modules.get(name)
        if here is not None and _is_of(here, file):
            return here
        name = name if here is None else f"{name}_of_xray"  # a user's code.py must not take the place of Python's
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _is_of(module: ModuleType, file: Path) -> bool:
    own = getattr(module, "__file__", None)
    return own is not None and Path(own).resolve() == file


def kernels_in(module: ModuleType, file: Path) -> dict[str, Found]:
    """The kernels that a file itself defines, by name, in its order; imported ones are left out."""
    found = {}
    for value in vars(module).values():
        kernel = unwrapped(value)
        if kernel is not None and Path(kernel.jit.fn.__code__.co_filename).resolve() == file.resolve():
            found[kernel.name] = kernel
    return dict(sorted(found.items(), key=lambda item: item[1].jit.fn.__code__.co_firstlineno))


def unwrapped(value: Any) -> Found | None:
    """The JIT function under @triton.autotune and @triton.heuristics; None where there is none."""
    JITFunction = private.JITFunction

    constants: dict[str, Any] = {}
    options: dict[str, Any] = {}
    heuristics: dict[str, Any] = {}
    for _ in range(8):  # decorators over one another
        if isinstance(value, JITFunction):
            return Found(name=value.__name__, jit=value, constants=constants, options=options, heuristics=heuristics)
        if configs := getattr(value, "configs", None):
            first = configs[0].all_kwargs()
            constants |= {name: each for name, each in first.items() if name not in OPTIONS}
            options |= {name: each for name, each in first.items() if name in OPTIONS and each is not None}
        if isinstance(values := getattr(value, "values", None), dict):
            heuristics |= values
        value = getattr(value, "fn", None)
    return None


def specialised(
    found: Found,
    signature: str,
    constants: Sequence[str],
    numbers: Mapping[str, int | float],
    module: ModuleType,
    file: Path,
) -> Launch:
    """The launch that the user describes; what is missing is named, with an example for this very kernel."""
    jit = found.jit
    names = [parameter.name for parameter in jit.params]
    given = parse_constants(constants, vars(module))
    if unknown := [name for name in given if name not in names and name not in OPTIONS]:
        known = [*(parameter.name for parameter in jit.params if parameter.is_constexpr), *OPTIONS]
        raise BadInput(f"--const {unknown[0]}: {found.name} has no such constant: it has {', '.join(known)}")
    typed = parse_signature(signature, names)
    for name, kind in typed.items():
        if isinstance(kind, str):
            value = parse_value(kind, vars(module))
            if isinstance(value, str) and not jit.params[names.index(name)].is_constexpr:
                parse_type(kind)  # a misspelt type, not a constant: says so
            given.setdefault(name, value)
        elif kind.is_one:
            given.setdefault(name, 1)  # written so
    types = {name: kind for name, kind in typed.items() if isinstance(kind, Typed)}
    by_name = {
        names[int(name)] if name.isdecimal() and int(name) < len(names) else name: numbers[name] for name in numbers
    }
    return launch_as_given(found, types, given, where=file.name, numbers=by_name)


def launch_as_given(
    found: Found,
    types: Mapping[str, Typed],
    given: Mapping[str, Any],
    *,
    where: str,
    numbers: Mapping[str, int | float] | None = None,
) -> Launch:
    """From types and constants by name, what the decorators say, annotations and defaults, in this order.

    A number that is known is specialised on, as a launch would: on 1, and on being a multiple of 16.
    """
    numbers = numbers or {}
    options = {**found.options, **{name: value for name, value in given.items() if name in OPTIONS}}
    signature: dict[str, str] = {}
    aligned: list[str] = []
    constants: dict[str, Any] = {}
    missing: list[Any] = []
    for parameter in found.jit.params:
        name = parameter.name
        if name in given and name in OPTIONS:
            continue
        if name in given:
            constants[name] = given[name]
        elif name in types and not parameter.is_constexpr:
            kind = types[name].known_as(numbers[name], name) if name in numbers else types[name]
            if kind.is_one and not parameter.do_not_specialize:
                constants[name] = 1
                continue
            signature[name] = kind.kind
            if kind.is_aligned and not (parameter.do_not_specialize_on_alignment or parameter.do_not_specialize):
                aligned.append(name)
        elif name in found.constants:
            constants[name] = found.constants[name]
        elif parameter.is_constexpr and name in options:
            continue
        elif not parameter.is_constexpr and parameter.annotation_type:
            signature[name] = parameter.annotation_type
            kind = Typed(kind=parameter.annotation_type)
            if (kind.known_as(numbers[name], name) if name in numbers else kind).is_aligned:
                aligned.append(name)
        elif parameter.is_constexpr and parameter.has_default:
            constants[name] = parameter.default
        else:
            missing.append(parameter)
    for parameter in [each for each in missing if each.name in found.heuristics]:
        with contextlib.suppress(Exception):  # it may want an argument's value, which only a launch has
            constants[parameter.name] = found.heuristics[parameter.name]({**constants, **options})
            missing.remove(parameter)
    if missing:
        raise BadInput(_what_is_missing(found, missing, types, where))
    return Launch(
        kernel=found.name,
        jit=found.jit,
        signature=signature,
        constants=constants,
        aligned=tuple(aligned),
        options=options,
    )


def _what_is_missing(found: Found, missing: list[Any], types: Mapping[str, Typed], where: str) -> str:
    untyped = [each.name for each in missing if not each.is_constexpr]
    unset = [each.name for each in missing if each.is_constexpr]
    needs = [f"a type for {', '.join(untyped)}"] * bool(untyped) + [f"a value for {', '.join(unset)}"] * bool(unset)
    kinds = {name: kind.kind for name, kind in types.items()} | {name: guessed_type(name) for name in untyped}
    ordered = [each.name for each in found.jit.params if each.name in kinds]
    example = [f"--sig '{', '.join(f'{name}:{kinds[name]}' for name in ordered)}'"] * bool(untyped)
    example += [f"--const {name}={guessed_value(name)}" for name in unset]
    recorded = (
        "" if types else f"sublight xray --record SCRIPT.py takes them from a script that calls {found.name}, or "
    )
    return f"{found.name} in {where} needs {' and '.join(needs)}: {recorded}add {' '.join(example)}"


def guessed_type(name: str) -> str:
    """What an argument of that name most likely is, for an example.

    >>> guessed_type("x_ptr"), guessed_type("n_elements"), guessed_type("stride_xm"), guessed_type("eps")
    ('*bf16', 'i32', 'i32', 'fp32')
    """
    word = name.lower()
    if word.endswith(("ptr", "pointer", "_p")) or word in (
        "a",
        "b",
        "c",
        "q",
        "k",
        "v",
        "o",
        "w",
        "x",
        "y",
        "z",
        "bias",
    ):
        return "*bf16"
    if word in ("eps", "scale", "alpha", "beta", "lr", "p", "sm_scale") or word.endswith(("_scale", "_eps")):
        return "fp32"
    if word.startswith(("x", "y", "out", "in_", "input", "output", "d_", "weight", "grad")) and "stride" not in word:
        return "*bf16"
    return "i32"


def guessed_value(name: str) -> Any:
    """
    >>> guessed_value("BLOCK"), guessed_value("BLOCK_M"), guessed_value("HAS_BIAS"), guessed_value("EPS")
    (1024, 64, True, 1e-06)
    """
    word = name.upper()
    if word.startswith(("IS_", "HAS_", "USE_", "WITH_", "DO_")) or word in ("CAUSAL", "PACKED", "INTERPRET"):
        return True
    if "EPS" in word:
        return 1e-6
    if "BLOCK" in word or "TILE" in word:
        return 64 if word.endswith(("_M", "_N", "_K", "_D")) else 1024
    return 64 if "DIM" in word or "SIZE" in word else 1


def _not_called_by_another(found: Mapping[str, Found]) -> list[Found]:
    """A JIT function that another kernel of the file calls is a part of it."""
    called = {name for each in found.values() for name in each.jit.fn.__code__.co_names if name != each.name}
    return [each for each in found.values() if each.name not in called] or list(found.values())


@contextlib.contextmanager
def _guarded(file: Path) -> Iterator[None]:
    """A failure is told at its line. Without a GPU nothing is launched: some files do that while they are imported."""
    launches: list[Launch] = []
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # stdout is the report's
            if _names_torch(file) and not _has_gpu():
                from sublight.xray.inputs.pretended import gpu_pretended

                stack.enter_context(gpu_pretended(find_gpu("h100"), launches))
            yield
    except SyntaxError as error:
        raise BadInput(f"{place_of(error, file)}: {file.name} does not import: {error.msg}") from error
    except (Exception, SystemExit) as error:
        hint = f"; it had launched {launches[0].kernel}: try --record" if launches else ""
        raise BadInput(f"{place_of(error, file)}: {file.name} does not import: {message_of(error)}{hint}") from error


def _names_torch(file: Path) -> bool:
    """Loading torch takes longer than all the rest, and a file of kernels alone does without."""
    return "torch" in sys.modules or b"torch" in file.read_bytes()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def place_of(error: BaseException, file: Path) -> str:
    """The last line of the user's file that was running, or the line that is no Python.

    >>> place_of(SyntaxError("never closed", ("a.py", 2, 1, "(")), Path("b.py"))
    'a.py:2'
    >>> place_of(SyntaxError("source code string cannot contain null bytes"), Path("b.py"))
    'b.py'
    """
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename or file}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == file.resolve()
    ]
    return f"{file}:{lines[-1]}" if lines else str(file)


def message_of(error: BaseException) -> str:
    """
    >>> message_of(KeyError("x")), message_of(SystemExit(2))
    ("KeyError: 'x'", 'it exits with 2')
    """
    if isinstance(error, SystemExit):
        return f"it exits with {error.code}"
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
