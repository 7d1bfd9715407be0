"""What `import sublight` offers beside the ops: measure a call, this machine, the ops; ask what a call gets."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.errors import BadInput, one_of
from sublight.timing import measure
from sublight.trace.capture.profile import Profile as _Profile
from sublight.trace.capture.profile import range, step

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation
    from sublight.fix.compressed import Compressed
    from sublight.fix.patch.record import Patch
    from sublight.limits.probe import Kind
    from sublight.op import Op, Plan
    from sublight.ops.matmul.einsum import EinsumPlan
    from sublight.predict.module import ModulePrediction
    from sublight.results import Limits, Run
    from sublight.trace.record import Trace

__all__ = [
    "bench_ops",
    "explain",
    "graph",
    "load_ipython_extension",
    "load_quantized",
    "measure",
    "measure_limits",
    "patch",
    "patched",
    "predict_module",
    "profile",
    "quantize",
    "range",
    "save_quantized",
    "sparsify",
    "step",
    "unpatch",
    "why",
]


def why(op: str | Op, *args: Any, **options: Any) -> Plan | EinsumPlan:
    """Which implementation `op` runs for these arguments, and why; for `einsum` the path and each step's cost."""
    from sublight import ops
    from sublight.ops.matmul import einsum

    if op == "einsum":
        return einsum.plan(*args, **options)
    record = ops.find(op) if isinstance(op, str) else op
    return record.plan(*args, **options)


def measure_limits(*, device: Kind | None = None, quick: bool = False, only: Iterable[str] = ()) -> Limits:
    """What `sublight limits` measures; the GPU where there is one, unless `device` says otherwise."""
    from sublight.limits import run

    return run.run(kind=device, quick=quick, only=only)


def bench_ops(*names: str, device: Kind | None = None, shapes: Sequence[str] = (), quick: bool = False) -> Run:
    """What `sublight bench` measures: these ops, or all, against their floors on this machine."""
    from sublight import bench, ops
    from sublight.limits import run

    machine = run.this_machine(device)
    chosen = [ops.find(name) for name in names] or ops.OPS
    return bench.run(chosen, machine=machine, limits=bench.limits_for(machine), shapes=shapes, quick=quick)


def explain(trace: str | Path | Trace, *, gpu: str = "", limits: str = "") -> Explanation:
    """Explain a trace as `sublight explain` does: a file, a folder with one file a rank, or what `profile` captured."""
    from sublight.diagnose.explain import explain as explain_traces
    from sublight.report.explain import page as explain_page
    from sublight.trace.load import load

    traces = load(Path(trace)) if isinstance(trace, str | Path) else [trace]
    return replace(explain_traces(traces, gpu=gpu, limits_file=limits), drawn_by=explain_page.repr_html)


def patch(
    target: Any,
    batch: Any = None,
    *,
    verify: Any = None,
    measure: Any = None,
    only: Sequence[str] | None = None,
    quiet: bool = False,
) -> Patch:
    """Swap in our ops where they win, in a model or an optimizer, and print what was done unless `quiet`.

    `batch` (a tensor, a tuple or a mapping of the model's arguments) tells the shapes; `verify` is a batch on which the
    patched model must be right, `measure` one on which it must not be slower: else the swap is undone.
    `only=["norm", "mlp"]` uses these rules of `sublight.fix.patch.rules` alone.
    """
    import torch

    from sublight.fix.patch import model as patching
    from sublight.fix.patch import optimizer
    from sublight.fix.patch.rules import RULES
    from sublight.report import patch as report
    from sublight.report.draw import console

    if isinstance(target, torch.optim.Optimizer):
        if any(each is not None for each in (batch, verify, measure, only)):
            raise BadInput("an optimizer is patched as it is: batch, verify, measure and only are for a model")
        found = optimizer.patch_optimizer(target)
    else:
        names = tuple(rule.name for rule in RULES)
        if not isinstance(only, Iterable | None):
            raise BadInput(f"only={only!r}: a list of rules, such as ['norm', 'mlp']")
        chosen = names if only is None else [one_of("rule", name, names) for name in only]
        rules = tuple(rule for rule in RULES if rule.name in chosen)
        found = patching.patch(target, batch, verify=verify, measure=measure, rules=rules)
    if not quiet:
        console.stdout().print(report.page(found))
    return found


def predict_module(module: Any, *args: Any, gpu: str = "h100", train: bool = False, **named: Any) -> ModulePrediction:
    """How long one pass of a module takes on a GPU that need not be here: it runs once on meta tensors.

    `gpu` is a known one or a file of figures (my.toml); `train` adds the backward pass.
    """
    from sublight.predict import machine
    from sublight.predict import module as modules

    return modules.predict_module(module, *args, machine=machine.find(gpu), train=train, **named)


