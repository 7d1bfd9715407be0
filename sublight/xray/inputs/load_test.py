"""Whatever can be named becomes Code, and what cannot is told in one line.

What compiles is asked in a process of its own, once: where there is no GPU, this one has Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.errors import BadInput
from sublight.gpus import find
from sublight.xray.inputs.load import load, load_kernel
from sublight.xray.record import Code

ROOT = Path(__file__).parents[3]
KERNELS = """\
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DEVICE = triton.runtime.driver.active.get_active_torch_device()

@triton.jit
def _wrong(x):
    return x.nothing

@triton.jit
def plain(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": 512}, num_warps=2), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def tuned(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

@triton.heuristics({"BLOCK": lambda known: 2 * known["HALF"]})
@triton.jit
def guessed(x_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr = tl.float32):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at).to(KIND) * HALF)

@gluon.jit
def laid(x_ptr, n: tl.int32, BLOCK: gl.constexpr, num_warps: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    at = gl.arange(0, BLOCK, layout)
    gl.store(x_ptr + at, at, mask=at < n)

@gluon.jit
def mislaid(x_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [16], [4], [0])
    gl.store(x_ptr + gl.arange(0, BLOCK, layout), 0)

@triton.jit
def calls_wrong(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, _wrong(at))

@triton.jit
def no_instruction(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, tl.inline_asm_elementwise("bogus.f32 $0, $1;", "=r,r", [tl.load(at)], tl.float32, True, 1))
"""
SCRIPT = """\
import sys
import torch
import triton
from kernels import DEVICE, plain, tuned

n = int(sys.argv[1])
x = torch.ones(n, device="cuda")
y = torch.zeros(n + 1, device=DEVICE)
tuned[lambda known: (triton.cdiv(n, known["BLOCK"]), 3)](x, y, n)
plain[(1,)](x, y[1:], n, BLOCK=128, num_warps=1)
plain[(1,)](x, y[1:], n, BLOCK=128, num_warps=1)
assert DEVICE.type == "cuda" or y.sum() == 0, "nothing is made without a GPU"
print("said by the script")
if len(sys.argv) > 2:
    raise KeyError(sys.argv[2])
"""
PLAIN = "x_ptr:*fp32, y_ptr:*fp32, n:i32"


def python(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), own.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=folder, env=own)


def told(code: Code) -> dict[str, Any]:
    used = code.resources
    return {
        **{"name": code.name, "gpu": code.gpu.key, "grid": code.grid, "file": Path(code.file).name},
        **{"signature": dict(code.signature), "constants": {k: str(v) for k, v in code.constants.items()}},
        **{"options": dict(code.options), "threads": used.threads, "spill": used.spill_bytes},
        **{"registers": used.registers, "shared": used.shared_bytes, "barriers": used.barriers},
        "arguments": {
            name: [list(value.shape), value.device.type] if isinstance(value, torch.Tensor) else value
            for name, value in code.arguments.items()
            if isinstance(value, torch.Tensor | int)
        },
        "texts": [word in text for word, text in (("EXIT", code.sass), (".entry", code.ptx), ("ttg.", code.ttgir))],
        "wide": "ld.global.v4" in code.ptx,
        "sm": f".target sm_{code.capability}" in code.ptx,
    }


def asked(target: str, *gpus: str, **options: Any) -> Any:
    """What the codes are, or the complaint; and what was told beside it."""
    said: list[str] = []
    try:
        codes = load(target, [find(gpu) for gpu in gpus], tell=said.append, **options)
    except BadInput as error:
        return {"bad": str(error), "said": said}
    return {"codes": [told(code) for code in codes], "said": said}


def compiled_kernel() -> Any:
    import kernels  # type: ignore[import-not-found]

    from sublight.backend.record import Launch
    from sublight.xray import build

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    launch = Launch(
        kernel="plain", jit=kernels.plain, signature=signature, constants={"BLOCK": 128}, aligned=(), options={}
    )
    return told(load_kernel(build.compiled(launch, 90), "h200"))


def kernel_objects() -> Any:
    import kernels

    told_as_text = load_kernel(kernels.plain, "h100", signature=PLAIN, constants={"BLOCK": 1024, "num_warps": 8})
    told_as_map = load_kernel(kernels.tuned, signature={"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"})
    return [told(told_as_text), told(told_as_map)]


def bad_object() -> Any:
    try:
        load_kernel(print)
    except BadInput as error:
        return str(error)


QUESTIONS = {
    "op": lambda: asked("softmax:_row_kernel", "h200"),
    "op_at": lambda: asked("softmax", "rtx4090", shape="64x512", dtype="fp32"),
    "op_elsewhere": lambda: asked("softmax:_row_kernel", "h200", shape="64x512"),
    "op_kernel": lambda: asked("softmax:_rowe_kernel", "h200"),
    "plain": lambda: asked(
        "kernels.py:plain", "h200", "b200", signature=PLAIN, constants=["BLOCK=1024", "num_warps=2"]
    ),
    "aligned": lambda: asked(
        "kernels.py:plain", "h200", signature="*fp32, *fp32:16, i32:16, 1024", constants=["num_warps=2"]
    ),
    "unaligned": lambda: asked(
        "kernels.py:plain", "h200", signature="*fp32:1, *fp32:1, i32:16", constants=["BLOCK=1024, num_warps=2"]
    ),
    "even": lambda: asked("kernels.py:plain", "h200", signature=PLAIN, constants=["BLOCK=1024"], numbers={"n": 4096}),
    "odd": lambda: asked("kernels.py:plain", "h200", signature=PLAIN, constants=["BLOCK=1024"], numbers={"2": 4095}),
    "of_one": lambda: asked("kernels.py:plain", "h200", signature=PLAIN, constants=["BLOCK=64"], numbers={"n": 1}),
    "too_large": lambda: asked(
        "kernels.py:plain", "h200", signature=PLAIN, constants=["BLOCK=64"], numbers={"n": 5 * 10**9}
    ),
    "no_multiple": lambda: asked(
        "kernels.py:plain", "h200", signature=f"{PLAIN}:16", constants=["BLOCK=64"], numbers={"n": 100}
    ),
    "tuned": lambda: asked("kernels.py:tuned", "a100", signature="x_ptr:*bf16, y_ptr:*bf16, n:i32"),
    "guessed": lambda: asked("kernels.py:guessed", "a100", signature="x_ptr:*fp16", constants=["HALF=64"]),
    "typed": lambda: asked(
        "kernels.py:guessed", "a100", signature="x_ptr:*fp16", constants=["HALF=64", "KIND=tl.bfloat16"]
    ),
    "gluon": lambda: asked("kernels.py:laid", "h100", signature="x_ptr:*i32", constants=["BLOCK=256", "num_warps=8"]),
    "missing": lambda: asked("kernels.py:plain", "h100", signature="n:i64"),
    "no_type": lambda: asked("kernels.py:plain", "h100", signature="bf61, *fp32, i32", constants=["BLOCK=64"]),
    "which": lambda: asked("kernels.py", "h100"),
    "no_kernel": lambda: asked("kernels.py:plane", "h100"),
    "no_constant": lambda: asked("kernels.py:plain", "h100", signature=PLAIN, constants=["BLOK=4"]),
    "calls_wrong": lambda: asked("kernels.py:calls_wrong", "h100", signature="*i32", constants=["BLOCK=64"]),
    "mislaid": lambda: asked("kernels.py:mislaid", "h100", signature="*i32", constants=["BLOCK=64"]),
    "no_instruction": lambda: asked("kernels.py:no_instruction", "h100", signature="*fp32", constants=["BLOCK=64"]),
    "no_power": lambda: asked("kernels.py:plain", "h100", signature=PLAIN, constants=["BLOCK=100"]),
    "v100": lambda: asked("kernels.py:plain", "v100", signature=PLAIN, constants=["BLOCK=64"]),
    "amd": lambda: asked("kernels.py:plain", "mi300x", signature=PLAIN, constants=["BLOCK=64"]),
    "raises": lambda: asked("raises.py", "h100"),
    "unclosed": lambda: asked("unclosed.py", "h100"),
    "empty": lambda: asked("empty.py", "h100"),
    "recorded": lambda: asked("script.py", "h100", "a100", record=True, arguments=["1000"]),
    "one_recorded": lambda: asked("script.py:plain", "h100", record=True, arguments=["1000", "late"]),
    "early": lambda: asked("script.py", "h100", record=True),
    "nothing_launched": lambda: asked("empty.py", "h100", record=True),
    "not_launched": lambda: asked("script.py:other", "h100", record=True, arguments=["1000"]),
    "compiled": compiled_kernel,
    "objects": kernel_objects,
    "bad_object": bad_object,
    "cache": lambda: asked("cache:plain", "h200"),
    "cache_of_another": lambda: asked("cache:plain", "rtx5090"),
    "cache_without": lambda: asked("cache:nothing", "h200"),
}


def answer_all() -> None:
    """In the other process; on the real stdout there is nothing but the answers."""
    given: dict[str, Any] = {}
    for name, question in QUESTIONS.items():
        try:
            given[name] = question()
        except BaseException:
            given[name] = traceback.format_exc()
    print(json.dumps(given))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("user")
    files = {"kernels.py": KERNELS, "script.py": SCRIPT, "empty.py": "import triton\n"}
    files |= {"raises.py": "import triton\n\nx = {}['key']\n", "unclosed.py": "import triton\nx = (\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    done = python(
        folder,
        "-c",
        "from sublight.xray.inputs import load_test; load_test.answer_all()",
        TRITON_CACHE_DIR=str(folder / "cache"),
    )
    assert done.returncode == 0, done.stderr
    assert "PassManager" not in done.stderr and "Generated by" not in done.stderr, "no dump reaches the screen"
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def one(answer: Any) -> Any:
    assert isinstance(answer, dict), answer
    assert "codes" in answer, answer.get("bad")
    (code,) = answer["codes"]
    return code


# ------------------------------------------------------------------------------------------------ our ops


def test_an_op_has_its_most_demanding_shape_with_arguments_that_are_there(answers: dict[str, Any]) -> None:
    code = one(answers["op"])
    assert code["name"] == "_row_kernel" and code["signature"]["x_ptr"] == "*bf16" and code["file"] == "softmax.py"
    assert int(code["constants"]["BLOCK"]) >= 4096, "the widest row that it takes"
    (rows, cols), device = code["arguments"]["x_ptr"]
    assert device == "cpu" and code["arguments"]["cols"] == cols and code["grid"] == [rows], "as many as it has"
    assert code["texts"] == [True, True, True] and code["sm"] and code["wide"]
    assert code["threads"] == 32 * code["options"]["num_warps"] and code["spill"] == 0 and code["barriers"] == 1


def test_an_op_at_a_shape_has_what_is_launched_there(answers: dict[str, Any]) -> None:
    codes = answers["op_at"]["codes"]
    assert [code["name"] for code in codes] == ["_tile_kernel", "_tile_backward_kernel"]
    assert {code["signature"]["y_ptr"] for code in codes} == {"*fp32"}
    assert all(code["sm"] and code["arguments"]["y_ptr"] == [[64, 512], "cpu"] for code in codes), "sm_89"


def test_a_kernel_that_an_op_does_not_launch_is_told(answers: dict[str, Any]) -> None:
    said = answers["op_elsewhere"]["bad"]
    assert said.startswith(
        "softmax launches _tile_backward_kernel, _tile_kernel at 64x512 in bfloat16, not _row_kernel"
    )
    assert answers["op_kernel"]["bad"].startswith("softmax has no kernel '_rowe_kernel': it has _row_kernel")


# ------------------------------------------------------------------------------------------------ Python files


def test_a_kernel_of_a_file_is_compiled_for_every_gpu(answers: dict[str, Any]) -> None:
    h200, b200 = answers["plain"]["codes"]
    assert (h200["gpu"], b200["gpu"]) == ("h200", "b200") and h200["sm"] and b200["sm"]
    assert h200["constants"] == {"BLOCK": "1024"} and h200["options"]["num_warps"] == 2 and h200["threads"] == 64
    assert h200["signature"] == {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    assert h200["grid"] == [] and h200["arguments"] == {}
    assert h200["file"] == "kernels.py" and h200["texts"] == [True, True, True]


def test_pointers_are_aligned_unless_they_say_otherwise(answers: dict[str, Any]) -> None:
    assert one(answers["aligned"])["wide"]
    assert not one(answers["unaligned"])["wide"], "*fp32:1 may start anywhere, so no load is of 16 bytes"
    assert not answers["plain"]["codes"][0]["wide"], "n may be odd, so its mask breaks the vector"


def test_a_number_is_specialised_on_as_a_launch_would(answers: dict[str, Any]) -> None:
    assert one(answers["even"])["wide"], "4096 is a multiple of 16, so its mask keeps the vector whole"
    assert not one(answers["odd"])["wide"]
    assert one(answers["of_one"])["constants"] == {"BLOCK": "64", "n": "1"}


def test_decorators_annotations_and_defaults_give_what_was_not_given(answers: dict[str, Any]) -> None:
    tuned = one(answers["tuned"])
    assert (tuned["constants"], tuned["options"]["num_warps"]) == ({"BLOCK": "512"}, 2), "the first configuration"
    assert one(answers["guessed"])["constants"] == {"HALF": "64", "KIND": "fp32", "BLOCK": "128"}
    assert one(answers["typed"])["constants"]["KIND"] == "bf16"
    gluon = one(answers["gluon"])
    assert gluon["threads"] == 256 and gluon["signature"] == {"x_ptr": "*i32", "n": "i32"}


BAD = {
    "missing": "plain in kernels.py needs a type for x_ptr, y_ptr and a value for BLOCK: add --sig 'x_ptr:*bf16, "
    "y_ptr:*bf16, n:i64' --const BLOCK=1024",
    "which": "kernels.py has 7 kernels, name one of plain, tuned, guessed, laid, mislaid, calls_wrong, no_instruction; "
    "plain in kernels.py needs a type for x_ptr, y_ptr, n and a value for BLOCK: sublight xray --record SCRIPT.py "
    "takes them from a script that calls plain, or add --sig 'x_ptr:*bf16, y_ptr:*bf16, n:i32' --const BLOCK=1024",
    "no_type": "--sig: 'bf61' is no type: use one of bf16",
    "too_large": "--arg n=5000000000 does not fit i32: write n:i64 in --sig",
    "no_multiple": "--arg n=100 is no multiple of 16, as --sig has it: leave :16 out there",
    "no_kernel": "kernels.py has no kernel 'plane': it has plain",
    "no_constant": "--const BLOK: plain has no such constant: it has BLOCK, num_warps, num_stages, num_ctas, maxnreg",
    "v100": "nothing compiles for v100 (sm_70) any more: use a GPU from sm_75 on",
    "amd": "xray reads NVIDIA code, mi300x is AMD's: use --gpu h100, a100, …",
    "empty": "empty.py defines no kernel: decorate one with @triton.jit, or name the file that does",
    "nothing_launched": "empty.py launches no Triton kernel on h100: does it need an argument, or another GPU (--gpu)?",
    "not_launched": "script.py launches no 'other': it launches tuned, plain",
    "cache_without": "cache has no kernel 'nothing': it has",
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_loaded_is_told_in_one_line(answers: dict[str, Any], name: str) -> None:
    assert answers[name]["bad"].startswith(BAD[name])
    assert "\n" not in answers[name]["bad"]


def _line(words: str) -> str:
    """Where that is first in the kernels' file."""
    return f"kernels.py:{next(line for line, text in enumerate(KERNELS.splitlines(), 1) if words in text)}"


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("calls_wrong", f"{_line('return x.nothing')}: calls_wrong", "'tensor' object has no attribute 'nothing'"),
        ("mislaid", f"{_line('gl.arange(0, BLOCK, layout), 0')}: mislaid", "invalid layout"),
        ("no_instruction", f"{_line('bogus')}: no_instruction", "ptxas: Not a name of any known instruction: 'bogus'"),
        ("no_power", f"{_line('at = tl.arange')}: plain", "arange's range must be a power of 2"),
        ("raises", "raises.py:3: raises.py does not import", "KeyError: 'key'"),
        ("unclosed", "unclosed.py:2: unclosed.py does not import", "'(' was never closed"),
        ("early", "script.py:6: script.py fails", "IndexError: list index out of range; no kernel had been launched"),
    ],
)
def test_a_failure_is_told_at_its_line(answers: dict[str, Any], name: str, place: str, words: str) -> None:
    said = answers[name]["bad"]
    assert place in said and words in said and "\n" not in said


