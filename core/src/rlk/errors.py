# SPDX-License-Identifier: Apache-2.0
"""The exceptions that callers can cause, each worded as one sentence."""

from collections.abc import Iterable


class RlkError(Exception):
    """Base of every error that rlk raises on purpose."""


class ArgumentError(RlkError, ValueError):
    """An argument's shape, dtype, device or value does not fit the operator."""


class BackendError(RlkError, RuntimeError):
    """No backend, or not the requested one, can run this call."""


class PlatformError(RlkError, RuntimeError):
    """The machine or process cannot keep the arithmetic promised."""


class GradientError(RlkError, RuntimeError):
    """A derivative was asked for that the operator does not define."""


class UnknownOperatorError(RlkError, LookupError):
    """No installed package declares an operator of this name."""


class WorkloadError(RlkError, ValueError):
    """A manifest is malformed; the message names the path of the bad value."""


def one_of(names: Iterable[str]) -> str:
    """A requirement: one of these names. In quotes, as a library's name may hold a comma."""
    return f"one of {', '.join(map(repr, names))}"
