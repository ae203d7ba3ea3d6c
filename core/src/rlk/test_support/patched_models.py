# SPDX-License-Identifier: Apache-2.0
"""What tests of patched models of other libraries share: copies, results, surroundings."""

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk.compare import assert_same_bits
from rlk.errors import PlatformError

Results = Mapping[str, Any]


def saved_and_loaded(module: Any) -> Any:
    """A module after torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# Every way in which a whole module is copied.
DUPLICATES = pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)


def assert_same_results(actual: Results, expected: Results) -> None:
    """Assert that tensors of the same names have the same bits."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_bits(actual[name], expected[name], name)


def whole(results: Results) -> dict[str, Any]:
    """Results whose sharded tensors are put together."""
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in results.items()}


def held(model: Any) -> list[dict[str, tuple[Any, ...]]]:
    """The modules and the tensors of a model, each with all that may be said of it."""
    modules = {path: (module, module.training) for path, module in model.named_modules()}
    tensors = {
        name: (tensor, tensor.requires_grad, tensor.dtype, tensor.device, tensor._version)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return [modules, tensors]


def assert_same_objects(actual: Any, expected: Any) -> None:
    """Assert that what `held` returned is the same objects, of which the same is said."""
    for new, old in zip(actual, expected, strict=True):
        assert old.keys() == new.keys()
        for name in old:
            assert old[name][0] is new[name][0]
            assert old[name][1:] == new[name][1:]


def assert_release_refused(
    function: Callable[[Any], Any], library: str, version: str, supported: str, monkeypatch: Any
) -> None:
    """Assert that `function` refuses a model beside this version of a library ("none": missing)."""
    module = ModuleType(library)
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, library, None if version == "none" else module)
    with pytest.raises(PlatformError) as caught:
        function(torch.nn.Linear(1, 1))
    expected = f"{function.__name__}: {library} must be {supported}, got {version}"
    package = function.__module__.partition(".")[0].replace("_", "-")
    assert str(caught.value) == f'{expected}; pip install "{package}[{library}]"'


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
