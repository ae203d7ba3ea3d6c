# SPDX-License-Identifier: Apache-2.0
"""Every wrong argument is refused by one sentence that names it."""

import math
from dataclasses import replace

import pytest
import torch

from rlk.arguments import (
    check_gradients,
    check_scalar,
    check_scalars,
    check_tensors,
    dtype_name,
    output_dtype,
    output_shape,
    plain_floats,
)
from rlk.errors import ArgumentError, RlkError
from rlk.execution import Execution
from rlk.operator import FLOATS, Limit, Scalar, Tensor
from rlk.test_support import tiny_operator

OPERATOR = tiny_operator(
    "tiny",
    inputs=(
        Tensor("x", ("...", "N"), FLOATS, gradient="row"),
        Tensor("gate", ("...", "N"), ("=x",), gradient="row"),
        Tensor("level", ("...",), ("float32",)),
        Tensor("weight", ("N",), ("=x", "float32"), gradient="parameter"),
        Tensor("table", ("N", "M"), ("float32", "int64")),
    ),
    scalars=(
        Scalar("eps", 1e-6, minimum=0.0),
        Scalar("shift", 0.0),
        Scalar("activation", "silu", choices=("silu", "sigmoid"), aliases={"swish": "silu"}),
        Scalar("offset", 1.0, fixed=True),
    ),
    outputs=(
        Tensor("y", ("...", "N"), ("=x",)),
        Tensor("norm", ("...", "M"), ("=weight",)),
    ),
    saved=(Tensor("rstd", ("...",), ("float32",)),),
)
SCALARS = {"eps": 1e-6, "shift": 0.0, "activation": "silu", "offset": 1.0}


def tensors(*leading, **changes):
    """Fitting inputs with N = 4, M = 5, some of them replaced."""
    fitting = {
        "x": torch.zeros(*leading, 4),
        "gate": torch.zeros(*leading, 4),
        "level": torch.zeros(leading),
        "weight": torch.zeros(4),
        "table": torch.zeros(4, 5),
    }
    return list({**fitting, **changes}.values())


def refused(call, *arguments):
    with pytest.raises(ArgumentError) as caught:
        call(OPERATOR, *arguments)
    assert isinstance(caught.value, RlkError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("leading", "rows"), [((), 1), ((3,), 3), ((2, 3), 6), ((0,), 0), ((2, 0, 3), 0), ((1,), 1)]
)
def test_check_tensors_fitting_ones_bind_the_symbols(leading, rows):
    assert check_tensors(OPERATOR, tensors(*leading)) == {"N": 4, "M": 5, "T": rows}


HALF = torch.zeros(2, 3, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": [1.0]}, "x must be a tensor, got list"),
        ({"weight": None}, "weight must be a tensor, got NoneType"),
        ({"x": torch.eye(4).to_sparse()}, "x must be a dense tensor, got torch.sparse_coo"),
        ({"x": HALF.double()}, "x must be float32 or bfloat16 or float16, got float64"),
        ({"x": HALF.int()}, "x must be float32 or bfloat16 or float16, got int32"),
        ({"gate": HALF}, "gate must be float32 like x, got float16"),
        ({"weight": HALF[0, 0]}, "weight must be float32 like x, got float16"),
        (
            {"x": HALF, "gate": HALF, "weight": HALF[0, 0].bfloat16()},
            "weight must be float16 like x or float32, got bfloat16",
        ),
        ({"table": torch.zeros(4, 5).int()}, "table must be float32 or int64, got int32"),
        ({"x": torch.zeros(())}, "x must be [..., N], got []"),
        ({"x": torch.zeros(2, 0)}, "x must be [..., N] with no empty row, got [2, 0]"),
        ({"gate": torch.zeros(2, 3, 5)}, "gate must be [..., N] with N=4, got [2, 3, 5]"),
        ({"gate": torch.zeros(3, 2, 4)}, "gate must be [2, 3, 4] like x, got [3, 2, 4]"),
        ({"gate": torch.zeros(6, 4)}, "gate must be [2, 3, 4] like x, got [6, 4]"),
        ({"level": torch.zeros(2, 4)}, "level must be [2, 3] like x, got [2, 4]"),
        ({"level": torch.zeros(2, 3, 1)}, "level must be [2, 3] like x, got [2, 3, 1]"),
        ({"weight": torch.zeros(5)}, "weight must be [N] with N=4, got [5]"),
        ({"weight": torch.zeros(1, 4)}, "weight must be [N] with N=4, got [1, 4]"),
        ({"weight": torch.zeros(())}, "weight must be [N] with N=4, got []"),
        ({"table": torch.zeros(5, 4)}, "table must be [N, M] with N=4, got [5, 4]"),
        ({"weight": torch.zeros(4, device="meta")}, "weight must be on cpu like x, got meta"),
        (
            {"level": torch.zeros(2, 3, requires_grad=True)},
            "level must be without gradient, got requires_grad=True",
        ),
    ],
)
def test_check_tensors_wrong_one_is_refused_by_name(changes, message):
    assert refused(check_tensors, tensors(2, 3, **changes)) == f"tiny: {message}"


