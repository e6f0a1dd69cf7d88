"""What forward leaves to chance that no program repeats: branches by what is drawn, seeds and generators of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from planner.ir.errors import ModelError
from planner.trace.lines import running_line

RANDOM = frozenset({"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "bernoulli", "binomial", "cauchy",
                    "exponential", "geometric", "log_normal", "multinomial", "normal", "normal_functional", "poisson", "random",
                    "randperm", "uniform", "native_dropout", "_sample_dirichlet", "_standard_gamma"})
"""Operations that draw random numbers, but for dropout, by the names of torch's functions or of its graphs'."""
_ASKED = frozenset({"__bool__", "__float__", "__index__", "__int__", "item", "tolist"})
"""Functions that make a Python number of a tensor."""


SEED = "leave it out: a program draws by its --seed, other numbers in every step and the same again in recomputation"


class DrawnError(Exception):
    """Python asks what random numbers are."""


class RefuseDrawnNumbers(TorchFunctionMode):
    """Raises DrawnError where code makes a Python number of a random draw, or of what was computed from one."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, Tensor] = {}  # by identity, and kept, so that no other tensor takes it

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = kwargs or {}, getattr(function, "__name__", "")
        if given.get("generator") is not None:
            raise ModelError(running_line(), "forward draws from a generator of its own", SEED)
        of_drawn = bool(self._drawn) and any(id(each) in self._drawn for each in tree_leaves((args, given)))
        if of_drawn and name in _ASKED:
            raise DrawnError
        result = function(*args, **given)
        if of_drawn or name.rstrip("_") in RANDOM:
            self._drawn |= {id(each): each for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result


@contextlib.contextmanager
def refuse_seeds() -> Iterator[None]:
    """Within, ModelError is raised where code seeds torch's generator: a trace would not hold it."""
    def refuse(*given: Any) -> None:
        raise ModelError(running_line(), "forward seeds torch's generator", SEED)

    with mock.patch.object(torch, "manual_seed", refuse), mock.patch.object(torch.random, "manual_seed", refuse):
        yield
