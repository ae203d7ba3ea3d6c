# SPDX-License-Identifier: Apache-2.0
"""The plugin against a stand-in of vLLM's documented interface; `not run` against a real engine.

The interface is that of vLLM's docs/design/custom_op.md at commit 8f5ceb3a5337, of
docs/design/plugin_system.md at 08fbd35d8334, and of the constructors in
vllm/model_executor/layers/layernorm.py at 30f84e845e0a; `activation` came later.
"""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import rlk_qwen3next
from rlk import trace
from rlk.compare import assert_same_bits
from rlk.errors import ArgumentError, BackendError, PlatformError
from rlk_qwen3next import qwen3_next_rms_norm, rms_norm, rms_norm_gated
from rlk_qwen3next.integrations import vllm as ours

N = 128


def engine(registry_in_class=False, custom_ops=True):
    """Modules by name, with what the interface says of classes, registry and dispatch."""
    registry: dict[str, type] = {}

    class CustomOp(torch.nn.Module):
        def __new__(cls, *arguments, **options):
            return super().__new__(registry.get(cls.__name__, cls))

        def forward(self, *arguments):
            return (self.forward_cuda if custom_ops else self.forward_native)(*arguments)

        @classmethod
        def register_oot(cls, _decorated_op_cls=None, name=None):
            assert name not in registry, f"Duplicate op name: {name}"
            registry[name] = _decorated_op_cls
            return _decorated_op_cls

    class RMSNorm(CustomOp):
        def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None, has_weight=True):
            super().__init__()
            self.variance_epsilon, self.has_weight = eps, has_weight
            self.variance_size_override = (
                None if var_hidden_size == hidden_size else var_hidden_size
            )
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    class GemmaRMSNorm(CustomOp):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
            self.variance_epsilon = eps

    class RMSNormGated(CustomOp):
        def __init__(
            self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=False, activation="swish"
        ):
            super().__init__()
            self.eps, self.activation, self.group_size = eps, activation, group_size
            self.norm_before_gate = norm_before_gate
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    names = ("", ".model_executor", ".model_executor.custom_op", ".model_executor.layers")
    modules = {f"vllm{n}": ModuleType(f"vllm{n}") for n in (*names, f"{names[-1]}.layernorm")}
    modules["vllm.model_executor"].custom_op = custom_op = modules["vllm.model_executor.custom_op"]
    layers = modules["vllm.model_executor.layers"]
    layers.layernorm = layernorm = modules["vllm.model_executor.layers.layernorm"]
    custom_op.CustomOp = CustomOp
    if registry_in_class:
        CustomOp.op_registry_oot = registry
    else:
        custom_op.op_registry_oot = registry
    for made in (RMSNorm, GemmaRMSNorm, RMSNormGated):
        setattr(layernorm, made.__name__, made)
    return modules


@pytest.fixture(params=[{}, {"registry_in_class": True}, {"custom_ops": False}], ids=str)
def layernorm(request, monkeypatch):
    """vLLM's module of norms, installed."""
    modules = engine(**request.param)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["vllm.model_executor.layers.layernorm"]


def filled(module):
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, N))
    return module


def rows(seed):
    return torch.randn(3, N, generator=torch.Generator().manual_seed(seed))


def test_zero_centred_norm_of_the_engine_has_the_bits_of_ours(layernorm):
    assert ours.register() == ours.DEFAULT
    module = filled(layernorm.GemmaRMSNorm(N, eps=1e-5))
    x, residual = rows(1), rows(2)
    with torch.inference_mode():
        with trace() as launches:
            y, (z, total) = module(x), module(x, residual)
        assert {launch.operator for launch in launches} == {"rms_norm", "rms_norm_residual"}
        assert_same_bits(y, qwen3_next_rms_norm(x, module.weight, 1e-5), "y")
        assert_same_bits(total, x + residual, "residual_out")
        assert_same_bits(z, qwen3_next_rms_norm(total, module.weight, 1e-5), "y of a sum")


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_gated_norm_of_the_engine_has_the_bits_of_ours(layernorm, activation):
    ours.register()
    module = layernorm.RMSNormGated(N, norm_before_gate=True, activation=activation)
    x, gate = rows(3), rows(4)
    expected = rms_norm_gated(x, gate, filled(module).weight, 1e-5, activation)
    assert_same_bits(module(x, gate).detach(), expected.detach(), "y")
    assert_same_bits(module(x).detach(), rms_norm(x, module.weight, 1e-5).detach(), "no gate")


