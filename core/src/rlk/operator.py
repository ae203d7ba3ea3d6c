# SPDX-License-Identifier: Apache-2.0
"""What an operator is: plain frozen dataclasses from which core derives everything else.

One `Operator` per operator folder drives the torch.library schema, fake kernels, autograd,
argument checks, dispatch, gates, benchmark cases and documentation tables.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

FLOATS = ("float32", "bfloat16", "float16")
Layout = Literal["contiguous", "packed"]

# The words a claim may use; concepts/claims in the docs explains each.
CLAIM_WORDS = (
    "repeatable",
    "batch_invariant",
    "order_free",
    "backend_equal",
    "gpu_to_gpu",
    "rollout_equal",
)


@dataclass(frozen=True)
class Tensor:
    """An input, an output or a saved tensor.

    `shape` holds symbols; a leading "..." stands for any number of axes, which core brings to
    the operator's `row_axes` before a backend sees them. `dtype` lists what is accepted: dtype
    names, or "=x" for the dtype of input `x`. `gradient` is "row" (one per row), "parameter" (an
    exact sum over rows), "chain" (a sum over rows in ascending order, which depends on where a row
    stands) or None. A row gradient may itself be an exact sum, along an axis of the row; the
    backend rounds it.

    An output that is the `sum_of` inputs is all that backward reads of them: it is kept, and stands
    in the place of each. They have one gradient, which backward returns for the first of them.
    """

    name: str
    shape: tuple[str, ...]
    dtype: tuple[str, ...]
    gradient: Literal["row", "parameter", "chain"] | None = None
    sum_of: tuple[str, ...] = ()

    @property
    def has_rows(self) -> bool:
        """Whether it has leading axes, over which rows are counted."""
        return self.shape[:1] == ("...",)

    @property
    def is_parameter(self) -> bool:
        """Whether its gradient is a sum over rows."""
        return self.gradient in ("parameter", "chain")


@dataclass(frozen=True)
class Scalar:
    """A scalar argument.

    `also` lists further values, and `choices` all values, that gates judge beside the default; a
    default of True or False makes it a flag. A `fixed` scalar is the operator's own constant, not
    the caller's.
    """

    name: str
    default: float | str | bool
    minimum: float = -math.inf
    also: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    fixed: bool = False


@dataclass(frozen=True)
class Reduction:
    """Which core primitive forms `result`, along which axis."""

    result: str
    primitive: Literal["row_sum", "exact_sum", "mma_chain"]
    axis: str


@dataclass(frozen=True)
class Claim:
    """A guarantee by name, for these tensors (outputs, saved state, gradients as `dx`).

    `among` names the only backends whose bits are equal; golden's then agree in value alone.
    """

    word: str
    tensors: tuple[str, ...]
    among: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """One way to compute; `rlk.backends` makes the standard rows.

    `load` imports it on first use and returns a module with `forward` and `backward`.
    `platforms` are where it may be chosen unasked, `on_request` where it also runs by name.
    `missing` says in one clause what the machine lacks for it, if anything. Another library's
    function is not `ours`: exact sums are formed for it, and are no launches of its own.
    """

    name: str
    load: Callable[[], ModuleType]
    platforms: tuple[str, ...]
    on_request: tuple[str, ...] = ()
    missing: Callable[[str], str | None] = lambda platform: None
    ours: bool = True


@dataclass(frozen=True)
class Limit:
    """A relation of sizes that a call must fulfil: factor * symbol <= most, or = if `exactly`."""

    factor: int
    symbol: str
    most: str
    exactly: bool = False


@dataclass(frozen=True)
class Workload:
    """A size that occurs in a real model: symbol values, and where it comes from.

    `arguments` are what the public function must be told at this size, beside tensors and scalars;
    `scalars` are those off their default in that model. `layouts` are how its tensors with row
    gradients lie in memory there: "packed" ones are views of one tensor that holds three, side by
    side along the first axis of a row, as a projection to query, key and value makes it.
    """

    site: str
    sizes: Mapping[str, int]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ("contiguous",)


@dataclass(frozen=True)
class Operator:
    """The declaration of one operator.

    A backend module offers

        forward(*inputs, **scalars) -> (*outputs, *saved)
        backward(*output_gradients, *inputs, *saved, needs=..., **scalars) -> one per input
            with a gradient of its own: row and chain gradients as tensors, parameter gradients as
            int64 exact state, None for each name missing from `needs`

    with leading axes brought to `row_axes`: flattened to one by default, or, where kernels need the
    strides of several, the outer ones flattened or of size 1. Both are called only with at least
    one row. It may also offer `plan_forward` and `plan_backward`, as
    `rlk.cuda.launch.KernelModule` does, and say by `finishes_sums = True` that its backward takes
    `forms`, by name, in which exact sums end (`rlk.reduce.exact_sum.form`). Where a gradient is a
    chain over rows, `backward` may also take `initial`, FP32 and shaped as the parameter: the
    chain goes on from there and returns FP32.

    A `linear` operator's outputs are linear in as many first inputs, each in its own, of the same
    shape and dtype; nothing else takes a gradient. Backward reads no value of them: they are not
    kept, and it gets the output gradients in their place. Its derivative is forward, so there are
    derivatives of every order.

    `casts` names values between the steps that are rounded to the dtype of the first input, as
    part of the formula. The oracle then takes `cast` and calls it for each of them in this order:
    `cast(value)` rounds it there too, and `cast(value, gradient=True)` its gradient as well;
    without the argument nothing is rounded. Those among `saved`, and gradients that backward
    passes to `rlk.between.show`, are judged for themselves and the oracle goes on from them.
    """

    name: str
    package: str
    bits_version: int
    inputs: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    outputs: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    reductions: tuple[Reduction, ...]
    category: Literal["elementwise", "reduction", "product"]
    claims: tuple[Claim, ...]
    workloads: tuple[Workload, ...]
    oracle: Callable[..., Any]
    backends: tuple[Backend, ...]
    formula: str
    row_axes: tuple[str, ...] = ("T",)
    limits: tuple[Limit, ...] = ()
    linear: bool = False
    # Sizes of no model at which kernels go wrong, where there is more than one symbol.
    odd_sizes: tuple[Mapping[str, int], ...] = ()
    # What gates take in place of real sizes where golden or Triton's interpreter would take too
    # long there: these and the odd ones. Real sizes that golden can do belong to those; at others
    # tests of the operator's own judge its kernels.
    gate_sizes: Mapping[str, int] = field(default_factory=dict)
    # Below these sizes values are not held against the oracle, bits are: what a norm leaves of few
    # columns, and of one in its gradient, is little but cancellation in any kernel.
    accuracy_from: Mapping[str, int] = field(default_factory=dict)
    casts: tuple[str, ...] = ()
    # What to do in a few words where another operator computes and none of its backends does.
    elsewhere: str = ""

    def too_small(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The symbols whose sizes are below those of `accuracy_from`, with the least."""
        return {s: least for s, least in self.accuracy_from.items() if sizes[s] < least}

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """The inputs that take gradients, in order."""
        return tuple(t for t in self.inputs if t.gradient)

    @cached_property
    def shared_gradients(self) -> tuple[tuple[int, ...], ...]:
        """Places of the inputs with one gradient, for each gradient that backward returns."""
        names = [t.name for t in self.inputs]
        sums = [tuple(names.index(name) for name in t.sum_of) for t in self.outputs if t.sum_of]
        later = {place for places in sums for place in places[1:]}
        together = {places[0]: places for places in sums}
        return tuple(
            together.get(place, (place,))
            for place, tensor in enumerate(self.inputs)
            if tensor.gradient and place not in later
        )

    @property
    def returned_gradients(self) -> tuple[Tensor, ...]:
        """The inputs for which backward returns a gradient, in order."""
        return tuple(self.inputs[places[0]] for places in self.shared_gradients)

    def needed(self, wanted: Collection[str]) -> tuple[bool, ...]:
        """Which of them backward must return for these inputs to have theirs."""
        return tuple(
            any(self.inputs[place].name in wanted for place in places)
            for places in self.shared_gradients
        )

    def kept(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs as backward gets them: outputs in the place of what they are the sum of."""
        found = list(inputs)
        for place, output in self._stand_ins:
            found[place] = outputs[output]
        return tuple(found)

    @cached_property
    def _stand_ins(self) -> tuple[tuple[int, int], ...]:
        """Places of inputs, each with that of the output that is the sum of it and others."""
        names = [t.name for t in self.inputs]
        summed = enumerate(t.sum_of for t in self.outputs)
        return tuple((names.index(name), output) for output, terms in summed for name in terms)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The inputs whose gradient is a sum over rows, exact or a chain."""
        return tuple(t for t in self.inputs if t.is_parameter)

    @property
    def exact_parameters(self) -> tuple[Tensor, ...]:
        """The inputs whose gradient is an exact sum over rows, which leaves backward as state."""
        return tuple(t for t in self.inputs if t.gradient == "parameter")

    @property
    def chain_parameters(self) -> tuple[Tensor, ...]:
        """The inputs whose gradient is a chain over rows, which backward returns finished."""
        return tuple(t for t in self.inputs if t.gradient == "chain")

    @property
    def carriers(self) -> tuple[str, ...]:
        """What a call may take beside its parameters, so that their gradients are not finished."""
        sums = [f"{t.name}_sum" for t in self.exact_parameters]
        chains = [f"{t.name}_{part}" for t in self.chain_parameters for part in ("chain", "calls")]
        return *sums, *chains

    @property
    def exact_sums(self) -> tuple[str, ...]:
        """The results that are exact sums, over rows or within one."""
        return tuple(dict.fromkeys(r.result for r in self.reductions if r.primitive == "exact_sum"))

    @property
    def token_axis(self) -> str | None:
        """The axis within a row along which exact sums run: the first one, and it may be empty."""
        inner = (r.axis for r in self.reductions if r.primitive == "exact_sum" and r.axis != "T")
        return next(inner, None)

    @property
    def free_scalars(self) -> tuple[Scalar, ...]:
        """The scalars that a caller may set."""
        return tuple(s for s in self.scalars if not s.fixed)

    def split_backward(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """(output gradients, inputs) of a backward call, which then takes the saved state."""
        outputs = len(self.outputs)
        return tensors[:outputs], tensors[outputs : outputs + len(self.inputs)]

    def backend(self, name: str) -> Backend | None:
        """The backend row of this name, or None."""
        return next((b for b in self.backends if b.name == name), None)

    def reduces_by(self, primitive: str) -> bool:
        """Whether a declared reduction is of this primitive."""
        return any(reduction.primitive == primitive for reduction in self.reductions)

    def claimed(self, word: str) -> tuple[str, ...]:
        """The tensors for which the operator claims `word`."""
        return tuple(t for claim in self.claims if claim.word == word for t in claim.tensors)

    def equal_among(self, tensor: str) -> tuple[str, ...]:
        """The only backends whose bits are equal for a tensor; empty where golden's are too."""
        return next((c.among for c in self.claims if c.among and tensor in c.tensors), ())