def test_check_tensors_float32_parameter_of_low_precision_rows_is_accepted():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = HALF.to(dtype)
        for weight in (torch.zeros(4), torch.zeros(4, dtype=dtype)):
            given = tensors(2, 3, x=x, gate=x, weight=weight)
            assert check_tensors(OPERATOR, given) == {"N": 4, "M": 5, "T": 6}


def test_check_tensors_repeated_symbol_must_have_one_value():
    square = tiny_operator("square", inputs=(Tensor("x", ("N", "N"), FLOATS),))
    assert check_tensors(square, [torch.zeros(3, 3)]) == {"N": 3}
    with pytest.raises(ArgumentError) as caught:
        check_tensors(square, [torch.zeros(3, 2)])
    assert str(caught.value) == "square: x must be [N, N], got [3, 2]"


def test_check_tensors_first_axes_of_different_rank_share_leading_axes():
    heads = tiny_operator(
        "heads",
        inputs=(
            Tensor("q", ("...", "H", "D"), FLOATS),
            Tensor("position", ("...", "A"), ("int64",)),
        ),
    )
    position = torch.zeros(2, 3, 1, dtype=torch.int64)
    assert check_tensors(heads, [torch.zeros(2, 3, 4, 5), position])["T"] == 6
    with pytest.raises(ArgumentError) as caught:
        check_tensors(heads, [torch.zeros(2, 6, 4, 5), position])
    assert str(caught.value) == "heads: position must be [2, 6, A] like q, got [2, 3, 1]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": -1e-9}, "eps must be a finite float32 of at least 0.0, got -1e-09"),
        ({"eps": float("nan")}, "eps must be a finite float32 of at least 0.0, got nan"),
        ({"eps": float("inf")}, "eps must be a finite float32 of at least 0.0, got inf"),
        ({"eps": 1e39}, "eps must be a finite float32 of at least 0.0, got 1e+39"),
        ({"eps": 10**39}, f"eps must be a finite float32 of at least 0.0, got {10**39}"),
        ({"shift": -1e39}, "shift must be a finite float32, got -1e+39"),
        ({"shift": float("-inf")}, "shift must be a finite float32, got -inf"),
        ({"eps": True}, "eps must be a number, got True"),
        ({"eps": "1e-6"}, "eps must be a number, got '1e-6'"),
        ({"eps": None}, "eps must be a number, got None"),
        ({"eps": 1j}, "eps must be a number, got 1j"),
        (
            {"activation": "relu"},
            "activation must be one of silu, sigmoid, swish, got 'relu'",
        ),
        ({"activation": 1}, "activation must be one of silu, sigmoid, swish, got 1"),
        ({"activation": None}, "activation must be one of silu, sigmoid, swish, got None"),
        ({"offset": 0.0}, "offset must be 1.0, got 0.0"),
    ],
)
def test_check_scalars_wrong_value_is_refused_by_name(changes, message):
    assert refused(check_scalars, {**SCALARS, **changes}) == f"tiny: {message}"


def test_check_scalars_accepted_values_have_one_type():
    largest = torch.finfo(torch.float32).max
    given = {"eps": 0, "shift": -largest, "activation": "swish", "offset": 1}
    checked = check_scalars(OPERATOR, given)
    assert checked == {"eps": 0.0, "shift": -largest, "activation": "silu", "offset": 1.0}
    assert {type(v) for v in checked.values()} == {float, str}


@pytest.mark.parametrize(
    "declared", [*OPERATOR.scalars, Scalar("flag", True)], ids=lambda s: s.name
)
def test_plain_floats_are_those_that_a_check_returns_as_they_are(declared):
    least, largest = plain_floats(declared)
    top = torch.finfo(torch.float32).max
    for value in (0.0, -0.0, 1.0, -1.0, 5e-324, top, -top, 2 * top, math.inf, -math.inf, math.nan):
        plain = least <= value <= largest
        if plain:
            assert check_scalar(OPERATOR, declared, value) is value
        elif declared.name in ("eps", "shift"):
            with pytest.raises(ArgumentError):
                check_scalar(OPERATOR, declared, value)
    assert (least <= 1.0 <= largest) == (declared.name in ("eps", "shift"))


