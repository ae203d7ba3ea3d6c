# SPDX-License-Identifier: Apache-2.0
"""The C struct of a call."""

from dataclasses import replace

import pytest

from rlk.cuda import header
from rlk.errors import BackendError
from rlk.operator import Scalar, Tensor


def test_forward_struct_of_the_demo_has_pointers_first_and_scalars_last(demo):
    assert header.forward_layout(demo).fields == (
        ("const void*", "x"), ("const void*", "weight"), ("void*", "y"), ("void*", "first"),
        ("void*", "stream"),
        ("long long", "x_stride_T"), ("long long", "x_stride_N"), ("long long", "weight_stride_N"),
        ("long long", "T"), ("long long", "N"),
        ("int", "x_dtype"), ("int", "weight_dtype"), ("int", "device"),
        ("float", "shift"), ("int", "mode"),
    )  # fmt: skip


def test_backward_struct_of_the_demo_reads_gradients_inputs_and_saved_state(demo):
    fields = header.backward_layout(demo).fields
    assert fields[:17] == (
        ("const void*", "dy"), ("const void*", "x"), ("const void*", "weight"),
        ("const void*", "first"), ("void*", "dx"), ("long long*", "dweight_state"),
        ("void*", "dweight_sums"), ("void*", "workspace"), ("void*", "stream"),
        ("long long", "dy_stride_T"), ("long long", "dy_stride_N"),
        ("long long", "x_stride_T"), ("long long", "x_stride_N"), ("long long", "weight_stride_N"),
        ("long long", "first_stride_T"), ("long long", "T"), ("long long", "N"),
    )  # fmt: skip
    assert fields[17:21] == (
        ("int", "x_dtype"), ("int", "weight_dtype"), ("int", "dweight_form"), ("int", "device"),
    )  # fmt: skip


def test_struct_size_with_an_odd_number_of_ints_is_padded(demo):
    # Ten fields of 8 bytes and five of 4, rounded up to the alignment of 8.
    assert header.forward_layout(demo).packer.size == 104
    assert "static_assert(sizeof(DemoForward) == 104" in header.header(demo)


@pytest.mark.parametrize("more", [(), (Scalar("adjacent", True),)], ids=["even", "odd"])
@pytest.mark.parametrize("layout", [header.forward_layout, header.backward_layout])
def test_struct_packed_in_three_parts_has_the_same_bytes(demo, layout, more):
    declared = layout(replace(demo, scalars=(*demo.scalars, *more)))
    values = [place + 1 for place, _ in enumerate(declared.fields)]
    last = [name for _, name in declared.fields].index("device")
    between = last + 1 - sum("*" in kind for kind, _ in declared.fields)
    scalars = len(demo.scalars) + len(more)
    parts = values[: -between - scalars], values[-between - scalars : -scalars], values[-scalars:]
    packed = [p.pack(*part) for p, part in zip(declared.packers, parts, strict=True)]
    assert b"".join(packed) == declared.packer.pack(*values)


def test_header_of_an_operator_of_several_words_names_structs_in_camel_case(demo):
    text = header.header(replace(demo, name="two_words"))
    assert "RLK_EXPORT int rlk_two_words_forward(const TwoWordsForward* a);" in text
    assert "long long rlk_two_words_backward_workspace(const TwoWordsBackward* a);" in text
    assert header.header_name(replace(demo, name="two_words")) == "rlk_two_words.h"


def test_header_of_a_choice_numbers_its_values(demo):
    assert "enum { MODE_PLAIN = 0, MODE_NEGATED = 1 };" in header.header(demo)


def test_symbols_with_a_parameter_first_begin_with_rows(demo):
    turned = replace(demo, inputs=demo.inputs[::-1])
    assert header.symbols(turned) == ("T", "N")


def test_struct_with_a_tensor_named_like_another_field_is_refused(demo):
    clash = replace(demo, inputs=(*demo.inputs, Tensor("stream", ("N",), ("=x",))))
    with pytest.raises(BackendError, match="demo: names must be unique .* got stream twice"):
        header.header(clash)


def test_struct_of_rows_on_two_axes_has_a_stride_for_each_and_flags_are_ints(demo):
    scalars = (*demo.scalars, Scalar("adjacent", True))
    declared = replace(demo, row_axes=("B", "S"), scalars=scalars)
    fields = header.forward_layout(declared).fields
    assert [name for kind, name in fields if kind == "long long"] == [
        "x_stride_B", "x_stride_S", "x_stride_N", "weight_stride_N", "B", "S", "N",
    ]  # fmt: skip
    assert fields[-1] == ("int", "adjacent")


def test_header_of_a_library_declares_a_shared_struct_once():
    layout = header.Layout("Demo", (("void*", "out"), ("int", "device")))
    text = header.library_header("sums", (("add", layout), ("round", layout)))
    assert text.count("struct Demo {\n    void* out;\n    int device;\n};") == 1
    assert "int rlk_sums_add(const Demo* a);" in text
    assert "int rlk_sums_round(const Demo* a);" in text
