"""What a process that runs a submission does in either way: hear orders, load the submission, answer, confined."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import re
import resource
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sublight.learn.grade.sandbox import Budget, confine

Serve = Callable[[Connection, dict[str, Any]], None]


@contextlib.contextmanager
def answering(channel: Connection) -> Iterator[Callable[..., None]]:
    """Gives what sends an answer; each carries the processor time since the last."""
    spent = cpu_s()

    def answer(**values: Any) -> None:
        nonlocal spent
        now = cpu_s()
        channel.send_bytes(json.dumps({**values, "cpu_s": now - spent}).encode())
        spent = now

    yield answer


def orders(channel: Connection) -> Iterator[dict[str, Any]]:
    """What the grader sends, until it hangs up."""
    while True:
        try:
            yield json.loads(channel.recv_bytes())
        except EOFError:
            return


def cpu_s() -> float:
    """CPU seconds of this process and of those it started."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(time.ru_utime + time.ru_stime for time in times)


def load(order: dict[str, Any], *, programs: bool) -> Any:
    """The submission's function; from here on this process is confined."""
    file = Path(order["source"])
    source = file.read_text(encoding="utf-8")
    confine(Budget(**order["budget"]), programs=programs)
    module = types.ModuleType("submission")
    module.__file__ = str(file)
    sys.modules["submission"] = module
    exec(compile(source, str(file), "exec"), module.__dict__)
    return getattr(module, order["function"])


def failure_of(error: BaseException, file: str) -> dict[str, Any]:
    """An exception as one line, at the learner's own line, the innermost; a cause lies deeper than what it caused."""
    cause, line, is_in_kernel = error, _line(error, file), False
    while cause.__cause__ is not None:
        is_in_kernel = is_in_kernel or type(cause).__name__ == "InterpreterError"
        cause = cause.__cause__
        line = _line(cause, file) or line
    words = traceback.format_exception_only(cause)[-1].strip().splitlines()[0]
    if NO_GRID in words:  # it shows in the kernel, and is wrong where that is called
        line = _lines(error, file)[0]
    code = linecache.getline(file, line)
    words = explained(words, is_in_kernel=is_in_kernel, code=code)
    if found := re.match(r"TypeError: (?P<name>\w+)\(\) missing", words):
        words += _arguments("".join(linecache.getlines(file)), found["name"])
    return {"text": words, "line": line}


def _arguments(source: str, name: str) -> str:
    """What a kernel takes, where `source` has one of that name; else nothing.

    >>> _arguments("@triton.jit\\ndef add_kernel(x_ptr, n, BLOCK: tl.constexpr):\\n    pass", "add_kernel")
    ': a launch gives all of add_kernel(x_ptr, n, BLOCK), in this order or by name'
    >>> _arguments("def add(x): pass", "add"), _arguments("", "add_kernel")
    ('', '')
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name and node.decorator_list:
            names = ", ".join(each.arg for each in (*node.args.args, *node.args.kwonlyargs))
            return f": a launch gives all of {name}({names}), in this order or by name"
    return ""


def _line(error: BaseException, file: str) -> int:
    return _lines(error, file)[-1]


def _lines(error: BaseException, file: str) -> list[int]:
    """The lines in the learner's file, the outermost first; 0 where there is none."""
    return [at.lineno or 0 for at in traceback.extract_tb(error.__traceback__) if at.filename == file] or [0]


def explained(words: str, *, is_in_kernel: bool, code: str = "") -> str:
    """What Triton says of common mistakes at this line of `code`, in words that say what to do.

    >>> explained("TypeError: 'int' object is not iterable", is_in_kernel=False)
    'the grid must be a tuple, also of one number: kernel[(programs,)](...)'
    >>> explained("TypeError: 'int' object is not iterable", is_in_kernel=True, code="total = sum(x)")
    'a block has no elements to go through: it is worked on as a whole, tl.sum(x, axis=0), x + 1'
    >>> explained("ZeroDivisionError: division by zero", is_in_kernel=True)
    'ZeroDivisionError: division by zero'
    """
    for pattern, where, at, better in BETTER:
        found = re.search(pattern, words)
        if found and is_in_kernel in where and re.search(at, code):
            return better.format(words=words, **found.groupdict())
    return words


