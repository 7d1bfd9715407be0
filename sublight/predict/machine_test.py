"""GPUs of the table, of a user's file, and changed ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sublight import cost, gpus
from sublight.errors import BadInput
from sublight.gpus import UnknownGpu
from sublight.predict import expected, machine, table
from sublight.predict.operation import Operation

WHOLE = """
name = "Next year's"
sms = 200
memory_bytes = 200e9
memory_bytes_per_s = 10e12
power_w = 1200
peak_flops = { bf16 = 3e15, fp32 = 1e14 }
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return str(path)


def test_a_file_of_figures(tmp_path: Path) -> None:
    found = machine.find(written(tmp_path, WHOLE))
    assert found.key == "my" and found.gpu.name == "Next year's" and found.gpu.memory_bytes == 200_000_000_000
    assert found.limits.value("matmul_bf16") == 3e15 and found.changed
    assert found.reached("bfloat16") == pytest.approx(3e15 * machine.usual_share())


def test_a_consumer_gpu_by_its_compute_capability(tmp_path: Path) -> None:
    """Its tensor cores wait for its vector units, as an Ampere's do, though a Blackwell's do not."""
    for capability, overlaps in (("10.0", True), ("12.0", False)):
        text = f'architecture = "Blackwell"\ncompute_capability = "{capability}"\n'
        found = machine.find(written(tmp_path, WHOLE + text))
        assert expected.rates_of(found).overlaps == overlaps


