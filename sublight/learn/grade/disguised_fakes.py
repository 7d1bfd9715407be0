"""Cheats in disguise: names that stand for something else, and kernels that know where nobody looks at the numbers.

Beside them honest submissions in styles that look alike, which must pass.
"""

from __future__ import annotations

from sublight.learn.grade.fakes import HEAD, Cheat, _add, _kernel

_FORGED = "launch(x, x, out)\nif 'Interpreted' in repr(add_kernel):\n    "
_LOADS = "mask = place < n\nx = tl.load(x_ptr + place, mask=mask)\ny = tl.load(y_ptr + place, mask=mask)\n"
_STORE = "tl.store(out_ptr + place, x + y, mask=mask)"
_WIDE = "place = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)"  # slow
_HELPER = """
@triton.jit
def probe(x_ptr):
    pass

SLOW = tl.constexpr('Interpreted' in repr(probe))

@triton.jit
def place_of(BLOCK: tl.constexpr):
    if SLOW:
        return tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)
    else:
        return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
"""
_FACTORY = """
def made(is_slow):
    if is_slow:
        @triton.jit
        def place_of(BLOCK: tl.constexpr):
            return tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)
    else:
        @triton.jit
        def place_of(BLOCK: tl.constexpr):
            return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return place_of
"""
_PLACE = "place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"


def _by(place: str, before: str = "", parameter: str = "", argument: str = "") -> str:
    """The kernel of HEAD with its elements found in another way, by a function or an argument more."""
    start, _, rest = HEAD.partition("@triton.jit")
    rest = rest.replace(_PLACE, place).replace("BLOCK: tl.constexpr):", f"BLOCK: tl.constexpr{parameter}):")
    rest = rest.replace("BLOCK=1024)", f"BLOCK=1024{argument})")
    return f"{start}{before}\n@triton.jit{rest}\ndef add(x, y, out):\n    launch(x, y, out)\n"


SCANNED = (
    Cheat(name="numpy behind a function's self", kinds=("scan",), word="`self`",
          source=_add(_FORGED + "look(out)[:] = look(x) + look(y)", "def look(self):\n    return self.numpy()\n")),
    Cheat(name="numpy behind a lambda's self", kinds=("scan",), word="`self`",
          source=_add(_FORGED + "LOOK(out)[:] = 0", "LOOK = lambda self: self.numpy()\n")),
    Cheat(name="numpy behind a class's name", kinds=("scan",), word="`out` must keep its meaning",
          source=_add(_FORGED + "out.numpy()[:] = 0", "class out:\n    pass\n")),
    Cheat(name="a tensor in place of a method's object", kinds=("scan",), word="`A.look`",
          source=_add(_FORGED + "A.look(out)[:] = 0", "class A:\n    def look(self):\n        return self.numpy()\n")),
    Cheat(name="a method kept while its class is made", kinds=("scan",), word="`look`",
          source=_add(_FORGED + "KEPT[0](out)[:] = 0", "KEPT = []\n\nclass A:\n    def look(self):\n"
                      "        return self.numpy()\n\n    KEPT.append(look)\n")),
    Cheat(name="a method behind a decorator", kinds=("scan",), word="`self`",
          source=_add(_FORGED + "KEPT[0](out)[:] = 0", "KEPT = []\n\ndef property(f):\n    KEPT.append(f)\n\n"
                      "class A:\n    @property\n    def look(self):\n        return self.numpy()\n")),
    Cheat(name="a class that is a tensor", kinds=("scan",), word="`class A(torch.Tensor)`",
          source=_add(_FORGED + "A.numpy(out)[:] = 0", "class A(torch.Tensor):\n    pass\n")),
    Cheat(name="attributes by a format", kinds=("scan",), word="`class A(str)`",
          source=_add("launch(x, y, out)\nA.format('{0.__globals__}', launch)", "class A(str):\n    pass\n")),
    Cheat(name="numpy behind a module's name", kinds=("scan",), word="`tl` must keep its meaning",
          source=_add(_FORGED + "look(out)[:] = 0", "def look(tl):\n    return tl.numpy()\n")),
    Cheat(name="two modules of one name", kinds=("scan",), word="`m` must keep its meaning",
          source=_add("launch(x, y, out)\nm.add(x, y, out=out)",
                      "import torch as m\n\ndef never():\n    import triton.language as m\n")),
    Cheat(name="Python that runs in a kernel", kinds=("scan",), word="triton.constexpr_function",
          source=_by("place = place_of(BLOCK)", "@triton.constexpr_function\ndef place_of(block):\n    return 1\n")),
)  # fmt: skip
RUN = (
    Cheat(name="a promise that is not kept", kinds=("kernel",), word="tl.multiple_of(…, 16) is not true",
          source=_kernel(f"{_LOADS}shift = tl.multiple_of(n % 7, 16)\n"
                         "x += 0 * tl.load(x_ptr + (place + shift) % n, mask=mask)\n" + _STORE)),
)  # fmt: skip
COMPILED = (
    Cheat(name="a helper's constant tells where it is compiled", kinds=("launch",), word="other kernels when it",
          source=_by("place = place_of(BLOCK)", _HELPER)),
    Cheat(name="another helper of the same name where it is compiled", kinds=("launch",), word="other kernels when it",
          source=_by("place = WAY(BLOCK)", _FACTORY, ", WAY: tl.constexpr",
                     ", WAY=made('Interpreted' in repr(add_kernel))")),
    Cheat(name="addresses tell where it is followed", kinds=("compile",), word="makes a number of an address",
          source=_by(f"if tl.abs(x_ptr.to(tl.int64) - y_ptr.to(tl.int64)) < 2 ** 36:\n        {_WIDE}\n    else:\n"
                     f"        {_PLACE}")),
    Cheat(name="an address as a number", kinds=("compile",), word="makes a number of an address",
          source=_by(f"if at % 4096 == 0:\n        {_WIDE}\n    else:\n        {_PLACE}", "", ", at",
                     ", at=x.data_ptr()")),
    Cheat(name="a promise that is not kept at the timed size", kinds=("kernel",), word="tl.max_constancy(…, 4) is not",
          source=_kernel(f"{_LOADS}third = tl.max_constancy(place // 3, 4)\nx += 0 * third\n{_STORE}")),
    Cheat(name="torch fills before the kernel stores", kinds=("goal",), word="out is filled (zero_)",
          source=_add("out.zero_()\nlaunch(x, y, out)")),
)  # fmt: skip
CHEATS = (*SCANNED, *RUN, *COMPILED)