NO_GRID = "no attribute 'grid_idx'"
IN_KERNEL, OUTSIDE, ANYWHERE = (True,), (False,), (True, False)
BETTER = (  # what is said, in a kernel or outside of it, at which code, and what is said instead
    (NO_GRID, ANYWHERE, "",
     "a kernel is not called like a function: start it on a grid of programs, kernel[grid](...)"),
    (r"^TypeError: \w+\(\) (missing|takes)", OUTSIDE, "^$", "{words}: keep the starter's `def` with its arguments"),
    ("^TypeError: 'int' object is not iterable$", OUTSIDE, "",
     "the grid must be a tuple, also of one number: kernel[(programs,)](...)"),
    ("'function' object is not subscriptable", OUTSIDE, "", "@triton.jit is missing above the kernel's `def`"),
    ("object cannot be interpreted as an integer", OUTSIDE, "",
     "the grid must be of whole numbers: triton.cdiv(n, BLOCK) divides and rounds up"),
    ("is not iterable|to Python scalars|support item assignment", IN_KERNEL, r"_ptr\s*\[.*\]\s*=[^=]",
     "an address has no elements to assign to: write them with tl.store(out_ptr + place, values, mask=mask)"),
    ("is not iterable", IN_KERNEL, r"_ptr\s*\[|^$",
     "an address has no elements to index: read them with tl.load(x_ptr + place, mask=mask)"),
    ("", IN_KERNEL, r"(?<!tl\.)\bmath\.",
     "math is for single numbers of Python: in a kernel use tl.sqrt, tl.exp, tl.log and so on"),
    ("is not iterable|to Python scalars", IN_KERNEL, "",
     "a block has no elements to go through: it is worked on as a whole, tl.sum(x, axis=0), x + 1"),
    ("'int' object is not callable|no attribute '(numel|shape|size)'|list index out of range", IN_KERNEL,
     r"\.(numel|size|shape)\b",
     "an address knows no sizes: give them to the kernel as arguments, as n"),
    ("cannot be block type if pointer argument is not a block", ANYWHERE, "",
     "a block of values needs a block of addresses: tl.store(out_ptr + place, values, mask=mask)"),
    ("Mask must have boolean", ANYWHERE, "",
     "a mask is a block of true and false, which a comparison makes: mask = place < n"),
    (r"program_id\(\) missing", ANYWHERE, "",
     "program_id takes which number of the grid: tl.program_id(0) is the first"),
    (r"unexpected keyword argument 'dim'", IN_KERNEL, "", "Triton says axis where torch says dim: axis=0"),
    (r"axis (?P<axis>\d+) out of bounds", IN_KERNEL, "",
     "the block has no dimension {axis}: one of a single dimension has axis=0 alone"),
    ("'torch.dtype' object has no attribute", IN_KERNEL, "", "in a kernel types are those of tl, as tl.float32"),
    ("'triton.language' has no attribute 'inf(inity)?'", IN_KERNEL, "", "infinity is float(\"inf\")"),
    ("'tensor' object has no attribute '(?P<name>(un)?squeeze)'", IN_KERNEL, "",
     "a block is no torch tensor and has no {name}: row[:, None] and col[None, :] give it a second dimension"),
    ("'tensor' object has no attribute '(?P<name>\\w+)'", IN_KERNEL, "",
     "a block is no torch tensor and has no {name}: what it can do are functions of tl, as tl.sum(x, axis=0)"),
    ("Unsupported ptr type", ANYWHERE, "",
     "the addresses come first: tl.load(x_ptr + place, mask=mask), tl.store(out_ptr + place, values, mask=mask)"),
    ("must have equal reduction dimensions", IN_KERNEL, "",
     "tl.dot(a, b) takes m by k and k by n: tl.trans turns the one that lies the other way"),
    ("Both operands must be same dtype", IN_KERNEL, "", "{words}: make them so, as in tl.dot(weight.to(v.dtype), v)"),
    ("unsupported operand type.* @", IN_KERNEL, "", "a product of two blocks is tl.dot(a, b)"),
    ("cannot add pointers together", IN_KERNEL, "",
     "two addresses have no sum: load from each of them, then add the values"),
    ("'(torch.Size|Size|tuple|list)' object has no attribute 'dtype'", IN_KERNEL, "",
     "it computes with a whole shape or list: give the kernel single numbers, as x.numel() or x.shape[0]"),
    ("truth value of an array with more than one element|Boolean value of Tensor with more than one", IN_KERNEL, "",
     "a block has no single truth: leave elements out by mask=mask, or choose with tl.where(condition, a, b)"),
    (r"numel \((?P<count>\d+)\) exceeds", IN_KERNEL, "",
     "a block of {count} elements is too large: take a smaller one, as 1024, and start more programs"),
    (r"Cannot access global variable (?P<name>\w+)", IN_KERNEL, "",
     "a kernel does not see the number {name} outside: give it as an argument, `{name}: tl.constexpr`, "
     "or write {name} = tl.constexpr(…) outside"),
    ("arange's arguments must be of type", IN_KERNEL, r"arange\([^)]*[-+*/(]",
     "arange counts between constants: tl.arange(0, BLOCK), and what the program knows only as it runs is added to it: "
     "program * BLOCK + tl.arange(0, BLOCK)"),
    ("is not string$", IN_KERNEL, r"\bprint\(", "in a kernel print begins with a text: print(\"x\", x)"),
    ("arguments must be of type tl.constexpr", ANYWHERE, "",
     "{words}: declare it `BLOCK: tl.constexpr` among the kernel's arguments"),
    ("must be 16-byte aligned", IN_KERNEL, "",
     "{words}: a descriptor (TMA) takes no rows of this length; load them by addresses, with a mask"),
    ("must be a power of 2", IN_KERNEL, "",
     "{words}: take one, as 1024, or triton.next_power_of_2(cols) for a row of cols, and mask what is too much"),
    ("incompatible dimensions", IN_KERNEL, "",
     "{words}: blocks of different shapes; row[:, None] is upright, col[None, :] lies, both together are a tile"),
)  # fmt: skip
