"""A kernel that ran, made ready for another process: its code, that of the helpers it calls, the globals they use."""

from __future__ import annotations

import ast
import inspect
import io
import marshal
import pickle
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sublight.backend import private

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_OF_SCRIPT = ("__main__", "<run_path>")  # no process but the script's own has these modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One specialisation of a kernel; pickles into bytes, and names no class of the script's."""

    kernel: str
    functions: bytes  # see _Pickler
    signature: Mapping[str, str | tuple[str, ...]]
    constants: bytes
    options: Mapping[str, Any]
    path: tuple[str, ...] = ()  # where the script finds the modules that its kernels name


@dataclass(slots=True)
class _Functions:
    """The jit functions that a kernel needs, itself first, each with its code and its globals."""

    known: dict[int, int] = field(default_factory=dict)
    queue: list[Any] = field(default_factory=list)

    def number(self, jit: Any) -> int:
        if id(jit) not in self.known:
            self.known[id(jit)] = len(self.queue)
            self.queue.append(jit)
        return self.known[id(jit)]


class _Pickler(pickle.Pickler):
    """Jit functions go by number and modules by name; functions and classes of a script cannot go."""

    def __init__(self, file: Any, functions: _Functions) -> None:
        super().__init__(file)
        self.functions = functions

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return ("module", obj.__name__)
        if isinstance(obj, types.FunctionType) and hasattr(obj, "stands_for"):  # libdevice's, by numpy here
            return ("library", *obj.stands_for)
        if type(obj).__name__ in ("InterpretedFunction", "JITFunction", "ConstexprFunction"):
            if obj.fn.__module__.startswith("triton."):
                return ("library", obj.fn.__module__, obj.fn.__qualname__)
            return ("function", self.functions.number(obj))
        if isinstance(obj, types.FunctionType | type) and getattr(obj, "__module__", None) in _OF_SCRIPT:
            raise pickle.PicklingError(f"{obj.__qualname__} is the script's own")
        if hasattr(obj, "data_ptr"):
            raise pickle.PicklingError("no kernel reads a tensor by its name")
        return None


def describe(jit: Any, bound: dict[str, Any], options: dict[str, Any]) -> tuple[str, Job] | None:
    """A key for this specialisation, and the job; None for arguments that cannot be told to a compiler from here."""
    mangle_type = private.mangle_type

    parameters = inspect.signature(jit.fn).parameters
    signature: dict[str, str | tuple[str, ...]] = {}
    constants: dict[str, Any] = {}
    for name, value in bound.items():
        is_constant = "constexpr" in str(parameters[name].annotation) or value is None
        if is_constant or (type(value) is int and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, tuple):
            if not all(hasattr(part, "data_ptr") for part in value):  # the rest may be constants, by Triton's own rules
                return None
            signature[name] = tuple(map(mangle_type, value))
        else:
            signature[name] = mangle_type(value)
    used = {name: value for name, value in options.items() if name in _OPTIONS}
    functions = _Functions()
    try:
        sources = _sources_of(jit, functions)
        frozen = _frozen(constants, functions)
    except Exception:  # a global or constant that cannot be sent
        return None
    job = Job(
        kernel=jit.__name__,
        functions=sources,
        signature=signature,
        constants=frozen,
        options=used,
        path=tuple(sys.path),
    )
    return f"{jit.__name__} {id(jit)} {signature} {constants} {used}", job


def _frozen(value: Any, functions: _Functions) -> bytes:
    file = io.BytesIO()
    _Pickler(file, functions).dump(value)
    return file.getvalue()


def _sources_of(jit: Any, functions: _Functions) -> bytes:
    """The code and the globals of the kernel and of all it calls."""
    functions.number(jit)
    sources = []
    for current in functions.queue:  # grows as globals name further functions
        fn = current.fn
        names = {*_names(fn.__code__), *_names_in_signature(inspect.getsource(fn))}
        scope = {name: _sent(value, functions) for name, value in fn.__globals__.items() if name in names}
        cells = [_sent(cell.cell_contents, functions) for cell in fn.__closure__ or ()]
        sources.append(
            {
                "kind": type(current).__name__,
                "code": marshal.dumps(fn.__code__),
                "name": fn.__name__,
                "qualname": fn.__qualname__,
                "module": fn.__module__,
                "globals": scope,
                "closure": cells,
                "defaults": _sent(fn.__defaults__, functions),
                "kwdefaults": _sent(fn.__kwdefaults__, functions),
                "annotations": {name: _annotation(value) for name, value in fn.__annotations__.items()},
                "noinline": bool(getattr(current, "kwargs", {}).get("noinline")),
            }
        )
    return pickle.dumps(sources)


def _sent(value: Any, functions: _Functions) -> bytes | None:
    try:
        return _frozen(value, functions)
    except Exception:
        return None  # the compiler will miss it by name if it needs it


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else "constexpr" if "constexpr" in str(value) else ""


def _names_in_signature(source: str) -> Iterator[str]:
    """The compiler reads the source, and in it annotations and defaults, which the code does not name.

    >>> sorted(_names_in_signature("@f(c())\\ndef k(x, B: tl.constexpr = MEAN) -> Out:\\n    y: mine.kind = x + B"))
    ['MEAN', 'Out', 'mine', 'tl']
    """
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        read = [getattr(node, "returns", None) or getattr(node, "annotation", None)]
        if isinstance(node, ast.arguments):
            read += [*node.defaults, *node.kw_defaults]
        for each in filter(None, read):
            yield from (part.id for part in ast.walk(each) if isinstance(part, ast.Name))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