def test_check_scalars_flag_is_true_or_false_and_nothing_else():
    declared = replace(OPERATOR, scalars=(Scalar("adjacent", True),))
    assert check_scalars(declared, {"adjacent": False}) == {"adjacent": False}
    for value in (1, 0.0, "True", None):
        with pytest.raises(ArgumentError) as caught:
            check_scalars(declared, {"adjacent": value})
        assert str(caught.value) == f"tiny: adjacent must be True or False, got {value!r}"


def test_check_tensors_beyond_a_limit_are_refused_by_the_tensor_that_has_the_size():
    declared = replace(
        OPERATOR,
        inputs=(Tensor("x", ("...", "N"), FLOATS), Tensor("table", ("M",), FLOATS)),
        limits=(Limit(2, "M", "N"),),
    )
    x = torch.zeros(3, 8)
    assert check_tensors(declared, (x, torch.zeros(4)))["M"] == 4
    with pytest.raises(ArgumentError) as caught:
        check_tensors(declared, (x, torch.zeros(5)))
    assert str(caught.value) == "tiny: table must be such that 2 * M <= N = 8, got M = 5"


def test_check_tensors_innermost_axis_beyond_32_bits_is_refused():
    declared = replace(OPERATOR, inputs=(Tensor("x", ("...", "N"), FLOATS),))
    longest = torch.empty(1, device="meta").expand(2**32, 2**31 - 1)
    assert check_tensors(declared, (longest,)) == {"N": 2**31 - 1, "T": 2**32}
    with pytest.raises(ArgumentError) as caught:
        check_tensors(declared, (torch.empty(1, device="meta").expand(1, 2**31),))
    assert str(caught.value) == "tiny: x must be such that N < 2^31, got N = 2147483648"


@pytest.mark.parametrize("size", [3, 5])
def test_check_tensors_off_an_exact_limit_are_refused_by_the_tensor_that_is_to_fit(size):
    declared = replace(
        OPERATOR,
        inputs=(Tensor("x", ("...", "M"), FLOATS), Tensor("table", ("N",), FLOATS)),
        limits=(Limit(2, "M", "N", exactly=True),),
    )
    x = torch.zeros(3, 2)
    assert check_tensors(declared, (x, torch.zeros(4)))["N"] == 4
    with pytest.raises(ArgumentError) as caught:
        check_tensors(declared, (x, torch.zeros(size)))
    assert str(caught.value) == f"tiny: table must be [N] with N = 2 * M = 4, got N = {size}"


def test_arguments_fixed_scalar_is_supplied_and_cannot_be_set():
    execution = Execution(OPERATOR)
    free = {name: value for name, value in SCALARS.items() if name != "offset"}
    given = tensors(2)
    arguments = execution.arguments(given, {**free, "activation": "swish"}, "golden")
    assert arguments[len(given) :] == (1e-6, 0.0, "silu", 1.0, "golden")
    with pytest.raises(ArgumentError, match="tiny: offset must be 1.0, got 2.0"):
        execution.arguments(given, {**free, "offset": 2.0}, "golden")


@pytest.mark.parametrize("leading", [(), (3,), (2, 0), (2, 3)])
def test_output_shape_every_output_has_the_leading_axes(leading):
    given = tensors(*leading, x=torch.zeros(*leading, 4).half())
    y, norm, rstd = OPERATOR.outputs + OPERATOR.saved
    assert output_shape(OPERATOR, y, given) == (*leading, 4)
    assert output_shape(OPERATOR, norm, given) == (*leading, 5)
    assert output_shape(OPERATOR, rstd, given) == leading
    found = [output_dtype(OPERATOR, t, given) for t in (y, norm, rstd)]
    assert found == [torch.float16, torch.float32, torch.float32]


FITTING = (torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))


@pytest.mark.parametrize(
    ("place", "gradient", "message"),
    [
        (0, torch.zeros(2, 4), "gradient of y must be [2, 3, 4], got [2, 4]"),
        (1, torch.zeros(2, 3, 4), "gradient of norm must be [2, 3, 5], got [2, 3, 4]"),
        (0, FITTING[0].half(), "gradient of y must be float32, got float16"),
        (1, FITTING[1].to("meta"), "gradient of norm must be on cpu, got meta"),
        (0, FITTING[0].to_sparse(), "gradient of y must be a dense tensor, got torch.sparse_coo"),
    ],
)
def test_check_gradients_wrong_one_is_refused_by_name(place, gradient, message):
    check_gradients(OPERATOR, FITTING, tensors(2, 3))
    gradients = list(FITTING)
    gradients[place] = gradient
    assert refused(check_gradients, gradients, tensors(2, 3)) == f"tiny: {message}"


def test_dtype_name_any_dtype_is_short():
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name(torch.complex64) == "complex64"