def test_like_takes_over_what_is_not_given(tmp_path: Path) -> None:
    found = machine.find(written(tmp_path, 'like = "h100"\nmemory_bytes_per_s = 8e12\n')).gpu
    assert (found.sms, found.memory_bytes_per_s, found.peak_flops["bf16"]) == (132, 8e12, 989.4e12)
    assert "given in my.toml" in found.sources["memory_bytes_per_s"]
    assert not found.reached  # nobody measured this one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sms = 1\n", "lacks memory_bytes, memory_bytes_per_s, peak_flops"),
        (WHOLE + "bandwith = 3\n", "no figure of a GPU"),
        (WHOLE.replace("sms = 200", 'sms = "many"'), "sms = 'many' must be a number"),
        (WHOLE.replace("10e12", "-1"), "must be a number above 0"),
        (WHOLE.replace("{ bf16 = 3e15, fp32 = 1e14 }", "3e15"), "table of rates"),
        ("sms = = 3", "cannot read"),
        ('like = "h999"\n', "unknown GPU"),
        ("like = 3\n", "like = 3 must be text"),
        ('like = "h100"\ncompute_capability = 12\n', "compute_capability = 12 must be text"),
        ('like = "h100"\ncompute_capability = [12]\n', "must be text, as in"),
        ('like = "h100"\nboost_clock_hz = 1.8\n', "boost_clock_hz = 1.8 must be a number of hertz"),
        ('like = "h100"\nmax_clock_dtypes = 3\n', "must be a list of data types"),
        ('like = "h100"\nmemory_bytes_per_s = 1e-300\n', "must be a number from 1 to 1e+21"),
        ('like = "h100"\nsms = 100000\n', "sms = 100000 must be a number from 1 to 10000"),
        ('like = "h100"\nsms = 1e300\n', "must be a number from 1 to 1e+21"),
        ('like = "h100"\npeak_flops = { bf61 = 1e15 }\n', "'bf61', which is no rate of a GPU: did you mean bf16"),
        ('like = "h100"\nreached = { matmul_bf16 = 5e15 }\n', "5e+15, more than the GPU's peak of 9.894e+14"),
        (
            'like = "h100"\nmemory_bytes_per_s = 3.35\n',
            "memory_bytes_per_s = 3.35 must be in bytes a second, as in 3.35e12",
        ),
        ('like = "h100"\nmemory_bytes = 80\n', "memory_bytes = 80 must be in bytes, as in 80e9"),
        ('like = "h100"\nl2_bytes = 50\n', "l2_bytes = 50 must be in bytes"),
        ('like = "h100"\npeak_flops = { bf16 = 989 }\n', "bf16 of peak_flops = 989 must be in FLOP/s, as in 1e15"),
        ('like = "h100"\nreached = { launch_graph_node = 1 }\n', "must be in seconds, as in 1e-6"),
        ('like = "h100"\nreached = { hbm_copy = 3 }\n', "hbm_copy of reached = 3 must be in bytes a second"),
        ('like = "h100"\nsms = 100.7\n', "sms = 100.7 must be a whole number"),
        ('like = "h100"\nreached = { hbm_copy = 1e13 }\n', "more than the GPU's peak of 3.35"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises((BadInput, UnknownGpu)) as caught:
        machine.find(written(tmp_path, text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(BadInput, match="there is no file"):
        machine.find("nowhere.toml")


@pytest.mark.parametrize("words", ["bandwidth", "bandwidth=", "bandwidth=0", "bandwidth=-2x", "l9=2x", "flops=2y"])
def test_a_bad_what_if_is_one_line(words: str) -> None:
    with pytest.raises(BadInput, match="what-if"):
        machine.parse_changes([words])


def test_a_gpu_without_a_data_type() -> None:
    with pytest.raises(BadInput, match="A100 SXM 80GB has no fp8 products: use --dtype bf16 or fp16 or fp32 or int8,"):
        machine.find("a100").rate("float8_e4m3fn")


def test_a_gpu_whose_file_gives_no_products_says_what_to_add(tmp_path: Path) -> None:
    here = machine.find(written(tmp_path, WHOLE.replace("{ bf16 = 3e15, fp32 = 1e14 }", "{ fp64 = 1e14 }")))
    with pytest.raises(BadInput, match="no bf16 products: its peak_flops could give bf16"):
        here.rate("bfloat16")


@pytest.mark.parametrize("name", ["h100", "a100", "b200"])
def test_products_of_16_bits_are_as_fast_as_each_other(name: str) -> None:
    """Only bf16's were measured there; the H100's fp16 floor was below the H200's."""
    here = machine.find(name)
    assert "matmul_fp16" not in here.gpu.reached and "matmul_bf16" in here.gpu.reached
    assert here.rate("float16") == here.rate("bfloat16") and here.reached("float16") == here.reached("bfloat16")


def test_changes_scale_limits_and_figures() -> None:
    here = machine.find("h200")
    more = machine.change(here, {"bandwidth": 2.0, "flops": 3.0})
    assert more.limits.value("hbm_copy") == 2 * (here.limits.value("hbm_copy") or 0)
    assert more.limits.value("matmul_bf16") == 3 * (here.limits.value("matmul_bf16") or 0)
    assert more.peak("bfloat16") == 3 * here.peak("bfloat16") and more.label == "h200 bandwidth x2 flops x3"
    assert machine.change(here, {}) is here


def test_a_calibration_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Its own tables come first: 1.5 times the analytic time, and no figure of the project's."""
    gpu, path = gpus.find("h200"), tmp_path / "mine.json"
    row = next(each for each in table.data()["tables"] if each["kind"] == "product")
    slow = {**row, "gpu": "mine", "values": [math.log(1.5)] * len(row["values"]), "p90_error": 0.07}
    document = {"calibration": machine.CALIBRATION, "gpu": machine.gpu_to_json(replace(gpu, key="mine"))}
    path.write_text(json.dumps({**document, "tables": [slow]}))
    op = Operation(name="up", op="matmul", kind="product", shape={"m": 64, "n": 4096, "k": 4096}, dtype="bfloat16",
                   count=1, cost=cost.find("matmul")({"m": 64, "n": 4096, "k": 4096}, "bfloat16", "fwd"))  # fmt: skip
    found = machine.find(str(path))
    timed = expected.timed(op, found)
    base = expected.timed(op, replace(found, tables=(replace(found.tables[0], values=(0.0,) * len(row["values"])),)))
    assert found.key == "mine" and found.gpu.reached == gpu.reached and timed.how == "measured" and timed.error == 0.07
    assert timed.expected_s == pytest.approx(1.5 * base.expected_s)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"calibration": 1}', '{"calibration": 99, "gpu": {}, "tables": []}'])
def test_what_is_no_calibration_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="--calibrate mine") as caught:
        machine.find(str(path))
    assert "\n" not in str(caught.value)
