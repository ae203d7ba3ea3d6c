# SPDX-License-Identifier: Apache-2.0
"""Discovery of operators through the entry-point group `rlk.operators`."""

import difflib
import importlib
import pkgutil
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from rlk.errors import RlkError, UnknownOperatorError
from rlk.operator import Operator

ENTRY_POINT_GROUP = "rlk.operators"


@cache
def discover() -> tuple[dict[str, Operator], dict[str, Exception]]:
    """Import every installed operator package.

    Returns:
        Operators by name, and the packages that could not be imported with the reason.
    """
    operators: dict[str, Operator] = {}
    failures: dict[str, Exception] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.value):
        try:
            found = declared_in(entry.value)
        except Exception as error:  # noqa: BLE001 - one broken package must not hide the others
            failures[entry.value] = error
            continue
        for operator in found:
            other = operators.setdefault(operator.name, operator)
            if other is not operator:
                raise RlkError(
                    f"{operator.name}: the name must be unique, got declarations from "
                    f"{other.package} and {operator.package}; uninstall one"
                )
    return operators, failures


def declared_in(package: str) -> list[Operator]:
    """The operators of one package: a subfolder with an `operator.py` declares one."""
    module = importlib.import_module(package)
    found = []
    for child in pkgutil.iter_modules(module.__path__):
        if not child.ispkg:
            continue
        folder = importlib.import_module(f"{package}.{child.name}")
        if any(m.name == "operator" for m in pkgutil.iter_modules(folder.__path__)):
            declaration = importlib.import_module(f"{package}.{child.name}.operator")
            found.append(declaration.OPERATOR)
    return found


def operators() -> dict[str, Operator]:
    """All installed operators by name; a package that fails to import is warned about."""
    found, failures = discover()
    for package, error in failures.items():
        warnings.warn(f"operators of {package} are missing: {error}", stacklevel=2)
    return found


def find(name: str) -> Operator:
    """The operator of this name.

    Raises:
        UnknownOperatorError: no installed package declares it.
    """
    known = operators()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if not known:
            raise UnknownOperatorError(
                f"operator must be an installed one, got {name!r} with no operator package "
                "installed"
            )
        names = ", ".join(sorted(known))
        raise UnknownOperatorError(f"operator must be one of {names}, got {name!r}{hint}")
    return known[name]


def public_function(operator: Operator) -> Callable[..., Any]:
    """What callers call: the function that the operator's package exports by its name.

    Raises:
        RlkError: the package exports none.
    """
    function = getattr(importlib.import_module(operator.package), operator.name, None)
    if not callable(function):
        raise RlkError(f"{operator.name}: package {operator.package} must export it, got nothing")
    return function
