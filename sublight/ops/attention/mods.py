"""A caller's own mask and score functions: small Triton functions, which our kernels call for a tile of scores at once.

    mask_mod(batch, head, query, key, *tensors)          whether the query sees the key
    score_mod(score, batch, head, query, key, *tensors)  what takes the score's place

Numbers count from 0, in packed sequences within each. `tensors` are pointers to what the call has as `mod_tensors`. The
same function runs on PyTorch's tensors, with PyTorch's functions in the place of Triton's: so a call without a GPU, and
the float64 truth that kernels are judged by, compute what the caller wrote. PyTorch's ops take no function as an
argument: they get a name, made of the source, and look it up.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch

from sublight.backend import private
from sublight.backend.jit import tl, triton
from sublight.errors import BadInput
from sublight.ops.attention.masks import is_seen
from sublight.ops.attention.mod_slopes import definition_of, names_of, slope_function

MOST_TENSORS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mods:
    """Triton functions, None where there is none. The slope is the score function's derivative by the score; what is
    wrong with it is said where a gradient is wanted first."""

    score: Any = None
    mask: Any = None
    slope: Any = None

    def flags(self) -> dict[str, Any]:
        return {"SCORE_MOD": self.score, "MASK_MOD": self.mask}


NO_MODS = Mods()
_KNOWN: dict[str, Mods] = {"": NO_MODS}  # by name: what the name is made of never changes


def mods_named(name: str) -> Mods:
    if name not in _KNOWN:
        raise BadInput(f"no score or mask function is known as {name!r}: call sublight.attention with it first")
    return _KNOWN[name]


def _identity(function: Any) -> str:
    """A key for a function's source and all that it uses; an interpreted function's address."""
    return str(getattr(function, "cache_key", None) or f"{inspect.getsource(function.fn)} {id(function)}")


@private.disable_dynamo  # type: ignore[untyped-decorator]  # a kernel is no constant to torch.compile: a break
def name_of(score: Any, mask: Any, slope: Any) -> str:
    """The name by which PyTorch's ops know these functions."""
    given = {"score_mod": score, "mask_mod": mask, "score_mod_grad": slope}
    for word, function in given.items():
        if function is not None and not hasattr(function, "fn"):
            raise BadInput(f"{word} is {type(function).__name__}: use a function under @triton.jit")
    if slope is not None and score is None:
        raise BadInput("score_mod_grad without score_mod: give both")
    parts = [f"{word} {_identity(function)}" for word, function in given.items() if function is not None]
    words = "_".join(function.fn.__name__ for function in (score, mask) if function is not None)
    name = f"{words}_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"
    if name not in _KNOWN:
        _KNOWN[name] = Mods(score=score, mask=mask, slope=slope)
    return name


def slope_named(name: str) -> Any:
    """The derivative of the score function of this name: the caller's, or one made of its source; None without."""
    mods = mods_named(name)
    if mods.score is not None and mods.slope is None:
        mods = _KNOWN[name] = Mods(score=mods.score, mask=mods.mask, slope=slope_function(mods.score))
    return mods.slope


@triton.jit
def _modded(MOD: tl.constexpr, scores, entry, heads, query, key, kv_len, a_ptr, b_ptr, TENSORS: tl.constexpr):
    batch, head, at = entry // heads, entry % heads, tl.minimum(key, kv_len - 1)  # the function may load what is there
    if TENSORS == 2:
        return MOD(scores, batch, head, query, at, a_ptr, b_ptr)
    elif TENSORS == 1:
        return MOD(scores, batch, head, query, at, a_ptr)
    else:
        return MOD(scores, batch, head, query, at)