def unpatch(target: Any) -> int:
    """Undo `patch`, `quantize` and `sparsify`; returns how many modules (or optimizers) were restored."""
    import torch

    from sublight.fix.patch import model as patching
    from sublight.fix.patch import optimizer
    from sublight.fix.quantize.model import unquantize
    from sublight.fix.sparsify.model import densify

    if isinstance(target, torch.optim.Optimizer):
        return int(optimizer.unpatch_optimizer(target))
    return patching.unpatch(target) + unquantize(target) + densify(target)


def quantize(
    model: Any,
    how: str = "w4a16",
    *,
    group: int = 128,
    skip: Sequence[str] | None = None,
    verify: Any = None,
    rounds: int = 20,
    keep: bool = True,
    quiet: bool = False,
) -> Compressed:
    """Pack the linear layers of a model to a few bits, in place, and print what was done unless `quiet`.

    `how` is w8a16, w4a16, w2a16 or w1a16, or, for activations of 8 bits, too, w8a8 (int8) or fp8. `skip` names layers
    to leave (else the output head is left), `verify` is a batch whose change of loss is reported. `unpatch` gives the
    weights back, unless `keep` is False.
    """
    from sublight.fix.quantize import model as packing
    from sublight.report import compressed as report
    from sublight.report.draw import console

    done = packing.quantize(model, how, group=group, skip=skip, verify=verify, rounds=rounds, keep=keep)
    if not quiet:
        console.stdout().print(report.page(done))
    return done


def sparsify(
    model: Any,
    how: str = "2:4",
    *,
    skip: Sequence[str] | None = None,
    verify: Any = None,
    keep: bool = True,
    training: bool = False,
    quiet: bool = False,
) -> Compressed:
    """Keep the two largest of every four weights of a model's linear layers, in place, and print what was done.

    The sparse tensor cores multiply them where the GPU has such, else they are multiplied dense, with the reason.
    `skip` names layers to leave (else the output head is left), `verify` is a batch whose change of loss is reported.
    `unpatch` gives the weights back, unless `keep` is False. `training=True` chooses the two anew in every step, from
    dense weights that an optimizer trains.
    """
    from sublight.fix.sparsify import model as sparse
    from sublight.report import compressed as report
    from sublight.report.draw import console

    done = sparse.sparsify(model, how, skip=skip, verify=verify, keep=keep, training=training)
    if not quiet:
        console.stdout().print(report.page(done))
    return done


def save_quantized(model: Any, file: str | Path) -> None:
    """Save a whole model with packed or sparse layers as one safetensors file."""
    from sublight.fix.quantize import files

    files.save(model, file)


def load_quantized(model: Any, file: str | Path) -> int:
    """Load a file of `save_quantized` into an unpacked model of its kind; returns how many layers are packed now."""
    from sublight.fix.quantize import files

    return files.load(model, file)


def patched(model: Any, batch: Any = None) -> AbstractContextManager[Patch]:
    """`with sublight.patched(model):` the model is patched inside the block, and afterwards as it was before."""
    from sublight.fix.patch import model as patching

    return patching.patched(model, batch)


def graph(target: Any, **options: Any) -> Any:
    """Replay a function's or module's calls as CUDA graphs, one for each shape; see sublight.fix.graph.callable."""
    from sublight.fix.graph.callable import graph as capture

    return capture(target, **options)


class Profile(_Profile):
    """A profiled block that explains itself; a notebook shows its report."""

    def __enter__(self) -> Profile:
        self.__dict__.pop("explanation", None)  # a block that is profiled again needs a new explanation
        super().__enter__()
        return self

    @functools.cached_property
    def explanation(self) -> Explanation:
        if self.trace is None:
            raise BadInput(f"nothing to explain: {self._why_not()}")
        return explain(self.trace)

    def _why_not(self) -> str:
        if self.captured is None:
            return "the block has not ended"
        why = self.captured.reason or " ".join(self.captured.notes) or "nothing was recorded"
        return why.replace("the script", "the block")

    def __str__(self) -> str:
        """The report, as `sublight explain` prints it."""
        if self.trace is None:
            return f"no report: {self._why_not()}"
        from sublight.report.draw import console
        from sublight.report.explain import terminal

        out = console.stdout()
        with out.capture() as captured:
            out.print(terminal.page(self.explanation))
        return captured.get().rstrip("\n")

    def _repr_html_(self) -> str | None:
        return self.explanation._repr_html_()


def profile(**options: Any) -> Profile:
    """`with sublight.profile() as p:` records a block; then `print(p)` shows the report; `p.explanation`, `p.trace`.

    Options: `warmup`, `timed` and `profiled` steps (3, 5, 3), `stacks` (source lines), `time_limit_s`. Steps are found
    by `sublight.step()` calls, else by the optimizer's steps, else by calls of the outermost module.
    """
    return Profile(**options)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext sublight` in a notebook: `%%pyprof` profiles its cell; it takes --trace, --counts, --rate HZ."""
    from sublight.report.pyprof import notebook

    shell.register_magic_function(functools.partial(notebook.pyprof, shell), magic_kind="cell", magic_name="pyprof")
