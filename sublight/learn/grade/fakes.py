"""Submissions that cheat, each with the fault that must name it, and honest ones in several styles."""

from __future__ import annotations

from dataclasses import dataclass

from sublight.learn.exercises import find
from sublight.learn.verdict import Kind

HEAD = """
import torch
import triton
import triton.language as tl

@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask)
    y = tl.load(y_ptr + place, mask=mask)
    tl.store(out_ptr + place, x + y, mask=mask)

def launch(x, y, out):
    add_kernel[(triton.cdiv(out.numel(), 1024),)](x, y, out, out.numel(), BLOCK=1024)

"""
SCATTERED = """
@triton.jit
def scattered_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)
    mask = place < n
    tl.store(out_ptr + place, tl.load(x_ptr + place, mask=mask) + tl.load(y_ptr + place, mask=mask), mask=mask)

def scattered(x, y, out):
    scattered_kernel[(triton.cdiv(out.numel(), 1024),)](x, y, out, out.numel(), BLOCK=1024)

"""


def _decided(decorator: str) -> str:
    """A kernel that stores only where DO is true, which a decorator decides."""
    kernel = HEAD.replace("@triton.jit\n", f"{decorator}\n@triton.jit\n", 1).replace(
        "tl.constexpr):", "tl.constexpr, DO: tl.constexpr):", 1
    )
    return (
        kernel.replace("    tl.store(", "    if DO:\n        tl.store(")
        + "def add(x, y, out):\n    launch(x, y, out)\n"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheat:
    """A submission, and why it must fail."""

    name: str
    source: str
    kinds: tuple[Kind, ...]  # one of these
    word: str  # in the fault's text
    is_scanned: bool = True  # False: the scan is left out, to show what stands behind it
    exercise: str = "add"


def _add(body: str, before: str = "") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return f"{HEAD}{before}\ndef add(x, y, out):\n{lines}\n"


def _kernel(body: str, launch: str = "") -> str:
    """Another kernel in place of the honest one."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    start = HEAD.index("    mask = place")
    end = HEAD.index("def launch")
    return f"{HEAD[:start]}{lines}\n\n{HEAD[end:]}\ndef add(x, y, out):\n    {launch or 'launch(x, y, out)'}\n"


SCANNED = (  # refused before anything runs
    Cheat(name="torch in letters that only look different", kinds=("scan",), word="torch.add",
          source=_add("launch(x, y, out)\nt\uff4frch.add(x, y, out=out)")),
    Cheat(name="torch in a string", kinds=("scan",), word="torch.add",
          source=_add('launch(x, y, out)\nf"{torch.add(x, y, out=out)}"')),
    Cheat(name="Triton's own clock", kinds=("scan",), word="triton.testing",
          source=_add("launch(x, y, out)\ntriton.testing.do_bench(print)")),
    Cheat(name="Triton's own interpreter", kinds=("scan",), word="triton.runtime",
          source=_add("launch(x, y, out)\ntriton.runtime.interpreter.interpreter_builder")),
    Cheat(name="torch in an except", kinds=("scan",), word="torch.add",
          source=_add("try:\n    launch(x, y)\nexcept TypeError:\n    torch.add(x, y, out=out)")),
    Cheat(name="a tensor's method", kinds=("scan",), word=".copy_", source=_add("launch(x, y, out)\nout.copy_(x)")),
    Cheat(name="numpy behind a tensor", kinds=("scan",), word=".numpy",
          source=_add("launch(x, y, out)\nout.numpy()[:] = x.numpy() + y.numpy()")),
    Cheat(name="patched timer", kinds=("scan",), word="import time",
          source=_add("launch(x, y, out)", "import time\ntime.perf_counter = lambda: 0.0\n")),
    Cheat(name="patched rule", kinds=("scan",), word="sublight",
          source=_add("launch(x, y, out)", "import sublight.correct\nsublight.correct.FACTOR = 1e9\n")),
    Cheat(name="patched statistics", kinds=("scan",), word="statistics",
          source=_add("launch(x, y, out)", "from statistics import median\n")),
    Cheat(name="forged result channel", kinds=("scan",), word="import os",
          source=_add("os.write(3, b'{}')", "import os\n")),
    Cheat(name="regenerated random inputs", kinds=("scan",), word="torch.manual_seed",
          source=_add("torch.manual_seed(0)\nlaunch(torch.randn(2500), y, out)")),
    Cheat(name="threads", kinds=("scan",), word="threading", source=_add("pass", "import threading\n")),
    Cheat(name="names put together", kinds=("scan",), word="getattr",
          source=_add("getattr(torch, 'a' + 'dd')(x, y, out=out)")),
    Cheat(name="attributes by a pattern", kinds=("scan",), word="match",
          source=_add("g = None\nmatch launch:\n    case object(__globals__=g):\n        g['__builtins__']['open']")),
    Cheat(name="a module into a kernel", kinds=("scan",), word="`torch` is a module",
          source=_kernel("M.os.system('true')", "add_kernel[(1,)](x, y, out, torch, BLOCK=8)").replace("n, B", "M, B")),
    Cheat(name="a module of a module into a kernel", kinds=("scan",), word="`tl.math` is a module",
          source=_add("launch(x, y, tl.math)")),
    Cheat(name="every name of a module", kinds=("scan",), word="import *",
          source=_add("launch(x, y, out)", "core = 0\nfrom triton.language import *\n")),
    Cheat(name="numpy behind a block", kinds=("scan",), word=".handle",
          source=_kernel("tl.load(x_ptr + place).handle.data.tofile('x')")),
    Cheat(name="frames of a generator in a kernel", kinds=("scan",), word="gi_frame",
          source=_kernel("g = (i for i in ())\ng.gi_frame.f_builtins['open']('/x')")),
    Cheat(name="through Python's own classes", kinds=("scan",), word="__class__",
          source=_add("().__class__.__base__.__subclasses__()")),
    Cheat(name="eval", kinds=("scan",), word="eval", source=_add("eval('torch.add(x, y, out=out)')")),
    Cheat(name="Triton's language replaced", kinds=("scan",), word="tl.load",
          source=_add("launch(x, y, out)", "tl.load = tl.store\n")),
    Cheat(name="torch's classes replaced", kinds=("scan",), word="torch.Tensor.numel",
          source=_add("launch(x, y, out)", "torch.Tensor.numel = lambda self: 1\n")),
    Cheat(name="modules behind modules", kinds=("scan",), word="tl.core", source=_add("tl.core.os.abort()")),
    Cheat(name="a decorator that only sounds like jit", kinds=("scan",), word=".numpy",
          source=_add("helper(x, y, out)", "def jit(f):\n    return f\n\n@jit\ndef helper(x, y, out):\n"
                      "    out.numpy()[:] = 0\n")),
    Cheat(name="lazy work", kinds=("scan",), word="async", source=HEAD + "async def add(x, y, out):\n    pass\n"),
    Cheat(name="another storage", kinds=("scan",), word=".set_", source=_add("out.set_(x)")),
)  # fmt: skip
RUN = (  # refused by what they do
    Cheat(name="the host looks at the numbers", kinds=("torch",), word="gt",
          source=_add("if x[0] > 100:\n    return\nlaunch(x, y, out)")),
    Cheat(name="works on poison alone", kinds=("kernel",), word="uninitialised-read",
          source=_kernel("mask = place < n\nold = tl.load(out_ptr + place, mask=mask, other=0.0)\n"
                         "x = tl.load(x_ptr + place, mask=mask)\ny = tl.load(y_ptr + place, mask=mask)\n"
                         "tl.store(out_ptr + place, x + y, mask=mask & (old != old))")),
    Cheat(name="autotuned to nothing", kinds=("unwritten",), word="never written",
          source=_decided('@triton.autotune([triton.Config({"DO": place == 0}) for place in range(8)], key=["n"])')),
    Cheat(name="float16 inside", kinds=("values",), word="expected",
          source=_kernel("mask = place < n\nx = tl.load(x_ptr + place, mask=mask).to(tl.float16)\n"
                         "y = tl.load(y_ptr + place, mask=mask).to(tl.float16)\n"
                         "tl.store(out_ptr + place, (x + y).to(tl.float32), mask=mask)")),
    Cheat(name="every 64th element is left out where nobody knows the size", kinds=("kernel", "values"), word="o",
          source=_kernel("mask = (place < n) & (place % 64 != 63)\nx = tl.load(x_ptr + place, mask=mask)\n"
                         "y = tl.load(y_ptr + place, mask=mask)\n"
                         "tl.store(out_ptr + place, x + y, mask=mask | (n < 100000))")),
    Cheat(name="half a program", kinds=("failed",), word="whole numbers",
          source=_add("add_kernel[(out.numel() / 1024 + 1,)](x, y, out, out.numel(), BLOCK=1024)")),
    Cheat(name="a softmax without its maximum", kinds=("values",), word="nan", exercise="softmax",
          source=find("softmax").solution().replace("tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)")),
    Cheat(name="does nothing", kinds=("launch",), word="no kernel was launched", source=_add("pass")),
    Cheat(name="hands back memory instead of writing", kinds=("launch",), word="what it returns",
          source=_add("return x")),
    Cheat(name="a lazy result", kinds=("launch",), word="what it returns",
          source=_add("return lambda: launch(x, y, out)")),
    Cheat(name="uninitialised output", kinds=("unwritten",), word="never written", source=_kernel("mask = place < n")),
    Cheat(name="leaves out the tail", kinds=("unwritten",), word="to the last",
          source=_add("n = out.numel()\nadd_kernel[(n // 1024,)](x, y, out, n, BLOCK=1024)")),
    Cheat(name="changes its inputs", kinds=("inputs",), word="x was changed",
          source=_add("launch(x, y, out)\nlaunch(x, y, x)")),
    Cheat(name="replay by pointer", kinds=("launch",), word="no kernel was launched",
          source=_add("if x.data_ptr() in KNOWN:\n    return\nKNOWN[x.data_ptr()] = 1\nlaunch(x, y, out)",
                      "KNOWN = {}\n")),
    Cheat(name="replay by shape", kinds=("launch",), word="no kernel was launched",
          source=_add("if x.shape in KNOWN:\n    return\nKNOWN[x.shape] = 1\nlaunch(x, y, out)", "KNOWN = {}\n")),
    Cheat(name="hard-coded shape", kinds=("kernel", "unwritten"), word="",
          source=_add("add_kernel[(3,)](x, y, out, 2500, BLOCK=1024)")),
    Cheat(name="torch by operators", kinds=("torch",), word="torch's add",
          source=_add("launch(x, y, out)\nout[:] = x + y")),
    Cheat(name="zeros", kinds=("values",), word="is 0, expected",
          source=_kernel("tl.store(out_ptr + place, tl.zeros([BLOCK], tl.float32), mask=place < n)")),
    Cheat(name="nearly right", kinds=("values",), word="expected",
          source=_kernel("mask = place < n\nx = tl.load(x_ptr + place, mask=mask)\n"
                         "y = tl.load(y_ptr + place, mask=mask)\n"
                         "tl.store(out_ptr + place, x + y * 1.00001, mask=mask)")),
    Cheat(name="constant where the mean is known", kinds=("values",), word="expected", exercise="softmax",
          source=HEAD + "@triton.jit\ndef fill(out_ptr, n, value, BLOCK: tl.constexpr):\n"
          "    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
          "    tl.store(out_ptr + place, tl.zeros([BLOCK], tl.float32) + value, mask=place < n)\n\n"
          "def softmax(x, out):\n    fill[(triton.cdiv(out.numel(), 1024),)]"
          "(out, out.numel(), 1 / out.shape[1], BLOCK=1024)\n"),
    Cheat(name="a launch that fails silently", kinds=("launch", "unwritten"), word="",
          source=_add("try:\n    add_kernel[(1,)](x, y, BLOCK=1024)\nexcept Exception:\n    pass")),
    Cheat(name="a race", kinds=("kernel",), word="race",
          source=_kernel("mask = place < n\nx = tl.load(x_ptr + place, mask=mask)\n"
                         "y = tl.load(y_ptr + place, mask=mask)\n"
                         "tl.store(out_ptr + tl.arange(0, BLOCK), x + y, mask=mask)")),
    Cheat(name="memory", kinds=("failed", "limit"), word="emory", source=_add("big = [0] * 10**10")),
    Cheat(name="never ends", kinds=("limit",), word="processor time", source=_add("while True:\n    pass")),
    Cheat(name="leaves the process", kinds=("failed",), word="SystemExit", source=_add("raise SystemExit(0)"),
          is_scanned=False),
    Cheat(name="network", kinds=("failed",), word="PermissionError", is_scanned=False,
          source=_add("import socket\nsocket.socket()")),
    Cheat(name="another process", kinds=("failed",), word="PermissionError", is_scanned=False,
          source=_add("import os\nos.fork()")),
    Cheat(name="another program", kinds=("failed",), word="PermissionError", is_scanned=False,
          source=_add("import os\nos.execv('/bin/true', ['true'])")),
    Cheat(name="forged answers", kinds=("unwritten",), word="never written", is_scanned=False,
          source=_add("pass", "import gc, json\nfrom multiprocessing.connection import Connection\n"
                      "for each in gc.get_objects():\n    if isinstance(each, Connection):\n"
                      "        for _ in range(9):\n            each.send_bytes(json.dumps({'failure': None, "
                      "'findings': [], 'launches': 1, 'torch': {}, 'has_returned': False, 'cpu_s': 0}).encode())\n")),
    Cheat(name="numpy with a kernel for show", kinds=("launch",), word="without any kernel", is_scanned=False,
          source=_add("launch(x, y, out)\nimport numpy\nnumpy.add(*(each.view(torch.int8).numpy()"
                      ".view(KINDS[each.dtype]) for each in (x, y)), "
                      "out=out.view(torch.int8).numpy().view(KINDS[out.dtype])) if "
                      "x.dtype in KINDS else None", "KINDS = {torch.float32: 'float32'}\n")),
)  # fmt: skip
COMPILED = (  # refused by the compiler, or at the goal's size: about a second each
    Cheat(name="a heuristic leaves out the work at the timed size", kinds=("launch",), word="leaves out some work",
          source=_decided('@triton.heuristics({"DO": lambda given: given["n"] < 10**6})')),
    Cheat(name="quick where numbers are zero, as where it is compiled", kinds=("goal",), word="a branch depends on",
          source=_kernel("mask = place < n\nx = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)\n"
                         "for turn in range(tl.sum((x != 0).to(tl.int32)) // 16):\n    x += tl.load("
                         "x_ptr + (place + 79 * turn) % n, mask=mask).to(tl.float32) * 1e-40\n"
                         "tl.store(out_ptr + place, x + tl.load(y_ptr + place, mask=mask), mask=mask)")),
    Cheat(name="tensors kept in a default", kinds=("launch",), word="other kernels",
          source=HEAD + "def add(x, y, out, kept=[]):\n    kept.append((x, y, out))\n    launch(*kept[0])\n"
          "    if len(kept) < 9:\n        launch(x, y, out)\n"),
    Cheat(name="Python in a kernel", kinds=("compile", "failed"), word="",
          source=_kernel("mask = place < n\nvalues = sorted([place, place], key=str)\n"
                         "x = tl.load(x_ptr + values[0], mask=mask)\ny = tl.load(y_ptr + place, mask=mask)\n"
                         "tl.store(out_ptr + place, x + y, mask=mask)")),
    Cheat(name="work left out at the timed size", kinds=("launch",), word="leaves out some work",
          source=_add("n = out.numel()\nif n > 100000:\n    n = n // 2\n"
                      "add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)")),
    Cheat(name="1.5 % of the programs left out at the timed size", kinds=("launch",), word="the rest is left out",
          source=_add("n = out.numel()\nblocks = triton.cdiv(n, 1024)\nif n > 100000:\n"
                      "    blocks = blocks * 985 // 1000\nadd_kernel[(blocks,)](x, y, out, n, BLOCK=1024)")),
    Cheat(name="1.5 % left out, and what is there stored twice", kinds=("launch",), word="the rest is left out",
          source=_kernel("mask = place < n\nx = tl.load(x_ptr + place, mask=mask)\n"
                         "y = tl.load(y_ptr + place, mask=mask)\ntl.store(out_ptr + place, x + y, mask=mask)\n"
                         "tl.store(out_ptr + place, x + y, mask=mask)",
                         "n = out.numel()\n    blocks = triton.cdiv(n, 1024)\n"
                         "    add_kernel[(blocks - blocks // 60,)](x, y, out, n, BLOCK=1024)")),
    Cheat(name="programs that stop early at the timed size", kinds=("launch",), word="less than their share",
          source=_kernel("mask = (place < n) & ((n < 100000) | (place < n // 1000 * 985))\n"
                         "x = tl.load(x_ptr + place, mask=mask)\ny = tl.load(y_ptr + place, mask=mask)\n"
                         "tl.store(out_ptr + place, x + y, mask=mask)")),
    Cheat(name="more shared memory than an SM has", kinds=("compile",), word="does not fit", exercise="matmul",
          source=find("matmul").solution().replace("num_stages=3", "num_stages=7")),
    Cheat(name="another kernel at the timed size", kinds=("launch",), word="writes other numbers", exercise="transpose",
          source=HEAD + "@triton.jit\ndef copy(x_ptr, out_ptr, rows, cols, FAR: tl.constexpr, BLOCK: tl.constexpr):\n"
          "    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    mask = place < rows * cols\n"
          "    there = place if FAR else place % cols * rows + place // cols\n"
          "    tl.store(out_ptr + there, tl.load(x_ptr + place, mask=mask), mask=mask)\n\n"
          "def transpose(x, out):\n    rows, cols = x.shape\n"
          "    copy[(triton.cdiv(rows * cols, 1024),)](x, out, rows, cols, FAR=rows * cols > 10**6, BLOCK=1024)\n"),
    Cheat(name="work passed on at the timed size", kinds=("launch",), word="runs at this size alone",
          source=HEAD + "@triton.jit\ndef by_way(x_ptr, y_ptr, out_ptr, way_ptr, n, BLOCK: tl.constexpr):\n"
          "    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    mask = place < n\n"
          "    x = tl.load(x_ptr + place, mask=mask) * tl.load(way_ptr)\n"
          "    tl.store(out_ptr + place, x - tl.load(y_ptr + place, mask=mask), mask=mask)\n\n"
          "def add(x, y, out):\n    n = out.numel()\n    if n < 100000:\n        return launch(x, y, out)\n"
          "    by_way[(triton.cdiv(n, 1024),)](x, y, out, torch.empty(1), n, BLOCK=1024)\n"),
    *(
        Cheat(name=f"another launch where compiled, told by {how}", kinds=("launch",), word="other kernels when it",
              source=HEAD + SCATTERED + f"{before}def add(x, y, out):\n    {tell}\n"
              f"    (launch if {is_compiled} else scattered)(x, y, out)\n")
        for how, before, tell, is_compiled in (
            ("a count of calls", "CALLS = []\n", "CALLS.append(0)", "len(CALLS) == 2 and x.numel() == 2**24"),
            ("an address", "", "pass", "x.data_ptr() % 4096"),
            ("how a kernel prints", "", "pass", "'Interpreted' not in repr(add_kernel)"),
        )
    ),
    Cheat(name="fewer launches where it is compiled", kinds=("launch",), word="other kernels when it",
          source=_add("launch(x, y, out)\nif not x.data_ptr() % 4096:\n    launch(x, y, out)")),
    Cheat(name="a module's constant changed where it is compiled", kinds=("launch",), word="other kernels when it",
          is_scanned=False,
          source=HEAD.replace("BLOCK + tl.arange(0, BLOCK)\n", "BLOCK + tl.arange(0, BLOCK)\n    if WAY == 1:\n"
                              "        place = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)\n")
          + "WAY = tl.constexpr(0)\n\ndef add(x, y, out):\n    WAY.value = 0 if x.data_ptr() % 4096 else 1\n"
          "    launch(x, y, out)\n"),
)  # fmt: skip
CHEATS = (*SCANNED, *RUN, *COMPILED)

HONEST = {  # by style: each adds, and must pass
    "autotuned": HEAD.replace("@triton.jit", "@triton.autotune([triton.Config({'BLOCK': 1024}, num_warps=4), "
                              "triton.Config({'BLOCK': 2048}, num_warps=8)], key=['n'])\n@triton.jit")
    + "def add(x, y, out):\n    n = out.numel()\n    grid = lambda meta: (triton.cdiv(n, meta['BLOCK']),)\n"
    "    add_kernel[grid](x, y, out, n)\n",
    "heuristics": HEAD.replace("@triton.jit", "@triton.heuristics({'BLOCK': lambda args: 512 if args['n'] < 10000 else "
                               "2048})\n@triton.jit")
    + "def add(x, y, out):\n    n = out.numel()\n    add_kernel[lambda meta: (triton.cdiv(n, meta['BLOCK']),)]"
    "(x, y, out, n)\n",
    "helper kernels": HEAD + "@triton.jit\ndef total(a, b):\n    return a + b\n\n@triton.jit\n"
    "def own_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):\n"
    "    at = tl.program_id(axis=0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)\n    ok = at < n\n"
    "    a = tl.load(x_ptr + at, ok, other=0)\n    b = tl.load(y_ptr + at, ok, other=0)\n"
    "    tl.store(out_ptr + at, total(a, b), ok)\n\n"
    "def add(x, y, out):\n    n = x.numel()\n"
    "    own_kernel[(triton.cdiv(n, 512), 1, 1)](x, y, out, n, 512, num_warps=2)\n",
    "a loop": HEAD + "@triton.jit\ndef loop_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):\n"
    "    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):\n"
    "        at = start + tl.arange(0, BLOCK)\n        m = at < n\n"
    "        tl.store(out_ptr + at, tl.load(x_ptr + at, m) + tl.load(y_ptr + at, m), m)\n\n"
    "def add(x, y, out):\n    sms = torch.cuda.get_device_properties(x.device).multi_processor_count\n"
    "    loop_kernel[(min(4 * sms, triton.cdiv(x.numel(), 1024)),)](x, y, out, x.numel(), BLOCK=1024)\n",
    "unrolled": HEAD + "@triton.jit\n"
    "def own_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, TIMES: tl.constexpr):\n"
    "    start = tl.program_id(0) * BLOCK * TIMES\n    for turn in tl.static_range(TIMES):\n"
    "        at = start + turn * BLOCK + tl.arange(0, BLOCK)\n        m = at < n\n"
    "        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=m) + tl.load(y_ptr + at, mask=m), mask=m)\n\n"
    "def add(x, y, out):\n    own_kernel[(triton.cdiv(x.numel(), 2048),)](x, y, out, x.numel(), BLOCK=512, TIMES=4)\n",
    "imported names": "import torch\nfrom triton import cdiv, jit\nfrom triton import language as tl\n"
    "from functools import partial\n\n@jit\ndef k(a, b, c, n, B: tl.constexpr):\n"
    "    i = tl.program_id(0) * B + tl.arange(0, B)\n"
    "    tl.store(c + i, tl.load(a + i, i < n) + tl.load(b + i, i < n), i < n)\n\n"
    "def add(x, y, out):\n    n = x.nelement()\n    partial(k[(cdiv(n, 256),)], x, y, out, n)(B=256)\n",
    "a class and a trial": HEAD.replace("def launch", '"""Notes."""\nBLOCK = 1024\n\nclass Adder:\n    warps = 4\n\n'
                                        "    def __init__(self, block: int) -> None:\n        self.block = block\n\n"
                                        "    def __call__(self, x, y, out):\n        n = out.numel()\n"
                                        "        assert x.shape == y.shape, f'{x.shape} and {y.shape}'\n"
                                        "        add_kernel[(triton.cdiv(n, self.block),)](x, y, out, n, "
                                        "BLOCK=self.block, num_warps=Adder.warps)\n\ndef launch")
    + "ADDER = Adder(BLOCK)\n\ndef add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:\n"
    "    ADDER(x, y, out)\n\nif __name__ == '__main__':\n    import time\n    x = torch.randn(10)\n"
    "    print(torch.allclose(x + x, x * 2), time.time())\n",
}  # fmt: skip
OTHERS = {  # by style: the exercise, and a submission that must pass
    "a tile of rows": ("softmax", '''
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * cols + col, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(row < rows, x, 0.0)  # a row that is not there has no infinite maximum
    power = tl.exp2((x - tl.max(x, axis=1, keep_dims=True)) * 1.4426950408889634)
    tl.store(out_ptr + row * cols + col, power / tl.sum(power, axis=1, keep_dims=True), mask=inside)

def softmax(x, out):
    rows, cols = x.shape
    kernel[(triton.cdiv(rows, 2),)](x, out, rows, cols, ROWS=2, COLS=triton.next_power_of_2(cols), num_warps=8)
'''),
    "a row in chunks": ("row_sum", '''
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, cols, stride, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([CHUNK], dtype=tl.float32)
    for start in range(0, cols, CHUNK):
        col = start + tl.arange(0, CHUNK)
        total += tl.load(x_ptr + row * stride + col, mask=col < cols, other=0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total))

def row_sum(x, out):
    kernel[x.shape[:1]](x, out, x.size(1), x.stride(0), CHUNK=512)
'''),
    "one's own reduction (Welford)": ("layer_norm", '''
import torch
import triton
import triton.language as tl

@triton.jit
def joined(mean_a, squares_a, n_a, mean_b, squares_b, n_b):
    n = n_a + n_b
    share = n_b / tl.maximum(n, 1.0)
    apart = mean_b - mean_a
    return mean_a + apart * share, squares_a + squares_b + apart * apart * n_a * share, n

@triton.jit
def kernel(x_ptr, w_ptr, b_ptr, out_ptr, cols, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0).to(tl.float32)
    mean, squares, n = tl.reduce((x, tl.zeros_like(x), mask.to(tl.float32)), 0, joined)
    y = (x - mean) * tl.rsqrt(squares / n + 1e-5) * tl.load(w_ptr + col, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + col, y + tl.load(b_ptr + col, mask=mask, other=0).to(tl.float32), mask=mask)

def layer_norm(x, weight, bias, out):
    rows, cols = x.shape
    block = triton.next_power_of_2(cols)
    kernel[(rows,)](x, weight, bias, out, cols, x.stride(0), out.stride(0), BLOCK=block)
'''),
    "one's own scan": ("compact", find("compact").solution().replace(
        "@triton.jit", "@triton.jit\ndef plus(a, b):\n    return a + b\n\n\n@triton.jit", 1
    ).replace("tl.cumsum(keep, axis=0)", "tl.associative_scan(keep, 0, plus)")),
    "a descriptor made of a tensor": ("copy", '''
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    out.store([start], x.load([start]))

def copy(x, out):
    blocks = (triton.cdiv(x.numel(), 256),)
    kernel[blocks](TensorDescriptor.from_tensor(x, [256]), TensorDescriptor(out, [x.numel()], [1], [256]), BLOCK=256)
'''),
}  # fmt: skip