# ------------------------------------------------------------------------------------------------ recorded scripts


def test_a_script_is_recorded_with_grids_and_arguments(answers: dict[str, Any]) -> None:
    codes = answers["recorded"]["codes"]
    assert [(code["name"], code["gpu"]) for code in codes] == [
        (name, gpu) for gpu in ("h100", "a100") for name in ("tuned", "plain")
    ], "each specialisation once"
    tuned, plain = codes[:2]
    assert tuned["grid"] == [2, 3] and tuned["options"]["num_warps"] == 2, "1000 by the first configuration's 512"
    device = tuned["arguments"]["x_ptr"][1]
    assert tuned["arguments"] == {"x_ptr": [[1000], device], "y_ptr": [[1001], device], "n": 1000, "BLOCK": 512}
    assert plain["options"]["num_warps"] == 1 and plain["constants"] == {"BLOCK": "128"}
    assert [words for words in answers["recorded"]["said"] if "is pretended" not in words] == []
    assert answers["plain"]["said"] == ["importing kernels.py runs it"]


def test_what_was_launched_before_a_failure_is_kept(answers: dict[str, Any]) -> None:
    assert one(answers["one_recorded"])["name"] == "plain"
    said = answers["one_recorded"]["said"][-1]
    assert said == "script.py:15: script.py fails: KeyError: 'late'; kept are the 3 launches before it"


# ------------------------------------------------------------------------------------------------ objects, the cache


def test_kernel_objects(answers: dict[str, Any]) -> None:
    plain, tuned = answers["objects"]
    assert (plain["gpu"], plain["threads"], plain["constants"]) == ("h100", 256, {"BLOCK": "1024"})
    assert (tuned["name"], tuned["threads"], tuned["signature"]["x_ptr"]) == ("tuned", 64, "*bf16")
    compiled = answers["compiled"]
    assert (compiled["name"], compiled["gpu"], compiled["threads"]) == ("plain", "h200", 128)
    assert answers["bad_object"].startswith("builtin_function_or_method is no Triton kernel")


def test_the_cache_is_read_newest_first_for_its_own_gpu(answers: dict[str, Any]) -> None:
    codes = answers["cache"]["codes"]
    assert {(code["name"], code["gpu"], code["sm"]) for code in codes} == {("plain", "h200", True)}
    assert [code["threads"] for code in codes][:2] == [256, 128], "kernel_objects was asked after compiled_kernel"
    assert all(code["texts"] == [True, True, True] and code["file"] == "kernels.py" for code in codes)
    said = answers["cache_of_another"]["said"]
    assert said[0].startswith("cache has nothing for rtx5090: shown is what it has, for ")
