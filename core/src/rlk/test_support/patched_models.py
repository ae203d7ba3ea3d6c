# SPDX-License-Identifier: Apache-2.0
"""What tests of patched models of other libraries share: copies, results, surroundings."""

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


def assert_same_state(actual: Results, expected: Results) -> None:
    """Assert that state dicts name the same tensors in the same order, with the same bits."""
    assert list(actual) == list(expected), f"{list(actual)}, expected {list(expected)}"
    assert_same_results(actual, expected)


def spoil(model: Any) -> None:
    """Give every parameter another value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


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


@dataclass(frozen=True)
class Patching:
    """What a package does to a model of another library: its functions, and the model they meet.

    Args:
        patch: changes a model; a second call changes nothing.
        unpatch: changes it back.
        build: makes the model, always with the same weights.
        results: outputs and gradients of a model by name.
    """

    patch: Callable[[Any], Any]
    unpatch: Callable[[Any], Any]
    build: Callable[[], Any]
    results: Callable[[Any], Results]

    def patched_results(self) -> Results:
        """Those of a model that is patched and nothing else."""
        model = self.build()
        self.patch(model)
        return self.results(model)

    def assert_copy_is_patched(self, duplicate: Callable[[Any], Any]) -> None:
        """Assert that a copy of a patched model is patched, and unpatched without the model."""
        model = self.build()
        original = self.results(model)
        self.patch(model)
        expected = self.results(model)
        twin = duplicate(model)
        assert_same_results(self.results(twin), expected)
        self.unpatch(twin)
        assert_same_results(self.results(twin), original)
        assert_same_results(self.results(model), expected)

    def assert_bits_come_and_go(self, model: Any, compute: Callable[[], torch.Tensor]) -> None:
        """Assert that what a model computes changes with patching, and back with its end."""
        original, again = compute(), compute()
        assert_same_bits(again, original, "again")
        self.patch(model)
        patched = compute()
        assert not torch.equal(patched, original), "patching changes no bit"
        self.unpatch(model)
        assert_same_bits(compute(), original, "unpatched")
        self.patch(model)
        assert_same_bits(compute(), patched, "patched again")

    def assert_state_dict_loads(self, patched: str) -> None:
        """Assert that strict loading works when "the saved one", "the loaded one" or both are."""
        source, target = self.build(), self.build()
        if patched != "the loaded one":
            self.patch(source)
        if patched != "the saved one":
            self.patch(target)
        spoil(target)
        target.load_state_dict(source.state_dict(), strict=True)
        assert_same_state(target.state_dict(), self.build().state_dict())

    def unhooked(self, hook: Callable[[Any], Any], remove: Callable[[Any], Any], order: str) -> Any:
        """A patched model without its hooks; asserts that patching works and ends beside them.

        Args:
            hook: adds them.
            remove: takes them away.
            order: "hook first" or "patch first".
        """
        model, hooked = self.build(), self.build()
        hook(hooked)
        original, patched = self.results(hooked), self.patched_results()
        for step in (hook, self.patch) if order == "hook first" else (self.patch, hook):
            step(model)
        again = self.patch(model).changed
        assert again == (), again
        assert_same_results(self.results(model), patched)
        self.unpatch(model)
        assert_same_results(self.results(model), original)
        self.patch(model)
        remove(model)
        assert_same_results(self.results(model), patched)
        return model
