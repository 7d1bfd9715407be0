"""The static scan: a submission uses Triton, and of torch only what makes buffers and tells sizes.

What is allowed is listed, never what is forbidden: everything else gets its line and a reason. So a submission has no
way to files, processes, other modules or the grader's own objects, and cannot leave the work to torch. What stands
under `if __name__ == "__main__":` is the learner's own trial and never runs here.
"""

from __future__ import annotations

import ast
import builtins
import difflib
from dataclasses import dataclass, field

from sublight.learn.grade.bindings import bound_names, changed_meanings, imported, methods_of
from sublight.learn.verdict import Fault

MODULES = ("torch", "triton", "triton.language", "math", "typing", "functools", "__future__")
ON_PAPER = ("math", "typing", "functools", "__future__")
OF_TORCH = {
    *("Tensor", "dtype", "device", "Size", "empty", "empty_like", "empty_strided", "zeros", "zeros_like"),
    *("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"),
    *("float", "half", "int", "long", "cuda", "cuda.get_device_properties", "cuda.current_device"),
    "cuda.get_device_capability",
}
OF_TRITON = {
    *("jit", "cdiv", "next_power_of_2", "autotune", "Config", "heuristics", "language"),
    *("tools", "tools.tensor_descriptor", "tools.tensor_descriptor.TensorDescriptor"),
}
LANGUAGE_FOLDERS = (("extra",), ("extra", "cuda"), ("extra", "libdevice"), ("extra", "cuda", "libdevice"))
LANGUAGE_MODULES = {"core", "semantic", "standard", "random", "target_info", "extra"}  # they lead to others
OF_FUNCTOOLS = {"partial", "reduce", "lru_cache", "cache"}
METHODS = {  # of tensors: sizes, views and buffers; of Python's containers and numbers
    *("numel", "size", "stride", "dim", "element_size", "is_contiguous", "contiguous", "nelement", "data_ptr"),
    *("view", "reshape", "flatten", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand", "new_empty"),
    *("new_zeros", "zero_", "bit_length", "append", "extend", "items", "keys", "values", "get", "join", "from_tensor"),
}
BUILTINS = {
    *("abs", "all", "any", "bool", "callable", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len"),
    *("list", "map", "max", "min", "pow", "print", "property", "range", "repr", "reversed", "round", "set", "slice"),
    *("sorted", "str", "sum", "tuple", "zip", "filter", "staticmethod", "classmethod", "frozenset"),
    *("Exception", "ValueError", "TypeError", "AssertionError", "RuntimeError", "NotImplementedError", "IndexError"),
    *("KeyError", "ZeroDivisionError", "ArithmeticError", "object", "__name__"),
}
FLAGS = {"shape", "dtype", "device", "is_cuda", "ndim", "T", "mT", "multi_processor_count", "name", "major", "minor"}
OF_BLOCKS = {  # in kernels: of blocks, their types and descriptors, as Triton 3.6 to 3.9 have them
    *("abs", "advance", "argmax", "argmin", "associative_scan", "broadcast_to", "cast", "cdiv", "ceil", "cos"),
    *("cumprod", "cumsum", "erf", "exp", "exp2", "expand_dims", "flip", "floor", "gather", "histogram", "item", "load"),
    *("log", "log2", "logical_and", "logical_or", "max", "min", "ravel", "reduce", "reduce_or", "rsqrt", "scatter"),
    *("sigmoid", "sin", "softmax", "sort", "split", "sqrt", "sqrt_rn", "store", "sum", "to", "trans", "xor_sum"),
    *(f"atomic_{name}" for name in ("add", "and", "cas", "load", "max", "min", "or", "poll", "store", "xchg", "xor")),
    *("block_shape", "block_type", "element_ty", "int_bitwidth", "kind", "primitive_bitwidth", "scalar", "type"),
    *(f"is_{name}" for name in ("bf16", "block", "bool", "floating", "fp16", "fp32", "fp64", "fp8", "int", "int1")),
    *(f"is_{name}" for name in ("int8", "int16", "int32", "int64", "int_signed", "int_unsigned", "ptr", "uint8")),
    *("fp_mantissa_width", "itemsize", "value", "is_uint16", "is_uint32", "is_uint64", "is_standard_floating"),
}
INNER_MODULES = {
    *("torch.cuda", "triton.tools", "triton.tools.tensor_descriptor", "triton.language.math"),
    *("triton.language." + ".".join(folder) for folder in LANGUAGE_FOLDERS),
}
BASES = {"object", *(name for name in BUILTINS if name.endswith(("Error", "Exception")))}  # of a submission's classes
MOST_CHARACTERS = 2**18  # of a submission: a solution has some thousand
OF_LISTS = {"insert", "pop", "remove", "reverse", "sort", "copy", "clear", "count", "index"}
USUAL_WORDS = {  # of tl
    *("arange", "atomic_add", "cdiv", "constexpr", "dot", "exp", "full", "load", "log", "num_programs", "program_id"),
    *("float32", "sqrt", "static_range", "store", "trans", "where", "zeros"),
}
OF_TL = USUAL_WORDS | {"abs", "max", "maximum", "min", "minimum", "rsqrt", "sigmoid", "softmax", "sum", "zeros_like"}
USUAL_IMPORTS = {
    "tl": "import triton.language as tl",
    **{name: f"import {name}" for name in ("math", "torch", "triton")},
}


def scan(source: str, function: str, modules: tuple[str, ...] = MODULES) -> list[Fault]:
    """Everything that a submission may not contain, by line; empty where it may run."""
    if len(source) > MOST_CHARACTERS:
        return [Fault(kind="syntax", text=f"it has {len(source):,} characters, and {MOST_CHARACTERS:,} are the most")]
    try:
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if not _is_trial(node)]
        scanner = _Scanner(
            defined=bound_names(tree), allowed=modules, names_here=_of_file(tree), methods=methods_of(tree)
        )
        for node, words in changed_meanings(tree, BASES):
            scanner.refuse(node, words)
        scanner.visit(tree)
    except SyntaxError as error:
        return [Fault(kind="syntax", line=error.lineno or 0, text=f"Python cannot read this: {error.msg}")]
    except ValueError as error:  # a zero byte, before Python 3.12
        return [Fault(kind="syntax", text=f"Python cannot read this: {error}")]
    except (MemoryError, RecursionError):
        return [Fault(kind="syntax", text="Python cannot read this: an expression is nested too deeply")]
    faults = scanner.faults
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not faults and function not in {node.name for node in functions}:
        faults.append(Fault(kind="missing", line=0, text=f"there is no function {function}: keep the starter's `def`"))
    return faults


def runnable(source: str) -> str:
    """The source without the learner's own trial; lines keep their numbers."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if _is_trial(node):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return "\n".join(lines) + "\n"


def _is_trial(node: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`, without an else."""
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"


def _of_file(tree: ast.Module) -> set[str]:
    """Names that every function sees: the file's imports, constants, functions and classes."""
    return {
        name
        for node in tree.body
        for name in ({node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else bound_names(node))
    }


@dataclass(slots=True)
class _Scanner(ast.NodeVisitor):
    """Walks over a submission, and remembers which names stand for which modules."""

    defined: set[str]
    allowed: tuple[str, ...] = MODULES
    faults: list[Fault] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)  # alias -> module, or what was imported from one
    classes: set[str] = field(default_factory=set)  # of the submission
    methods: set[str] = field(default_factory=set)  # of its classes
    in_kernel: bool = False
    names_here: set[str] = field(default_factory=set)  # that the function around binds, and the file itself

    def refuse(self, node: ast.AST, words: str) -> None:
        self.faults.append(Fault(kind="scan", line=getattr(node, "lineno", 0), text=words))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name not in self.allowed:
                self.refuse(node, f"`import {alias.name}`: {self._imports()}")
            name, module = imported(alias)
            self.modules[name] = module

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.split(".")[0] not in {name.split(".")[0] for name in self.allowed}:
            self.refuse(node, f"`from {'.' * node.level}{module} import`: {self._imports()}")
            return
        for alias in node.names:
            if alias.name == "*":
                self.refuse(node, f"`from {module} import *`: name what is used")
                continue
            name = f"{module}.{alias.name}"
            self.modules[alias.asname or alias.name] = name
            if name not in self.allowed and not self._may(name):
                self.refuse(node, f"`from {module} import {alias.name}` is not for a submission: {self._work()}")

    @property
    def is_on_paper(self) -> bool:
        return "torch" not in self.allowed

    def _imports(self) -> str:
        if self.is_on_paper:
            return "a step on paper imports math alone"
        return "a submission imports torch, triton and math alone"

    def _work(self, dotted: str = "") -> str:
        """Who does what this name was to do."""
        if self.is_on_paper:
            return "a step on paper is plain Python: numbers, lists and math"
        if self.in_kernel and dotted.startswith("torch."):
            name = dotted.removeprefix("torch.")
            known = {"inf": ': infinity is float("inf")', **{each: f": tl.{each}" for each in OF_TL}}
            return f"a kernel computes with tl (triton.language), not with torch{known.get(name, '')}"
        return "the kernel must do the work"

    def _may(self, dotted: str) -> bool:
        """Whether this name of an allowed module may be used."""
        for root, names in (("torch.", OF_TORCH), ("functools.", OF_FUNCTOOLS)):
            if dotted.startswith(root):
                return dotted.removeprefix(root) in names
        parts = dotted.split(".")
        if dotted.startswith("triton.language."):
            return _is_language(parts[2:])
        if dotted.startswith("triton."):
            return dotted.removeprefix("triton.") in OF_TRITON
        if dotted.startswith("typing."):
            return len(parts) == 2 and parts[1][0].isupper()  # in small letters there are modules
        return parts[0] in ("math", "__future__") and len(parts) == 2

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.in_kernel = self.in_kernel, self.in_kernel or self._is_kernel(node)
        if node.name.startswith("__") and node.name not in ("__init__", "__call__"):
            self.refuse(node, f"`def {node.name}`: a submission changes nothing of Python's own")
        others, self.names_here = self.names_here, self.names_here | bound_names(node)
        self.generic_visit(node)
        self.in_kernel, self.names_here = outer, others

    def _is_kernel(self, node: ast.FunctionDef) -> bool:
        names = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
        return "triton.jit" in map(self._dotted, names)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.add(node.name)
        self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.refuse(node, "`async def`: the work is done when the function returns")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self.defined | BUILTINS:
            words = "is not for a submission: it computes in Triton kernels and launches them"
            if node.id in USUAL_IMPORTS and not (self.is_on_paper and node.id != "math"):
                words = f"is not defined: `{USUAL_IMPORTS[node.id]}` is missing"
            elif not hasattr(builtins, node.id) and not node.id.startswith("__"):
                there = self._of_module(node.id) or self._near(node.id)
                words = f"is not defined; {there}"
            self.refuse(node, f"`{node.id}` {words}")
        elif isinstance(node.ctx, ast.Load) and _is_module(self.modules.get(node.id, "")):
            self.refuse(node, f"`{node.id}` is a module: use what is in it")
        elif isinstance(node.ctx, ast.Store) and node.id.startswith("__"):
            self.refuse(node, f"`{node.id}` must keep its meaning")

    def _near(self, name: str) -> str:
        """What was meant, or which names there are at this place."""
        known = sorted(self.names_here - self.modules.keys())
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        return f"did you mean {' or '.join(near)}?" if near else f"the names here are {', '.join(known)}"

    def _of_module(self, name: str) -> str:
        """Where it is, if the part before the dot was forgotten."""
        if self.is_on_paper:
            return ""
        if self.in_kernel:
            return f"it is tl.{name}" if name in USUAL_WORDS else ""
        return f"it is triton.{name}" if name in OF_TRITON else ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None:  # a name of a module
            if isinstance(node.ctx, ast.Store | ast.Del):
                self.refuse(node, f"`{ast.unparse(node)}` must keep its meaning")
            elif not self._may(dotted):
                self.refuse(node, f"`{ast.unparse(node)}` is not for a submission: {self._work(dotted)}")
            elif _is_module(dotted):  # handed on, it would lead to others where nobody looks
                self.refuse(node, f"`{ast.unparse(node)}` is a module: use what is in it")
            return
        if isinstance(node.value, ast.Name) and node.value.id not in self.defined | BUILTINS:
            self.visit_Name(node.value)  # what stands before the dot is not there: nothing to say of what follows
            return
        if isinstance(node.value, ast.Name) and node.value.id in self.classes and node.attr in self.methods:
            self.refuse(
                node, f"`{ast.unparse(node)}`: a method is called on an object, `{node.value.id}().{node.attr}`"
            )
        elif node.attr.startswith("_"):
            self.refuse(node, f"`.{node.attr}`: names that begin with _ are not for a submission")
        elif not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) != "self":
            self.refuse(node, f"`{ast.unparse(node)}` must keep its meaning")
        elif not self._is_plain(node) and not (self.in_kernel and node.attr in OF_BLOCKS):
            kind = {"float": "tl.float32", "half": "tl.float16", "bfloat16": "tl.bfloat16"}.get(node.attr)
            work = f".to({kind}) converts a block" if kind and self.in_kernel else self._work()
            self.refuse(node, f"`.{node.attr}` is not for a submission: {work}")
        self.generic_visit(node)

    def _is_plain(self, node: ast.Attribute) -> bool:
        is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", *self.classes}
        return is_own or node.attr in METHODS | FLAGS | (OF_LISTS if self.is_on_paper else set())

    def _dotted(self, node: ast.expr) -> str | None:
        """`tl.math.exp` as triton.language.math.exp; None for what does not begin with a module."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._dotted(node.value)
            return None if base is None or self._is_value(base) else f"{base}.{node.attr}"
        return None

    def _is_value(self, dotted: str) -> bool:
        """Whether this is no module: its attributes are judged as those of any value."""
        descriptor = "triton.tools.tensor_descriptor.TensorDescriptor"  # whose from_tensor is a method like others
        values = {"triton.jit", "functools.partial", descriptor}
        return dotted in {f"torch.{name}" for name in OF_TORCH - {"cuda"}} | values

    def visit_Match(self, node: ast.Match) -> None:
        self.refuse(node, "`match`: its patterns read attributes by any name; use `if`")

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Global | ast.Nonlocal | ast.Await | ast.Yield | ast.YieldFrom):
            self.refuse(node, f"`{type(node).__name__.lower()}` is not for a submission")
        ast.NodeVisitor.generic_visit(self, node)


def _is_module(dotted: str) -> bool:
    return dotted in {*MODULES, *INNER_MODULES}


def _is_language(parts: list[str]) -> bool:
    """Whether this name of `tl` is one of its functions and types, or one of its two libraries of mathematics."""
    *folder, name = parts
    if any(part.startswith("_") for part in parts):
        return False
    if tuple(parts) in LANGUAGE_FOLDERS:
        return True
    if folder and folder[-1] == "libdevice" and tuple(folder) in LANGUAGE_FOLDERS:
        return name not in LANGUAGE_MODULES
    is_function = not folder or folder == ["math"] or folder[0] not in (*LANGUAGE_MODULES, "math")
    return is_function and not LANGUAGE_MODULES & set(parts)
