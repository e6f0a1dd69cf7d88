"""TensorAxis: the collectives of one mesh axis, with the gradients that the placement of a value asks for.

A value is replicated, split on a dim, or a partial sum; its gradient likewise, on its own account. The pair decides the
collective of each pass, so every method that converts names the backward step in ``gradient``: Megatron-LM's f and g
are ``copy`` and ``all_reduce`` (Shoeybi et al. 2019, section 3); sequence parallelism's are ``all_gather`` and
``reduce_scatter`` (Korthikanti et al. 2022, section 4.2.2). torch's own functional collectives would reduce the
gradient once more in the backward pass; these are autograd functions over the bare operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import vocabulary
from .layout import spans
from .primitives import all_gather, all_reduce, all_to_all, narrow, reduce_scatter
from .undefined import or_none


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, "sum", ctx.axis.name), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, again: bool) -> Tensor:
        ctx.axis, ctx.again = axis, again
        return all_reduce(x, "sum", axis.name)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(gradient, "sum", ctx.axis.name) if ctx.again else gradient, None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, scatter: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.scatter = axis, dim, scatter
        return all_gather(x, dim, axis.degree, axis.name)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        axis = ctx.axis
        if ctx.scatter:
            return reduce_scatter(gradient, ctx.dim, axis.degree, axis.name), None, None, None
        return narrow(gradient, ctx.dim, axis.degree, axis.rank), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, dim, axis.degree, axis.name)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.dim, ctx.axis.degree, ctx.axis.name), None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return narrow(x, dim, axis.degree, axis.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.dim, ctx.axis.degree, ctx.axis.name), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, split_dim: int, concat_dim: int) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.concat_dim = axis, split_dim, concat_dim
        return all_to_all(x, split_dim, concat_dim, axis.degree, axis.name)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        axis = ctx.axis
        return all_to_all(gradient, ctx.concat_dim, ctx.split_dim, axis.degree, axis.name), None, None, None


class TensorAxis:
    """One rank's view of the tensor axis: its ``group`` (None at degree 1), its ``rank`` there and the ``degree``.

    At degree 1 every method returns its argument, or is the plain operation. Tensors that need no gradient get none.
    Dims may be negative. Gathers, scatters and exchanges need extents that ``degree`` divides (ValueError otherwise).
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, degree: int) -> None:
        if degree > 1 and group is None:
            raise ValueError(f"a tensor axis of degree {degree} needs a process group")
        self.group, self.rank, self.degree = group, rank, degree
        self.name: str = group.group_name if group is not None else ""

    def copy(self, x: Tensor) -> Tensor:
        """Replicated value whose gradient arrives as partial sums: identity forward, all-reduce backward."""
        return x if self.degree == 1 else _Copy.apply(x, self)

    def all_reduce(self, x: Tensor, gradient: Literal["identity", "all_reduce"] = "identity") -> Tensor:
        """Sum of the partial sums of all ranks. ``gradient="all_reduce"``: the sum's gradient is itself partial."""
        return x if self.degree == 1 else _AllReduce.apply(x, self, gradient == "all_reduce")

    def all_gather(
        self, x: Tensor, dim: int, gradient: Literal["reduce_scatter", "slice"] = "reduce_scatter"
    ) -> Tensor:
        """The whole of a value split on ``dim``. ``gradient="slice"``: the whole's gradient is replicated."""
        if self.degree == 1:
            return x
        return _AllGather.apply(x, self, dim % x.dim(), gradient == "reduce_scatter")

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """The own part along ``dim`` of the sum of partial sums; backward gathers."""
        if self.degree == 1:
            return x
        self._divides(x, dim)
        return _ReduceScatter.apply(x, self, dim % x.dim())

    def slice(
        self, x: Tensor, dim: int, gradient: Literal["all_gather", "pad"] = "all_gather", unit: int = 1,
        segments: Sequence[int] = (),
    ) -> Tensor:
        """The own part along ``dim`` of a replicated value, in memory of its own: the whole may go, and the part can be sent.

        ``gradient="all_gather"`` gives the whole gradient to every rank (even parts, one segment only);
        ``gradient="pad"`` gives each rank its own part's gradient and zeros elsewhere, a partial sum.
        """
        if self.degree == 1:
            return x
        if gradient == "all_gather" and torch.is_grad_enabled() and x.requires_grad:
            self._divides(x, dim, unit)
            if len(segments) > 1:
                raise ValueError("the gradient of a slice in segments cannot be gathered")
            return _Slice.apply(x, self, dim % x.dim())
        owned = spans(x.size(dim), self.degree, self.rank, segments, unit)
        pieces = [x.narrow(dim, start, length) for start, length in owned]
        return pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, dim)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """From split on ``concat_dim`` to split on ``split_dim``; backward exchanges back."""
        if self.degree == 1:
            return x
        self._divides(x, split_dim)
        return _AllToAll.apply(x, self, split_dim % x.dim(), concat_dim % x.dim())

    def embedding(self, ids: Tensor, weight: Tensor, vocabulary: int, padding_index: int | None = None) -> Tensor:
        """Rows ``ids`` of a table of ``vocabulary`` rows of which ``weight`` holds the own part: partial sums.

        A row that another rank owns is zero here, and gives its weight no gradient; nor does the row ``padding_index``.
        No collective.
        """
        if self.degree == 1:
            return F.embedding(ids, weight, padding_index)
        start, length = spans(vocabulary, self.degree, self.rank)[0]
        own = (ids >= start) & (ids < start + length)
        local = torch.where(own, ids - start, 0)
        padding = None if padding_index is None else padding_index % vocabulary - start
        rows = F.embedding(local, weight, padding if padding is not None and 0 <= padding < length else None)
        return torch.where(own.unsqueeze(-1), rows, 0.0)

    def cross_entropy(
        self, logits: Tensor, target: Tensor, classes: int | None = None, ignore_index: int = -100
    ) -> Tensor:
        """Summed cross-entropy of ``logits`` [N, C, ...] and ``target`` [N, ...].

        ``classes``: how many there are, where C is split over the ranks (None: every rank has all of its own terms).
        Three all-reduces forward then (maximum, sum of exponentials, target's logit), none backward (Shoeybi et al.
        2019, section 3, on the vocabulary-parallel loss). Half precisions are computed, and the sum returned, in float32.
        """
        if classes is not None and self.degree > 1:
            start, length = spans(classes, self.degree, self.rank)[0]
            return vocabulary.CrossEntropy.apply(logits, target, self.name, start, length, ignore_index)
        if logits.dtype in vocabulary.HALF:
            return vocabulary.HalfCrossEntropy.apply(logits, target, ignore_index)
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        """Softmax over the dim on which ``x`` is split: two all-reduces forward, one backward."""
        return F.softmax(x, dim) if self.degree == 1 else vocabulary.Softmax.apply(x, dim, self.name)

    def log_softmax(self, x: Tensor, dim: int) -> Tensor:
        """Logarithm of the softmax over the dim on which ``x`` is split: two all-reduces forward, one backward."""
        return F.log_softmax(x, dim) if self.degree == 1 else vocabulary.LogSoftmax.apply(x, dim, self.name)

    def size(self, extent: int, unit: int = 1, segments: Sequence[int] = ()) -> int:
        """The own extent of a dim of ``extent`` elements that is split in multiples of ``unit`` within each segment."""
        return sum(length for _, length in spans(extent, self.degree, self.rank, segments, unit))

    def _divides(self, x: Tensor, dim: int, unit: int = 1) -> None:
        if x.size(dim) % (self.degree * unit):
            raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide over {self.degree} ranks, unit {unit}")
