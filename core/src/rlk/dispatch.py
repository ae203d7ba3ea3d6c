# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call: chosen once per operator, device and request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from rlk.errors import BackendError, PlatformError, one_of
from rlk.operator import Backend

AUTO = "auto"
# The oldest GPU generation whose arithmetic is validated: Ampere.
OLDEST_CAPABILITY = (8, 0)
# Where arithmetic is validated at all, in words.
_PLATFORMS = {"nvidia": "an NVIDIA GPU", "cpu": "the CPU"}

_requested: ContextVar[str] = ContextVar("rlk_backend", default=AUTO)


class _Traced(threading.local):
    def __init__(self) -> None:
        self.backend = AUTO


# Grows when a plan made before may no longer hold.
generation = 0

# The same request once more: torch.compile can guard on this, but not on a context variable.
_traced = _Traced()
_choices: dict[tuple[str, torch.device, str], "Choice"] = {}


class Chooser(Protocol):
    """Whatever has a name and backends to choose from: an operator, or a core primitive."""

    @property
    def name(self) -> str:
        """Begins every error."""

    @property
    def backends(self) -> tuple[Backend, ...]:
        """In order of preference."""

    @property
    def elsewhere(self) -> str:
        """What to do where only others compute."""


@dataclass(frozen=True)
class Primitive:
    """Something to choose a backend for that is no operator, having no gradient."""

    name: str
    backends: tuple[Backend, ...]
    elsewhere: str = ""


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why each earlier one in the list was passed over."""

    backend: Backend
    module: ModuleType
    rejected: tuple[tuple[str, str], ...]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the operators called inside the block on one backend, and on no other.

    The request covers the backward pass of these calls too, whichever thread runs it. A compiled
    function is compiled once for each request it meets, and meets that of its thread: open the
    block in the thread that calls it, and let no coroutine of that thread hold another open.

    Args:
        name: "golden", "triton", "cuda" or another backend the operators declare; "auto"
            returns to the default choice.
    Returns:
        A context manager.
    Raises:
        BackendError: at the call, if the operator has no such backend or it cannot run.
    """
    outer, _traced.backend = _traced.backend, name
    token = None if torch.compiler.is_compiling() else _requested.set(name)
    try:
        yield
    finally:
        if token is None:
            _traced.backend = outer
        else:
            _requested.reset(token)
            # Not `outer`: blocks of coroutines in one thread need not close in turn.
            _traced.backend = _requested.get()


def requested_backend() -> str:
    """The name set by the innermost `use_backend`, or "auto"."""
    return _traced.backend if torch.compiler.is_compiling() else _requested.get()


def platform_of(device: torch.device) -> str:
    """The platform a device belongs to; a ROCm tensor also calls itself cuda."""
    if device.type == "cuda":
        return "rocm" if torch.version.hip else "nvidia"
    return device.type


def choose(operator: Chooser, device: torch.device, requested: str) -> Choice:
    """The backend for `operator` on `device`, loaded.

    Raises:
        PlatformError: rlk is not validated on this platform or GPU generation.
        BackendError: no backend, or not the requested one, can run here.
    """
    require_name(operator.name, requested)
    key = (operator.name, device, requested)
    choice = _choices.get(key)
    if choice is None or choice.backend not in operator.backends:
        platform = platform_of(device)
        require_platform(operator, device, platform)
        by_request = requested != AUTO
        choice = (_request if by_request else _automatic)(operator, platform, requested)
        _choices[key] = choice
    return choice


def require_name(operator: str, requested: object) -> None:
    """Refuse a backend request that is no name."""
    if not isinstance(requested, str):
        raise BackendError(f"{operator}: backend must be a name, got {requested!r}")


def forget_choices() -> None:
    """Choose afresh from now on, as after an installation or a change of platform."""
    _choices.clear()
    forget_plans()


def forget_plans() -> None:
    """Check and plan every call afresh from now on, as in a forked process."""
    global generation
    generation += 1


def require_platform(operator: Chooser, device: torch.device, platform: str) -> None:
    """Refuse, before anything is allocated, a platform where nothing was validated."""
    served = {p for backend in operator.backends for p in backend.platforms + backend.on_request}
    # One without a backend is refused later, for want of any.
    validated = [p for p in _PLATFORMS if p in served] or [*_PLATFORMS]
    if platform not in validated:
        named = " or ".join(_PLATFORMS[p] for p in validated)
        told = operator.elsewhere if platform in _PLATFORMS else ""
        raise PlatformError(
            f"{operator.name}: the device must be {named}, got {platform}; "
            f"{told or 'no backend is validated there'}"
        )
    if platform == "nvidia":
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            raise PlatformError(
                f"{operator.name}: the GPU must have compute capability "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer, "
                f"got {capability[0]}.{capability[1]}"
            )


def explain(operator: Chooser, platform: str) -> list[tuple[str, str]]:
    """For every declared backend in order, whether it would serve `platform` and why."""
    lines = []
    chosen = False
    for backend in operator.backends:
        module, reason = _try(backend, platform)
        if module is None:
            lines.append((backend.name, reason))
        elif platform not in backend.platforms:
            lines.append((backend.name, "only when asked for by name"))
        elif chosen:
            lines.append((backend.name, "would serve; an earlier row is chosen"))
        else:
            chosen = True
            lines.append((backend.name, "chosen"))
    return lines


def _request(operator: Chooser, platform: str, requested: str) -> Choice:
    backend = next((b for b in operator.backends if b.name == requested), None)
    if backend is None:
        names = one_of([AUTO, *(b.name for b in operator.backends)])
        raise BackendError(f"{operator.name}: backend must be {names}, got {requested!r}")
    reason = _unsuitable(backend, platform)
    if reason is not None:
        raise BackendError(f'{operator.name}: backend "{requested}" cannot run here: {reason}')
    # A failure to load reaches the caller as it is: the request names this backend.
    return Choice(backend, backend.load(), ())


def _automatic(operator: Chooser, platform: str, requested: str) -> Choice:
    rejected: list[tuple[str, str]] = []
    for backend in operator.backends:
        if platform in backend.platforms:
            module, reason = _try(backend, platform)
            if module is not None:
                return Choice(backend, module, tuple(rejected))
        else:
            reason = f"it serves {', '.join(backend.platforms)} unless asked for by name"
        rejected.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise BackendError(f"{operator.name}: no backend can run on {platform} ({reasons})")


def _try(backend: Backend, platform: str) -> tuple[ModuleType | None, str]:
    """The backend loaded, or why it cannot serve."""
    try:
        reason = _unsuitable(backend, platform)
        return (backend.load(), "") if reason is None else (None, reason)
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"loading failed: {error}"


def _unsuitable(backend: Backend, platform: str) -> str | None:
    if platform not in backend.platforms + backend.on_request:
        return f"it does not run on {platform}"
    return backend.missing(platform)
