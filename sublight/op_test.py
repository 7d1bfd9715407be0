"""What users write (shapes, data types, names) is read as they mean it, or refused in a line that says how to."""

from __future__ import annotations

from typing import Any

import pytest

from sublight.cost import Cost, parse_dtype, shape_text
from sublight.errors import BadInput, nearest
from sublight.op import Op, Plan, Provider


def op(*shapes: dict[str, int], **more: Any) -> Op:
    """An op of which only the shapes matter: needs no torch."""

    def never(*_: Any) -> Any:
        raise AssertionError("reading a shape calls nothing of the op")

    return Op(
        name="softmax",
        summary="",
        reference=never,
        call=never,
        plan=lambda *_: Plan(provider="torch", reason=""),
        providers={"sublight": Provider(launch=never, kernels=())},
        inputs=never,
        cost=never,
        shapes=shapes,
        test_shapes=(),
        **more,
    )


ROWS = op({"rows": 4096, "cols": 1024}, {"rows": 1, "cols": 2})
FLAT = op({"numel": 65536})
OPTIONS = op({"rows": 4, "cols": 8, "group": 32, "bits": 4}, options={"group": (32, 128), "bits": (4, 8)})


def test_keys_are_those_of_the_first_shape() -> None:
    assert ROWS.keys == ("rows", "cols")
    assert FLAT.keys == ("numel",)


@pytest.mark.parametrize(
    ("words", "rows", "cols"),
    [
        ("4096x1024", 4096, 1024),
        ("4096X1024", 4096, 1024),
        ("1x1", 1, 1),
        ("2^18x64Ki", 262144, 65536),
        ("4k x 1.5k", 4000, 1500),
        ("rows=8,cols=16", 8, 16),
        ("cols=16,rows=8", 8, 16),
        (" cols = 2^4 , rows = 8 ", 8, 16),
    ],
)
def test_a_shape_is_read(words: str, rows: int, cols: int) -> None:
    shape = ROWS.parse_shape(words)
    assert shape == {"rows": rows, "cols": cols}
    assert tuple(shape) == ROWS.keys, "in the op's order, whatever the user's"


@pytest.mark.parametrize(("words", "numel"), [("65536", 65536), ("2^20", 2**20), ("numel=1Mi", 2**20)])
def test_a_flat_shape_is_one_number(words: str, numel: int) -> None:
    assert FLAT.parse_shape(words) == {"numel": numel}


@pytest.mark.parametrize(
    ("words", "group", "bits"),
    [("2x3", 32, 4), ("2x3,bits=8", 32, 8), ("2x3,bits=8,group=128", 128, 8), ("group=128,cols=3,rows=2", 128, 4)],
)
def test_options_are_read_beside_the_sizes_and_have_defaults(words: str, group: int, bits: int) -> None:
    assert OPTIONS.parse_shape(words) == {"rows": 2, "cols": 3, "group": group, "bits": bits}


def test_an_option_with_a_value_that_the_op_does_not_know_is_refused_with_those_it_does() -> None:
    with pytest.raises(BadInput, match=r"bits=3 is none of softmax's: use 4, 8"):
        OPTIONS.parse_shape("2x3,bits=3")


def test_an_ops_own_words_for_data_types_come_first() -> None:
    packed = op({"rows": 1}, dtypes={"w4a16": ("int4", "bfloat16"), "bfloat16": ("bfloat16", "bfloat16")})
    assert packed.parse_dtype("w4a16") == "w4a16" and packed.parse_dtype("bf16") == "bfloat16"
    with pytest.raises(BadInput, match="float32"):
        packed.parse_dtype("float32")


@pytest.mark.parametrize(
    "words",
    ["", "x", "2x3,rows=2", "2x3,2",
     "4096", "1x2x3", "axb", "-1x2", "0x5", "5x0", "4096,1024", "rows=1", "rows=1,cols=2,k=3", "rows=1,k=3",
     "rows=1,cols", "rows=1,cols=", "rows=0,cols=4", "=1", "=", "rows=1;cols=2"],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused_with_an_example(words: str) -> None:
    with pytest.raises(BadInput) as error:
        ROWS.parse_shape(words)
    message = str(error.value)
    assert f"shape {words!r} does not fit softmax: write 4096x1024 or rows=4096,cols=1024" in message
    assert "\n" not in message
    assert error.value.__suppress_context__ or error.value.__context__ is None, "no second traceback"


def test_the_example_that_is_offered_is_accepted() -> None:
    with pytest.raises(BadInput) as error:
        ROWS.parse_shape("?")
    first, second = str(error.value).split("write ")[1].split(" or ")
    assert ROWS.parse_shape(first) == ROWS.parse_shape(second) == ROWS.shapes[0]


def test_shape_text_is_read_back() -> None:
    for shape in ({"rows": 3, "cols": 50257}, {"rows": 1, "cols": 1}):
        assert ROWS.parse_shape(shape_text(shape)) == shape


@pytest.mark.parametrize(
    ("words", "dtype"),
    [("float32", "float32"), ("FP32", "float32"), ("half", "float16"), ("fp16", "float16"), ("BF16", "bfloat16"),
     ("float", "float32"), ("bfloat16", "bfloat16")],
)  # fmt: skip
def test_a_data_type_is_read(words: str, dtype: str) -> None:
    assert parse_dtype(words) == dtype


@pytest.mark.parametrize(("words", "meant"), [("blfoat16", "bfloat16"), ("fp23", "fp32"), ("flaot32", "float32")])
def test_an_unknown_data_type_names_the_nearest(words: str, meant: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_dtype(words)
    message = str(error.value)
    assert message.startswith(f"unknown data type {words!r}: did you mean {meant}")
    assert "\n" not in message
    assert parse_dtype(meant)


def test_float64_is_no_data_type_of_ours() -> None:
    with pytest.raises(BadInput, match="unknown data type 'float64'"):
        parse_dtype("float64")


def test_nearest_names_the_closest_first_or_all() -> None:
    known = ["add", "softmax", "layer_norm", "rms_norm"]
    assert nearest("sofmax", known) == "softmax"
    assert nearest("rmsnorm", known).split(", ")[0] == "rms_norm"
    assert nearest("zzz", known) == "add, softmax, layer_norm, rms_norm"


def test_cost_adds_up() -> None:
    cost = Cost(read_bytes=30, write_bytes=12, flops={"vector_fp32": 5.0, "matmul_bf16": 2.0})
    assert (cost.bytes, cost.total_flops, cost.launches) == (42, 7.0, 1)
    assert Cost(read_bytes=0, write_bytes=0).total_flops == 0
