"""The tools that `sublight mcp` offers: each runs a verb in a process of its own, and gives the gist of its JSON.

A process of its own, because stdout belongs to the protocol, torch stays out of the server, and what takes too long can
be ended. Whatever could run a user's code needs the user's leave: a folder of `--allow-run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublight import units
from sublight.errors import BadInput
from sublight.learn.record import CUDA, Exercise

TOOLS = ("limits", "explain", "bench", "why", "xray", "predict", "learn_check")
MAY_RUN = ("explain", "xray", "learn_check")  # tools that may run a user's code, where the user allows it
WITHOUT_RUNNING = (".ptx", ".cubin")  # files that xray reads without running anything
ENTRIES = 40  # a list in a result is cut to so many; the file has all
FINDINGS, PLACES = 5, 3
_GPU = ("key", "name", "compute_capability", "sms", "memory_bytes", "memory_bytes_per_s", "l2_bytes", "peak_flops",
        "pcie_bytes_per_s", "nvlink_bytes_per_s", "power_w", "reached")  # fmt: skip
_KERNEL = ("name", "gpu", "registers", "spill_bytes", "shared_bytes", "occupancy", "limited_by", "what_if", "waves",
           "in_flight", "findings", "roof", "notes")  # fmt: skip
_ROW = ("op", "direction", "shape", "dtype", "provider", "kernel", "median_s", "floor_s", "fraction", "unavailable")
_STEP = ("device", "limits_from", "steps", "step_s", "floor_s", "fraction", "verdict", "sentence", "unsure",
         "combined_saving_s", "breakdown", "caveats", "notes")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the server may do, and where it writes."""

    allowed: tuple[Path, ...]  # folders whose code may run
    pages: Path
    limit_s: float
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one run at a time: two would slow each other

    async def limits(self, gpu: str = "", measure: bool = False) -> dict[str, Any]:
        """What a GPU or this machine can do: bandwidths, FLOP rates, latencies.

        With gpu (h200, a100, …) what is known of that one; else what was measured on this machine before. With
        measure=true this machine is measured again, which takes about 20 s.
        """
        if gpu:
            known = await self._verb("gpus", [_plain("gpu", gpu)])
            return {**_only(known["rows"][0], _GPU), **_files(known)}
        result = await self._verb("limits", ["--quick" if measure else "--kept"], page="--html")
        result["limits"] = [
            {
                "name": each["name"],
                "value": each["value"],
                "text": None if each["value"] is None else units.text(each["value"], each["unit"]),
                "of_spec": each["fraction_of_spec"],
                "unavailable": each["unavailable"],
            }
            for each in result["limits"]
        ]
        return result

    async def explain(
        self, target: str, args: list[str] | None = None, gpu: str = "", steps: int | None = None
    ) -> dict[str, Any]:
        """Why a training or inference step is slow, what to change, and what each change saves.

        target is a trace (a file of torch.profiler or Nsight Systems, or a folder of them), or a Python script, which
        is run with args; scripts need the user's leave (--allow-run).
        """
        from sublight.trace.load import is_trace

        path = _existing(target)
        words = [*([f"--steps={steps}"] if steps else []), *([f"--gpu={gpu}"] if gpu else []), str(path)]
        if not is_trace(path):
            self._must_be_allowed(path)
            words += ["--", *(args or [])]
        elif args:
            raise BadInput(f"{target} is a trace, which takes no args: leave them out")
        result = await self._verb("explain", words, page="--html")
        findings = [
            {
                **{name: each[name] for name in ("id", "title", "saving_s", "evidence", "fix")},
                "places": each["places"][:PLACES],
            }
            for each in result["findings"][:FINDINGS]
        ]
        return {**_only(result, _STEP), "findings": findings, **_files(result)}

    async def bench(
        self, ops: list[str], shape: str = "", dtype: str = "", device: str = "", results: str = ""
    ) -> dict[str, Any]:
        """Time ops (softmax, rms_norm, matmul, …) on this machine against their floors, beside PyTorch's.

        shape is 4096x1024 or rows=4096,cols=1024; dtype fp32, fp16 or bf16; device cuda or cpu. With results, a file of
        `sublight bench --json`, its rows are shown and nothing is measured.
        """
        options = {"shape": shape, "dtype": dtype, "device": device, "from": str(_existing(results)) if results else ""}
        words = [f"--{name}={value}" for name, value in options.items() if value]
        if not ops and not results:
            raise BadInput("ops is empty: name those to time, such as softmax; all of them take long")
        if not results:
            words.append("--quick")
        result = await self._verb("bench", [*words, "--", *ops], page="--plot")
        rows = [_only(row, _ROW) for row in result["rows"]]
        shown = {"rows": rows[:ENTRIES], **({"left_out": len(rows) - ENTRIES} if len(rows) > ENTRIES else {})}
        return {**_only(result, ("gpu", "driver", "torch", "triton", "commit", "date")), **shown, **_files(result)}

    async def why(self, op: str, shape: str = "", dtype: str = "bf16", gpu: str = "") -> dict[str, Any]:
        """Which kernel a call of an op gets at this shape on a GPU, which need not be here, and the reason."""
        options = {"shape": shape, "dtype": dtype, "gpu": gpu}
        return await self._verb("why", [*(f"--{name}={value}" for name, value in options.items() if value), "--", op])

    async def xray(
        self,
        target: str,
        gpu: str = "",
        shape: str = "",
        dtype: str = "",
        signature: str = "",
        constants: list[str] | None = None,
        record: bool = False,
        args: list[str] | None = None,
    ) -> dict[str, Any]:
        """What a kernel compiles to, without a GPU: registers, spills, occupancy, sectors, bank conflicts, its roof.

        target is an op (softmax, softmax:_row_kernel; with shape and dtype), a .ptx or .cubin, or FILE.py:KERNEL with a
        signature ('x:*bf16, n:i32') and constants (BLOCK=1024), or a script whose launches are recorded (record=true,
        with args). Python and CUDA C++ files run or compile code, and need the user's leave (--allow-run).
        """
        options = {"gpu": gpu, "shape": shape, "dtype": dtype, "sig": signature}
        words = [f"--{name}={value}" for name, value in options.items() if value]
        words += [f"--const={each}" for each in constants or ()]
        path = _file_of(_plain("target", target))
        if path is not None and (path.is_dir() or path.suffix in WITHOUT_RUNNING):
            words.append("--no-exec")
        elif path is not None:
            self._must_be_allowed(path)
        elif "/" in target or Path(target.partition(":")[0]).suffix:
            raise BadInput(f"there is no file {target.partition(':')[0]!r}: name one, or an op such as softmax")
        words += [*(["--record"] if record else []), target, *(["--", *args] if args else [])]
        result = await self._verb("xray", words, page="--html")
        return {"kernels": [_only(kernel, _KERNEL) for kernel in result["kernels"][:ENTRIES]], **_files(result)}

    async def predict(
        self, model: str, gpu: str = "h200", batch: str = "1", context: str = "", mode: str = "", weights: str = ""
    ) -> dict[str, Any]:
        """What a model (llama-3-8b, …, or a config.json) will do on GPUs that need not be here: time, memory, tokens/s.

        gpu, batch, context and mode (prefill, decode, train, forward) take several words with commas between.
        """
        options = {"gpu": gpu, "batch": batch, "context": context, "mode": mode, "weights": weights}
        words = [f"--{name}={value}" for name, value in options.items() if value]
        result = await self._verb("predict", [*words, "--", model], page="--html")
        rows = [{name: row[name] for name in row if name != "ops"} for row in result["predictions"]]
        shown = {"predictions": rows[:ENTRIES], **({"left_out": len(rows) - ENTRIES} if len(rows) > ENTRIES else {})}
        return {"model": result["model"], "precision": result["precision"], **shown, **_files(result)}

    async def learn_check(self, file: str, exercise: str = "", gpu: str = "") -> dict[str, Any]:
        """Check a learner's kernel (learn/NAME.py): what is wrong and where, or the fraction of a GPU's limit.

        The code is run in the grader's confined process, which needs the user's leave (--allow-run); without it, only
        what the code may not contain is named.
        """
        from sublight.learn.exercises import find

        path = _existing(file)
        named = path.name if path.suffix == CUDA else path.stem
        chosen = find(exercise or named)
        if chosen.name != named:
            raise BadInput(f"{file} is not named after {chosen.name}: call it {chosen.file}")
        if not self._is_allowed(path):
            return _scanned(path, chosen)
        gpu_words = [f"--gpu={gpu}"] if gpu else []
        result = await self._verb("learn", [*gpu_words, "--", "check", str(path)])
        return {**result, "page": _page_of(chosen)}

    # -------------------------------------------------------------------------------------------- leave, processes

    def _is_allowed(self, path: Path) -> bool:
        """Whether a path lies in an allowed folder, links resolved: a link in one does not allow what it points to."""
        return any(path.resolve().is_relative_to(folder) for folder in self.allowed)

    def _must_be_allowed(self, path: Path) -> None:
        if not self._is_allowed(path):
            folders = ", ".join(map(str, self.allowed)) or "no folder"
            raise BadInput(
                f"{path} would be run, and the user allows that in {folders}: "
                f"only the user can, by starting `sublight mcp --allow-run {path.resolve().parent}`"
            )

    async def _verb(self, verb: str, words: Sequence[str], *, page: str = "") -> dict[str, Any]:
        """Run a verb; returns its JSON, with the paths of its page and of its data."""
        async with self.turn:
            number = sum(1 for _ in self.pages.glob("*.json")) + 1
            data, html = (self.pages / f"{number:03}-{verb}{ending}" for ending in (".json", ".html"))
            files = [f"--json={data}", *([f"{page}={html}"] if page else [])]
            errors = await self._run([sys.executable, "-m", "sublight", verb, *files, *words])
        if not data.is_file():
            lines = [line for line in errors.splitlines() if line.strip()]
            raise BadInput(lines[-1].removeprefix("sublight: ") if lines else f"`sublight {verb}` gave no result")
        whole = json.loads(data.read_text(encoding="utf-8"))
        whole = {"rows": whole} if isinstance(whole, list) else whole
        return {**whole, "page": str(html) if html.is_file() else None, "data": str(data)}

    async def _run(self, command: Sequence[str]) -> str:
        """Run a process; returns its stderr. It ends with its children at the limit, or when the assistant hangs up."""
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
            )
        except (OSError, ValueError) as error:  # an argument that is too long, or has a zero byte
            raise BadInput(f"no command can be made of these arguments: {error}") from None
        try:
            _, errors = await asyncio.wait_for(process.communicate(), self.limit_s)
        except TimeoutError:
            raise BadInput(f"it took more than {self.limit_s:g} s: `sublight mcp --limit` allows more") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return errors.decode(errors="replace")


