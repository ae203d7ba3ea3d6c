# SPDX-License-Identifier: Apache-2.0
"""The tolerance contract: the only place where a numeric bound is written down.

`contract.json` holds judgment -> operator class -> dtype -> bound. The public bounds (atol, rtol)
are a ceiling; max_ulp_at_rms and correctly_rounded are the measured ones that judge in practice.
"""

import functools
from importlib.resources import files
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from rlk.errors import ArgumentError

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Strict and immutable: an unknown key is an error."""


class Bound(Frozen, frozen=True):
    """Element by element: |candidate - reference| <= atol + rtol * |reference|."""

    atol: NonNegative
    rtol: NonNegative


class AccuracyBound(Bound, frozen=True):
    """Adds what a loose ceiling lets through.

    max_ulp_at_rms: largest error, in ulp of the dtype at the tensor's root mean square, or at the
        element where that is larger: the largest element of a product may stand far above it.
    correctly_rounded: least fraction of a row tensor's elements equal to the rounded FP64 oracle.
    """

    max_ulp_at_rms: NonNegative
    correctly_rounded: Fraction


BoundT = TypeVar("BoundT", bound=Bound)


class ByDtype(Frozen, Generic[BoundT], frozen=True):
    """One bound per dtype of the judged tensor."""

    float32: BoundT
    bfloat16: BoundT
    float16: BoundT


class ByClass(Frozen, frozen=True):
    """An operator class is `elementwise`, `reduction` or `product`, as its declaration says."""

    elementwise: ByDtype[AccuracyBound]
    reduction: ByDtype[AccuracyBound]
    product: ByDtype[AccuracyBound]


class AllClasses(Frozen, frozen=True):
    """Invariance is raw bits for every class."""

    all: ByDtype[Bound]


class Judgments(Frozen, frozen=True):
    """The judgments that need bounds; the others compare raw bits."""

    forward_accuracy: ByClass
    gradient_accuracy: ByClass
    forward_invariance: AllClasses
    gradient_invariance: AllClasses


class Contract(Frozen, frozen=True):
    """The whole table. `version` rises with every change of a number."""

    schema: Literal["rlk/contract-1"]
    version: Annotated[int, msgspec.Meta(ge=1)]
    judgments: Judgments

    def tolerance(self, judgment: str, operator_class: str, dtype: object) -> Bound:
        """The bound for one judged tensor.

        Args:
            judgment: a field of `Judgments`, such as "forward_accuracy".
            operator_class: "elementwise", "reduction" or "product".
            dtype: a torch dtype or its name, such as "bfloat16".
        Returns:
            An `AccuracyBound` for the accuracy judgments, a `Bound` of zeros for invariance.
        Raises:
            ArgumentError: the contract has no such judgment, class or dtype.
        """
        classes = _field("judgment", self.judgments, judgment)
        _require("operator_class", operator_class, ByClass)
        by_dtype = getattr(classes, "all", None) or getattr(classes, operator_class)
        bound: Bound = _field("dtype", by_dtype, str(dtype).removeprefix("torch."))
        return bound

    def accuracy(self, judgment: str, operator_class: str, dtype: object) -> AccuracyBound:
        """As `tolerance`, for the judgments that carry the measured bounds too.

        Args:
            judgment: "forward_accuracy" or "gradient_accuracy".
            operator_class: "elementwise", "reduction" or "product".
            dtype: a torch dtype or its name.
        Returns:
            The bound of the judged tensor.
        Raises:
            ArgumentError: it is no accuracy judgment, or `tolerance` raises.
        """
        bound = self.tolerance(judgment, operator_class, dtype)
        if not isinstance(bound, AccuracyBound):
            raise ArgumentError(f"contract: judgment must be about accuracy, got {judgment!r}")
        return bound


def _require(argument: str, name: str, struct: type[msgspec.Struct]) -> None:
    names = [field.name for field in msgspec.structs.fields(struct)]
    if name not in names:
        raise ArgumentError(f"contract: {argument} must be one of {', '.join(names)}, got {name!r}")


def _field(argument: str, struct: msgspec.Struct, name: str) -> Any:
    _require(argument, name, type(struct))
    return getattr(struct, name)


@functools.cache
def load() -> Contract:
    """The packaged contract.

    Returns:
        The same frozen object on every call.
    """
    return msgspec.json.decode((files(__package__) / "contract.json").read_bytes(), type=Contract)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of `contract.json`, as published beside it.

    Returns:
        A draft 2020-12 schema.
    """
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **msgspec.json.schema(Contract)}