HONEST = {  # by style: each adds, and must pass
    "another name for tl": HEAD.replace("tl", "T") + "def add(x, y, out):\n    launch(x, y, out)\n",
    "promises": _by(f"start = tl.multiple_of(tl.program_id(0) * BLOCK, BLOCK)\n    tl.assume(n > 0)\n    "
                    f"{_PLACE.replace('tl.program_id(0) * BLOCK', 'start')}\n"
                    "    place = tl.max_contiguous(place, BLOCK)"),
    "promises of a block that wraps round": _by(f"{_PLACE}\n    wrapped = tl.max_contiguous("
                                                "tl.multiple_of(place % n, BLOCK), BLOCK)")
    .replace("x_ptr + place", "x_ptr + wrapped"),
    "objects with methods": _by(_PLACE, "class Way:\n    warps = 8\n\n    def __init__(self, block):\n"
                                "        self.block = block\n\n    @property\n    def half(self):\n"
                                "        return self.block // 2\n\n    def __call__(self, n):\n"
                                "        return (triton.cdiv(n, 2 * self.half),)\n\n"
                                "class Narrow(Way):\n    warps = 4\n")
    .replace("(triton.cdiv(out.numel(), 1024),)", "Narrow(1024)(out.numel())"),
    "a function as a constant": _by("place = WAY(BLOCK)", f"@triton.jit\ndef way(BLOCK: tl.constexpr):\n"
                                    f"    return {_PLACE.removeprefix('place = ')}\n",
                                    ", WAY: tl.constexpr", ", WAY=way"),
    "a tuple of addresses": _by(_PLACE).replace("x_ptr, y_ptr, out_ptr, n, BLOCK: t", "ptrs, n, BLOCK: t")
    .replace("x_ptr +", "ptrs[0] +").replace("y_ptr +", "ptrs[1] +").replace("out_ptr +", "ptrs[2] +")
    .replace("(x, y, out, out.numel()", "((x, y, out), out.numel()"),
    "two launches of one kernel": HEAD + "def add(x, y, out):\n    half = out.numel() // 2\n"
    "    launch(x[:half], y[:half], out[:half])\n    launch(x[half:], y[half:], out[half:])\n",
    "blocks in pipelined turns": _by(f"{_PLACE}").replace(
        "    place = tl.program_id(0) * BLOCK", "    for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), "
        "tl.num_programs(0), num_stages=2):\n      place = block * BLOCK").replace("\n    mask", "\n      mask")
    .replace("\n    x = ", "\n      x = ").replace("\n    y = ", "\n      y = ").replace("\n    tl.st", "\n      tl.st")
    .replace("(triton.cdiv(out.numel(), 1024),)", "(min(1056, triton.cdiv(out.numel(), 1024)),)"),
}  # fmt: skip
