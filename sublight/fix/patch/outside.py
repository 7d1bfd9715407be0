"""What the code behind a forward reads from outside of its arguments and its module: globals, closures, imports.

A trial shows what a forward does today. What it would do under another setting, another global or at another length
shows in its code alone: every function that it can reach is read, and what none of them may touch ends the proof.
What they may read is noted, with the code itself, and compared at every call. Code of PyTorch is trusted, but for the
functions that ask for its settings.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import itertools
import logging
import operator
import reprlib
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sublight.fix.patch import held
from sublight.fix.patch.names import ACTS, ASKING, KNOWN, OF_TENSORS, OF_WHOLE_NUMBERS, SETTINGS, SIZES

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
TRUSTED = ("torch", "math", "cmath", "typing", "typing_extensions", "numbers", "operator", "builtins", "functools")
STAND_INS = "sublight.fix.patch.twin"  # for a module's children
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
GENERATORS = (collections.__file__, dataclasses.__file__, reprlib.__file__)
GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
CLOSURES = ("LOAD_DEREF", "LOAD_CLASSDEREF")
STORES = {
    "STORE_GLOBAL": "writes to a global variable",
    "DELETE_GLOBAL": "writes to a global variable",
    "STORE_ATTR": "sets an attribute",
    "DELETE_ATTR": "deletes an attribute",
}
MISSING = object()
OP_KINDS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
PYTORCHS_OPS = ("aten", "prims")
BY_TEXT = (operator.attrgetter, operator.methodcaller)  # which follow names in a text
Space = Mapping[str, Any]  # of a module, or of a class


@dataclass(slots=True)
class Outside:
    """What the functions behind a forward read."""

    oddity: str = ""  # the first thing that a proof does not cover; empty: nothing
    globals: dict[tuple[int, str], tuple[Space, str, Any]] = field(default_factory=dict)  # plain, as they are now
    bound: dict[tuple[int, str], tuple[Space, str, Any]] = field(default_factory=dict)  # functions, modules, objects
    names: set[str] = field(default_factory=set)  # of class attributes and methods, and of those asked for by name
    in_code: set[str] = field(default_factory=set)  # all names in the code
    functions: dict[types.FunctionType, tuple[Any, ...]] = field(default_factory=dict)  # that were read: `parts`

    def note(self, oddity: str) -> None:
        self.oddity = self.oddity or oddity


Globals = tuple[tuple[Space, str, Any], ...]
Functions = tuple[tuple[types.FunctionType, tuple[Any, ...]], ...]


def changed(globals_: Globals, bound: Globals, functions: Functions) -> str:
    """What is another thing now than when it was read; empty where nothing is. A graph is guarded by its compiler."""
    for space, name, value in globals_:
        if space.get(name, MISSING) is not value:
            return f"the global {name}"
    if not torch.compiler.is_dynamo_compiling():
        for space, name, value in bound:
            if space.get(name, MISSING) is not value:
                return f"the global {name}"
        for function, was in functions:
            if parts(function) != was:
                return f"the code of {function.__name__}"
    return ""


def of_module(module: torch.nn.Module, trusted: tuple[str, ...] = ()) -> Outside:
    """Of a module's forward, its class's methods and what it holds; children are read by themselves.

    `trusted`: packages whose code is not read, beside PyTorch.
    """
    found, kind = Outside(), type(module)
    if not _is_trusted(kind.__module__, trusted):
        reader = _Reader(found, kind, trusted)
        reader.judge(kind.forward, "forward")
        for name in ("__getattr__", "__getattribute__"):
            if isinstance(found_in := getattr(kind, name, None), types.FunctionType):
                reader.judge(found_in, name)
        for name, value in vars(module).items():
            if name in found.in_code and callable(value) and not isinstance(value, torch.nn.Module):
                reader.judge(value, name)
        found.note(held.unfollowed(module, found.in_code, trusted))
        hidden = {name for name in found.in_code if name in vars(module) and hasattr(kind, name)}
        if hidden and {"__class__", "type"} & found.in_code:
            found.note(f"may read {min(hidden)} of its class, which the module hides")
        if not trusted:  # whose results have attributes of their own
            found.note(_not_its_own(reader.attributes, module, found.in_code))
    return found


def of_function(function: Any) -> Outside:
    """Of a function that takes all it works on."""
    reader = _Reader(Outside(), object, ())
    reader.read(function)
    reader.found.note(_not_its_own(reader.attributes))
    return reader.found


def parts(function: types.FunctionType) -> tuple[Any, ...]:
    """What a reload replaces in a function that stays the same object."""
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _not_its_own(attributes: set[str], module: torch.nn.Module | None = None, names: Collection[str] = ()) -> str:
    """An attribute that somebody may have set on a tensor: no tensor has it, nor the module or what that holds."""
    unknown = attributes - KNOWN
    holders: list[Any] = [] if module is None else [module, *module.children(), *held.objects(module, names)]
    for each in holders:
        unknown -= set(dir(each))
    return f"reads {min(unknown)}, which is neither its own nor a tensor's" if unknown else ""


class _Reader:
    """The functions of one class."""

    def __init__(self, found: Outside, kind: type, trusted: tuple[str, ...]) -> None:
        self.found, self.kind, self.trusted = found, kind, trusted
        self.attributes: set[str] = set()  # that are read of something else than a global
        self._seen: set[Any] = set()

    def read(self, function: Any) -> None:
        function = getattr(function, "__func__", function)
        if isinstance(function, property):
            return self.read(function.fget)
        if isinstance(function, functools.partial | functools.partialmethod):
            for each in (*function.args, *function.keywords.values()):
                self.judge(each, "an argument of a partial")
            return self.read(function.func)
        if isinstance(function, staticmethod | classmethod):
            return self.read(function.__wrapped__)
        if not isinstance(function, types.FunctionType):
            return self.found.note(f"is a {type(function).__name__}, whose code cannot be read")
        if function in self._seen:
            return None
        self._seen.add(function)
        self.found.functions[function] = parts(function)
        if wrapped := getattr(function, "__wrapped__", None):
            self.read(wrapped)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.judge(default, "the default of an argument")
        for code in _codes(function.__code__):
            self._read_code(function, code)
        return None

    def _read_code(self, function: types.FunctionType, code: types.CodeType) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL")]
        taken = 0  # attributes up to here belong to a global, or to a variable that has what the module holds
        held_here = _held_here(steps, code)
        for at, step in enumerate(steps):
            if step.opname in GLOBALS + CLOSURES:
                taken = at + self._follow(function, step, steps[at + 1 :])
            elif step.opname.startswith("LOAD_FAST") and step.argval in held_here:
                taken = at + sum(
                    1 for _ in itertools.takewhile(lambda each: each.opname in ATTRIBUTES, steps[at + 1 :])
                )
            elif step.opname in ATTRIBUTES and at > taken:
                self.attributes.add(str(step.argval))
            elif step.opname == "MATCH_CLASS":
                self.found.note("takes an object apart by a pattern")
            elif step.opname == "IMPORT_NAME" and not self.trusts(step.argval):
                self.found.note(f"imports {step.argval}")
            elif step.opname in STORES and not (step.opname == "STORE_ATTR" and _is_on_self(steps[:at], step, code)):
                self.found.note(f"{STORES[step.opname]} ({step.argval})")
            elif step.opname == "STORE_DEREF" and step.argval in code.co_freevars and code is function.__code__:
                self.found.note(f"writes to a variable of a function around it ({step.argval})")
            elif step.opname == "FOR_ITER" and SIZES & set(code.co_names):
                self.found.note("has a loop, whose length may be its input's")
        asks_by_name = {"getattr", "hasattr"} & set(code.co_names)
        texts = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
        self.found.in_code |= {*code.co_names, *texts}
        for name in {*code.co_names, *texts}:  # getattr may have another name
            holders = [each for each in self.kind.__mro__ if name in vars(each)]
            own = [each for each in holders if not self.trusts(each.__module__)]
            if own or (asks_by_name and name in texts and not holders):
                self.found.names.add(name)
            for each in own:
                self.judge(vars(each)[name], name)
            for each in self.kind.__mro__ if own else ():  # what `super()` finds, and a property, no instance shows
                if not self.trusts(each.__module__):
                    self.found.bound[id(each), name] = (vars(each), name, vars(each).get(name, MISSING))

    def _follow(self, function: types.FunctionType, step: dis.Instruction, later: list[dis.Instruction]) -> int:
        """A global or closure variable; how many attributes are taken of it at once: `torch.nn.functional.gelu`, 3."""
        name, taken = str(step.argval), 0
        space = function.__globals__
        value = _closed(function, name) if step.opname in CLOSURES else space.get(name, MISSING)
        if value is MISSING and step.opname in GLOBALS:
            builtins = space.get("__builtins__", {})
            value = getattr(builtins, name, MISSING) if isinstance(builtins, types.ModuleType) else builtins.get(name)
            space = {}
        if value is MISSING:
            return 0  # a local of an outer function, or a name that is not there yet
        if step.opname in GLOBALS:
            self._bind(space, name, value)
        if value is getattr or value is hasattr:
            self._by_name(function, later)
        for following in later:
            if following.opname not in ATTRIBUTES or not isinstance(value, types.ModuleType | type):
                break
            taken += 1
            if _is_asking(following.argval) and self.trusts(getattr(value, "__module__", value.__name__)):
                self.found.note(f"asks for a setting of PyTorch ({following.argval})")
                return taken
            if isinstance(value, type) and not self.trusts(value.__module__) and value not in self.kind.__mro__:
                is_function = issubclass(value, torch.autograd.Function)
                what = f"has a backward pass of its own ({value.__name__})" if is_function else ""
                self.found.note(what or f"reads {value.__name__}.{following.argval}")
                return taken
            space = vars(value) if isinstance(value, types.ModuleType) else {}
            name, value = str(following.argval), getattr(value, following.argval, MISSING)
            self._bind(space, name, value)
        is_theirs = isinstance(value, types.FunctionType) and not self.trusts(value)
        if is_theirs and later[taken : taken + 1] and later[taken].opname in ATTRIBUTES:
            self.found.note(f"reads an attribute of a function ({name}.{later[taken].argval})")
        if isinstance(value, PLAIN) and step.opname in CLOSURES and not taken:
            self.found.note(f"reads a variable of a function around it ({name})")
        if (isinstance(value, PLAIN) or is_theirs) and step.opname in GLOBALS and type(space) is dict and space:
            self.found.globals[id(space), name] = (space, name, value)
        self.judge(value, name)
        return taken

    def _bind(self, space: Space, name: str, value: Any) -> None:
        if space and not isinstance(value, PLAIN):
            self.found.bound[id(space), name] = (space, name, value)

    def _by_name(self, function: types.FunctionType, later: list[dis.Instruction]) -> None:
        """getattr(x, "name"): of the module itself it is compared; of anything else it is an attribute like others."""
        whose, name = (*later[:2], None, None)[:2]
        methods = (getattr(value, "__func__", value) for kind in self.kind.__mro__ for value in vars(kind).values())
        own = function.__code__.co_varnames[0] if any(each is function for each in methods) else ""
        if name is None or name.opname != "LOAD_CONST":
            self.found.note("asks for attributes whose names are not written in it")
        elif whose is not None and whose.argval != own:
            self.attributes.add(str(name.argval))

    def judge(self, value: Any, name: str) -> None:
        """Whether code may reach it; functions are read in turn."""
        where = getattr(value, "__module__", "") or ""
        if isinstance(value, (*PLAIN, logging.Logger)) or value is MISSING:
            return
        if isinstance(value, tuple) and all(isinstance(each, (*PLAIN, type)) for each in value):
            return
        if isinstance(value, types.ModuleType):
            if not self.trusts(value.__name__):
                self.found.note(f"uses the module {value.__name__}")
        elif (name in ACTS and where == "builtins") or (name in OF_WHOLE_NUMBERS and where == "math"):
            self.found.note(f"calls {name}")
        elif _is_asking(name) and self.trusts(where):
            self.found.note(f"asks for a setting of PyTorch ({name})")
        elif isinstance(value, BY_TEXT) or any(value is each for each in BY_TEXT):
            self.found.note("asks for attributes whose names are not written in it")
        elif isinstance(value, type):
            is_base = value in self.kind.__mro__  # what `super()` needs
            if not (is_base or self.trusts(value.__module__) or issubclass(value, BaseException) or _is_record(value)):
                self.found.note(f"uses the class {value.__name__}")
        elif isinstance(value, torch.jit.ScriptFunction):
            self.found.note(f"calls {name}, whose code TorchScript has compiled")
        elif isinstance(value, OP_KINDS) and str(value).partition(".")[0] not in PYTORCHS_OPS:
            self.found.note(f"calls {value}, which is no op of PyTorch's")
        elif isinstance(value, types.BuiltinMethodType) and not isinstance(
            value.__self__, types.ModuleType | type | None
        ):
            self.found.note(f"calls a method of another object ({name})")
        elif isinstance(value, torch.nn.Module):
            self.found.note(f"calls a module that is no child of its own ({name})")
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self.judge(each, name)
            for key, each in value.keywords.items():  # which somebody may change in it
                self.found.bound[id(value.keywords), key] = (value.keywords, key, each)
        elif (
            isinstance(value, types.MethodType)
            and not isinstance(value.__self__, type)
            and value.__func__ not in self._seen
        ):
            self.found.note(f"calls a method of another object ({name})")
        elif isinstance(value, types.FunctionType | types.MethodType | property | staticmethod | classmethod):
            if not self.trusts(value):
                self.read(value)
        elif not (callable(value) and self.trusts(where or type(value).__module__)):
            self.found.note(f"reads a variable from outside ({name})")

    def trusts(self, what: Any) -> bool:
        """A module by its name; a function by that and by where it was written: a decorator copies another's name."""
        function = getattr(what, "__func__", what)
        homes = [what] if isinstance(what, str) else [getattr(what, "__module__", "") or ""]
        if isinstance(function, types.FunctionType):
            homes.append(function.__globals__.get("__name__", ""))
        return all(_is_trusted(each, self.trusted) for each in homes)