def test_plain_norm_is_replaced_on_request_alone_and_needs_a_gpu(layernorm):
    ours.register()
    assert type(layernorm.RMSNorm(N)) is layernorm.RMSNorm
    assert ours.register(["RMSNorm"]) == ("RMSNorm",)
    with pytest.raises(PlatformError, match="^rms_norm_vllm: the device must be an NVIDIA GPU"):
        layernorm.RMSNorm(N)(rows(5))


def test_register_again_adds_nothing_and_builds_the_same_class(layernorm):
    ours.register()
    first = type(layernorm.GemmaRMSNorm(N))
    assert ours.register() == ()
    assert type(layernorm.GemmaRMSNorm(N)) is first
    assert issubclass(first, layernorm.GemmaRMSNorm)


def test_register_what_another_plugin_has_is_refused_by_name(layernorm):
    custom_op = sys.modules["vllm.model_executor.custom_op"]

    class Other(layernorm.GemmaRMSNorm):
        pass

    custom_op.CustomOp.register_oot(_decorated_op_cls=Other, name="GemmaRMSNorm")
    with pytest.raises(BackendError, match="vllm: GemmaRMSNorm must be free to register, got .*"):
        ours.register()


@pytest.mark.parametrize("options", [{}, {"norm_before_gate": True, "group_size": 64}], ids=str)
def test_gated_norm_that_is_another_function_is_refused_when_built(layernorm, options):
    ours.register()
    with pytest.raises(BackendError, match="must normalise whole rows before the gate"):
        layernorm.RMSNormGated(N, **options)


def test_plain_norm_of_part_of_a_row_is_refused_when_built(layernorm):
    ours.register(["RMSNorm"])
    for options in ({"var_hidden_size": 64}, {"has_weight": False}):
        with pytest.raises(BackendError, match="RMSNorm must have a weight and take the mean"):
            layernorm.RMSNorm(N, **options)


def test_register_unknown_name_is_refused_before_the_engine_is_imported():
    with pytest.raises(ArgumentError) as caught:
        ours.register(["LayerNorm"])
    assert str(caught.value) == (
        "vllm: names must be among GemmaRMSNorm, RMSNormGated, RMSNorm, got 'LayerNorm'"
    )


@pytest.mark.parametrize("value", ["", " ", "GemmaRMSNorm", "GemmaRMSNorm, RMSNormGated"])
def test_plugin_registers_what_the_environment_names(layernorm, monkeypatch, value):
    monkeypatch.setenv(ours.VARIABLE, value)
    for _ in range(2):
        ours.plugin()
    replaced = [n for n in ours.NORMS if n in value.replace(" ", "").split(",")]
    for name in ours.NORMS:
        options = {"norm_before_gate": True} if name == "RMSNormGated" else {}
        base = getattr(layernorm, name)
        assert (type(base(N, **options)) is not base) == (name in replaced)


def test_entry_point_of_the_distribution_is_the_plugin():
    folder = Path(rlk_qwen3next.__file__).parents[2]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert value == f"{ours.__name__}:{ours.plugin.__name__}"


def test_import_of_the_integration_imports_no_engine():
    code = (
        "import sys, rlk_qwen3next.integrations.vllm as v; v.plugin(); print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, an engine")
def test_registered_norms_are_what_the_installed_engine_builds():
    code = (
        "from rlk_qwen3next.integrations import vllm; vllm.register();"
        "from vllm.config import VllmConfig, set_current_vllm_config;"
        "from vllm.model_executor.layers.layernorm import GemmaRMSNorm\n"
        "with set_current_vllm_config(VllmConfig()): print(type(GemmaRMSNorm(128)).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ours.__name__