def _only(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The entries of these names that exist and are not empty."""
    return {name: data[name] for name in names if data.get(name) not in (None, "", [], {})}


def _files(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("page", "data")}


def _plain(what: str, words: str) -> str:
    """Refuse an option (-x) in the place of a name."""
    if not words or words.startswith("-"):
        raise BadInput(f"{what} {words!r}: name one, without a dash in front")
    return words


def _existing(name: str) -> Path:
    path = os.path.expanduser(_plain("file", name))
    if not os.path.exists(path):  # False also where a name cannot be one: too long, a zero byte, nobody's home
        raise BadInput(f"there is no {name:.200} in {Path.cwd()}: give its path")
    return Path(path)


def _file_of(target: str) -> Path | None:
    """The file or folder that `xray` would take for its target, FILE[:KERNEL]; None: an op, or nothing."""
    parts = target.split(":")
    for count in range(len(parts), 0, -1):
        path = os.path.expanduser(":".join(parts[:count]))
        if os.path.exists(path):
            return Path(path)
    return None


def _page_of(exercise: Exercise) -> str:
    return str(exercise.folder / ("cuda.en.md" if exercise.kind == "cuda" else "en.md"))


def _scanned(path: Path, exercise: Exercise) -> dict[str, Any]:
    """What can be said of a submission without running it."""
    from sublight.learn.grade.cuda.translate import scan as scan_cuda
    from sublight.learn.grade.scan import MODULES, ON_PAPER, scan

    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}; it must be a text file in UTF-8") from None
    if exercise.kind == "cuda":
        faults = scan_cuda(source, exercise.function)
    else:
        faults = scan(source, exercise.name, ON_PAPER if exercise.kind == "paper" else MODULES)
    return {
        "exercise": exercise.name,
        "file": str(path),
        "passed": False,
        "faults": [{"kind": each.kind, "line": each.line or None, "text": each.text} for each in faults],
        "not_run": f"the user has to allow it: sublight mcp --allow-run {path.resolve().parent}",
        "page": _page_of(exercise),
    }