@triton.jit
def modded(
    scores, entry, heads, query, key, kv_len, a_ptr, b_ptr, MOD: tl.constexpr, TENSORS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Scores by the caller's function, which takes and gives natural ones: see `power` for the units of others."""
    if EXACT:
        return _modded(MOD, scores, entry, heads, query, key, kv_len, a_ptr, b_ptr, TENSORS)
    else:
        natural = scores * 0.6931471805599453
        changed = _modded(MOD, natural, entry, heads, query, key, kv_len, a_ptr, b_ptr, TENSORS)
        return changed * 1.4426950408889634


@triton.jit
def slope_at(
    scores, entry, heads, query, key, kv_len, a_ptr, b_ptr, MOD: tl.constexpr, TENSORS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The derivative of what `modded` gives; units cancel."""
    natural = scores if EXACT else scores * 0.6931471805599453
    return _modded(MOD, natural, entry, heads, query, key, kv_len, a_ptr, b_ptr, TENSORS)


@triton.jit
def is_shown(
    position, query, key, kv_len, window, prefix, entry, heads, a_ptr, b_ptr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX: tl.constexpr, MASK_MOD: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Whether a query sees a key, for keys that exist: by the mask, its prefix and the caller's function."""
    seen = is_seen(position, key, window, CAUSAL, WINDOW)
    if PREFIX:
        seen = seen | (key < prefix)
    if MASK_MOD is not None:
        batch, head, at = entry // heads, entry % heads, tl.minimum(key, kv_len - 1)
        if TENSORS == 2:
            seen = seen & MASK_MOD(batch, head, query, at, a_ptr, b_ptr)
        elif TENSORS == 1:
            seen = seen & MASK_MOD(batch, head, query, at, a_ptr)
        else:
            seen = seen & MASK_MOD(batch, head, query, at)
    return seen


@triton.jit
def same_document(batch, head, query, key, document_ptr):
    """Tokens see those of their own document alone: `mod_tensors` has each token's, (length,)."""
    return tl.load(document_ptr + query) == tl.load(document_ptr + key)


@triton.jit
def leaning(score, batch, head, query, key, document_ptr):
    """A bias by distance, steeper for later heads."""
    return score - tl.abs(query - key).to(tl.float32) * (head + 1) * 0.05


class _Pointer:
    """Stands for a pointer to a tensor's first element."""

    def __init__(self, tensor: torch.Tensor, place: Any = 0) -> None:
        self.tensor, self.place = tensor, place

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.tensor, self.place + more)

    __radd__ = __add__


class _Language:
    """Stands for `triton.language`, on PyTorch's tensors; every floating-point type is the scores'."""

    ONE = (
        "exp",
        "exp2",
        "log",
        "log2",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "abs",
        "sigmoid",
        "floor",
        "ceil",
        "tanh",
        "erf",
    )
    KINDS = ("int8", "int16", "int32", "int64")

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like

    def __getattr__(self, name: str) -> Any:
        if name in self.ONE:
            return lambda x: getattr(torch, name)(self._tensor(x))
        if name in self.KINDS:
            return getattr(torch, name)
        if name in ("float16", "bfloat16", "float32", "float64"):
            return self._like.dtype
        if name in ("math", "libdevice"):
            return self
        raise BadInput(f"score_mod or mask_mod uses tl.{name}, which PyTorch's side of it does not know: see docs")

    def _tensor(self, x: Any) -> torch.Tensor:
        return (
            x if isinstance(x, torch.Tensor) else torch.as_tensor(x, device=self._like.device, dtype=self._like.dtype)
        )

    def where(self, condition: Any, one: Any, other: Any) -> torch.Tensor:
        if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor):
            one = self._tensor(one)
        return torch.where(condition, one, other)

    def maximum(self, one: Any, other: Any) -> torch.Tensor:
        return torch.maximum(*self._alike(one, other))

    def minimum(self, one: Any, other: Any) -> torch.Tensor:
        return torch.minimum(*self._alike(one, other))

    def _alike(self, *both: Any) -> tuple[torch.Tensor, ...]:
        kind = next(x for x in both if isinstance(x, torch.Tensor))
        return tuple(x if isinstance(x, torch.Tensor) else torch.full_like(kind, x) for x in both)

    def load(self, pointer: _Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
        flat = pointer.tensor.flatten()
        place = torch.as_tensor(pointer.place, device=flat.device)
        values = flat[place if mask is None else torch.where(mask, place, 0)]
        values = values.to(self._like.dtype) if values.is_floating_point() else values
        return values if mask is None else torch.where(mask, values, other)


def in_torch(function: Any, like: torch.Tensor) -> Any:
    """A Triton function on PyTorch's tensors; `like` has the scores' data type and device."""
    plain, language = function.fn, _Language(like)

    def stand_in(value: Any) -> Any:
        if isinstance(value, types.ModuleType) and value.__name__.startswith("triton"):
            return types.SimpleNamespace(language=language, jit=None) if value.__name__ == "triton" else language
        if isinstance(value, tl.constexpr):
            return value.value
        return in_torch(value, like) if hasattr(value, "fn") else value

    code = plain.__code__
    used = {*code.co_names, *code.co_freevars}
    names = {name: stand_in(value) for name, value in names_of(plain).items() if name in used}
    tree = _OutOfPlace().visit(definition_of(plain))
    exec(compile(ast.fix_missing_locations(ast.Module(body=[tree], type_ignores=[])), plain.__name__, "exec"), names)
    return names[plain.__name__]


class _OutOfPlace(ast.NodeTransformer):
    """x += y as x = x + y: Triton's tensors are values, PyTorch's would change under the caller's hands."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        left = ast.parse(ast.unparse(node.target), mode="eval").body
        return ast.Assign(targets=[node.target], value=ast.BinOp(left=left, op=node.op, right=node.value))


def mod_arguments(
    batch: int, heads: int, q_len: int, kv_len: int, tensors: tuple[torch.Tensor, ...], device: torch.device,
    sequence: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Numbers of batch entry, head, query and key, of shapes that together are (batch, heads, q_len, kv_len)."""
    entry, head, query, key = (torch.arange(n, device=device) for n in (batch, heads, q_len, kv_len))
    pointers = (_Pointer(x) for x in tensors)
    return (entry + sequence)[:, None, None, None], head[:, None, None], query[:, None], key, *pointers


def are_given(mods: dict[str, Any]) -> bool:
    """Whether a call has any of what `check_mods` takes."""
    return any(isinstance(value, torch.Tensor) or value not in (None, ()) for value in mods.values())


def check_mods(
    q: torch.Tensor, sequences: int, causal: bool, window: int, *, prefix: torch.Tensor | int | None = None,
    score_mod: Any = None, mask_mod: Any = None, score_mod_grad: Any = None,
    mod_tensors: tuple[torch.Tensor, ...] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """Prefix, tensors and name as the ops take them, or one line on what is wrong."""
    if prefix is not None and (not causal or window):
        raise BadInput("prefix goes with causal=True and without a window: use mask_mod for other masks")
    if isinstance(prefix, int):
        if prefix < 0:
            raise BadInput(f"prefix {prefix}: use the number of keys that all see, 0 or more")
        prefix = torch.full((sequences,), prefix, dtype=torch.int32, device=q.device)
    whole = (torch.int32, torch.int64)
    if prefix is not None and (prefix.shape != (sequences,) or prefix.dtype not in whole or prefix.device != q.device):
        given = f"{prefix.dtype} {tuple(prefix.shape)} on {prefix.device}"
        raise BadInput(f"prefix is {given}: use a number, or int32 ({sequences},) on {q.device}")
    if mod_tensors and score_mod is None and mask_mod is None:
        raise BadInput("mod_tensors without mask_mod or score_mod would not be read: leave them out")
    if len(mod_tensors) > MOST_TENSORS:
        raise BadInput(f"{len(mod_tensors)} mod_tensors: use {MOST_TENSORS} at most, put together what is alike")
    for i, x in enumerate(mod_tensors):
        if x.device != q.device or not x.is_contiguous() or not x.numel():
            raise BadInput(f"mod_tensors[{i}] is {tuple(x.shape)} on {x.device}: use one piece on {q.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise BadInput(f"mod_tensors[{i}] has no gradient here: detach() it")
    a, b = (*mod_tensors, None, None)[:2]
    is_plain = score_mod is None and mask_mod is None and score_mod_grad is None
    name = "" if is_plain else name_of(score_mod, mask_mod, score_mod_grad)
    return None if prefix is None else prefix.contiguous(), a, b, name
