# SPDX-License-Identifier: Apache-2.0
"""Which operators a command is about."""

import warnings
from collections.abc import Sequence

import torch

from rlk import dispatch, registry
from rlk.cli.console import complain
from rlk.errors import BackendError, RlkError
from rlk.operator import Operator

# What each option --seed takes; generators multiply it, in 64 bits.
MAX_SEED = 2**32 - 1


def installed() -> dict[str, Operator]:
    """All operators by name; packages that cannot be imported are named on standard error."""
    operators, failures = registry.discover()
    for package, error in failures.items():
        complain(f"operators of {package} are missing: {_one_line(error)}")
    return dict(sorted(operators.items()))


def every() -> list[Operator]:
    """All operators, where a missing one must not go unnoticed.

    Raises:
        RlkError: there is none, or a package cannot be imported.
    """
    operators, failures = registry.discover()
    for package, error in failures.items():
        raise RlkError(f"package {package} must be importable, got {_one_line(error)}")
    if not operators:
        raise RlkError("an operator package must be installed, got none; install one")
    return [operators[name] for name in sorted(operators)]


def some(command: str, names: Sequence[str], everything: bool) -> list[Operator]:
    """The operators that a command was given, by name or by --all.

    Raises:
        RlkError: both or neither, or one of the names is unknown.
    """
    if names and everything:
        raise RlkError(f"{command}: operators must be named or --all, got both")
    if not names and not everything:
        raise RlkError(f"{command}: operators must be named, got none; give OP or --all")
    return named(names) if names else every()


def named(names: Sequence[str]) -> list[Operator]:
    """The operators of these names, each once.

    Raises:
        UnknownOperatorError: no installed package declares one of them.
    """
    installed()
    with warnings.catch_warnings(action="ignore"):  # `installed` has said it
        return [registry.find(name) for name in dict.fromkeys(names)]


def devices() -> list[torch.device]:
    """The kinds of device of this machine: the CPU, and the GPU where there is one."""
    gpu = [torch.device("cuda")] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpu]


def platforms() -> list[str]:
    """The platforms of `devices`."""
    return [dispatch.platform_of(device) for device in devices()]


def backend_for(operator: Operator, device: torch.device, requested: str) -> str:
    """The name of the backend that would serve a call.

    Raises:
        PlatformError: rlk is not validated on this device.
        BackendError: the requested backend cannot run, or not be loaded.
    """
    try:
        return dispatch.choose(operator, device, requested).backend.name
    except RlkError:
        raise
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(
            f'{operator.name}: backend "{requested}" must be loadable, got {_one_line(error)}'
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