def _is_record(kind: type) -> bool:
    """A dataclass or named tuple without a line of its author's: to make one runs nothing of theirs."""
    if type(kind) is not type or any(getattr(kind, name, ()) for name in ("__post_init__", "__getattr__")):
        return False
    for base in kind.__mro__[:-1]:
        if base is tuple:
            continue
        functions = [
            each.__func__ if isinstance(each, classmethod | staticmethod) else each for each in vars(base).values()
        ]
        theirs = [each for each in functions if isinstance(each, types.FunctionType) and not _is_generated(each)]
        is_made = dataclasses.is_dataclass(base) or (issubclass(base, tuple) and hasattr(base, "_fields"))
        if not is_made or theirs or any(isinstance(each, property) for each in functions):
            return False
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return all(each.default_factory in (dataclasses.MISSING, list, dict) for each in fields)


def _is_generated(function: types.FunctionType) -> bool:
    """Made by `dataclass` or `NamedTuple`: of a text, or of these modules' own code."""
    return function.__code__.co_filename in ("<string>", *GENERATORS)


def _held_here(steps: list[dis.Instruction], code: types.CodeType) -> set[str]:
    """Variables that the code sets once, to an attribute of the module: `config = self.config`."""
    stored = Counter(step.argval for step in steps if step.opname == "STORE_FAST")
    found = set()
    for whose, attribute, store in zip(steps, steps[1:], steps[2:], strict=False):
        is_own = whose.opname.startswith("LOAD_FAST") and code.co_varnames[:1] == (whose.argval,)
        if is_own and attribute.opname in ATTRIBUTES and store.opname == "STORE_FAST" and stored[store.argval] == 1:
            found.add(str(store.argval))
    return found - set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _is_on_self(before: list[dis.Instruction], store: dis.Instruction, code: types.CodeType) -> bool:
    """`self.x = …`, `self.x += …`: a trial sees that its module has changed."""
    target = before[-1:]
    if target and target[0].opname == "SWAP":  # x += 1 reads the attribute first, of a copy of what it is stored in
        reads = (at for at, step in enumerate(before) if step.opname in ATTRIBUTES and step.argval == store.argval)
        at = max((at for at in reads if before[at - 1].opname == "COPY"), default=1)
        target = before[at - 2 : at - 1]
    name = target[0].argval if target and target[0].opname.startswith("LOAD_FAST") else ""
    return code.co_varnames[:1] == ((name[-1] if isinstance(name, tuple) else name),)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _closed(function: types.FunctionType, name: str) -> Any:
    """What a closure variable holds; a class body's `__class__` is one."""
    free = function.__code__.co_freevars
    try:
        return function.__closure__[free.index(name)].cell_contents if function.__closure__ else MISSING
    except ValueError:  # of an inner function's own, or empty
        return MISSING


def _is_asking(name: str) -> bool:
    return name in SETTINGS or (name.startswith(ASKING) and name not in OF_TENSORS)


def _is_trusted(module: str, more: tuple[str, ...] = ()) -> bool:
    return module == STAND_INS or module.partition(".")[0] in (*TRUSTED, *more)
