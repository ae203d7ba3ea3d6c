# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call: chosen once per operator, device and request."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch

from rlk.errors import BackendError, PlatformError
from rlk.operator import Backend, Operator

AUTO = "auto"
# The oldest GPU generation whose arithmetic is validated: Ampere.
OLDEST_CAPABILITY = (8, 0)

_requested: ContextVar[str] = ContextVar("rlk_backend", default=AUTO)
_choices: dict[tuple[str, torch.device, str], "Choice"] = {}


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why each earlier one in the list was passed over."""

    backend: Backend
    module: ModuleType
    rejected: tuple[tuple[str, str], ...]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the operators called inside the block on one backend, and on no other.

    The request covers the backward pass of these calls too, whichever thread runs it.

    Args:
        name: "golden", "triton", "cuda" or another backend the operators declare; "auto"
            returns to the default choice.
    Raises:
        BackendError: at the call, if the operator has no such backend or it cannot run.
    """
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def requested_backend() -> str:
    """The name set by the innermost `use_backend`, or "auto"."""
    return _requested.get()


def platform_of(device: torch.device) -> str:
    """The platform a device belongs to; a ROCm tensor also calls itself cuda."""
    if device.type == "cuda":
        return "rocm" if torch.version.hip else "nvidia"
    return device.type


def choose(operator: Operator, device: torch.device, requested: str) -> Choice:
    """The backend for `operator` on `device`, loaded.

    Raises:
        PlatformError: rlk is not validated on this platform or GPU generation.
        BackendError: no backend, or not the requested one, can run here.
    """
    key = (operator.name, device, requested)
    choice = _choices.get(key)
    if choice is None or choice.backend not in operator.backends:
        platform = platform_of(device)
        require_platform(operator.name, device, platform)
        by_request = requested != AUTO
        choice = (_request if by_request else _automatic)(operator, platform, requested)
        _choices[key] = choice
    return choice


def forget_choices() -> None:
    """Choose afresh from now on, as after an installation or a change of platform."""
    _choices.clear()


def require_platform(operator: str, device: torch.device, platform: str) -> None:
    """Refuse, before anything is allocated, a platform where nothing was validated."""
    if platform not in ("cpu", "nvidia"):
        raise PlatformError(
            f"{operator}: the device must be an NVIDIA GPU or the CPU, got {platform}; "
            "no backend is validated there"
        )
    if platform == "nvidia":
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            raise PlatformError(
                f"{operator}: the GPU must have compute capability "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer, "
                f"got {capability[0]}.{capability[1]}"
            )


def explain(operator: Operator, platform: str) -> list[tuple[str, str]]:
    """For every declared backend in order, whether it would serve `platform` and why."""
    lines = []
    chosen = False
    for backend in operator.backends:
        reason = _unsuitable(backend, platform)
        if reason is None:
            try:
                backend.load()
            except (ImportError, OSError, RuntimeError) as error:
                reason = f"loading failed: {error}"
        if reason is not None:
            lines.append((backend.name, reason))
        elif platform not in backend.platforms:
            lines.append((backend.name, "only when asked for by name"))
        elif chosen:
            lines.append((backend.name, "would serve; an earlier row is chosen"))
        else:
            chosen = True
            lines.append((backend.name, "chosen"))
    return lines


def _request(operator: Operator, platform: str, requested: str) -> Choice:
    backend = operator.backend(requested)
    if backend is None:
        names = ", ".join(b.name for b in operator.backends)
        raise BackendError(
            f"{operator.name}: backend must be one of auto, {names}, got {requested!r}"
        )
    reason = _unsuitable(backend, platform)
    if reason is not None:
        raise BackendError(f'{operator.name}: backend "{requested}" cannot run here: {reason}')
    # A failure to load reaches the caller as it is: the request names this backend.
    return Choice(backend, backend.load(), ())


def _automatic(operator: Operator, platform: str, requested: str) -> Choice:
    rejected = []
    for backend in operator.backends:
        reason = (
            f"it serves {', '.join(backend.platforms)} unless asked for by name"
            if platform not in backend.platforms
            else _unsuitable(backend, platform)
        )
        if reason is None:
            try:
                return Choice(backend, backend.load(), tuple(rejected))
            except (ImportError, OSError, RuntimeError) as error:
                reason = f"loading failed: {error}"
        rejected.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise BackendError(f"{operator.name}: no backend can run on {platform} ({reasons})")


def _unsuitable(backend: Backend, platform: str) -> str | None:
    if platform not in backend.platforms + backend.on_request:
        return f"it does not run on {platform}"
    return backend.missing(platform)
