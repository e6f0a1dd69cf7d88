"""ZeRO over the data axis, block by block, on FSDP2.

What each stage does in a step of m micro-batches (P: parameter bytes; Rajbhandari et al. 2020, section 5):

=====  ==========================================================  ====================================
stage  settings                                                    traffic
=====  ==========================================================  ====================================
0      ``replicate``; gradients summed once                        P all-reduce
1      kept whole from first forward to last backward;             P all-gather + P reduce-scatter
       gradients accumulated whole, reduced once
2      the same, but gradients reduced every micro-batch           P all-gather + m P reduce-scatter
3      gathered for every forward and every backward               2 m P all-gather + m P reduce-scatter
=====  ==========================================================  ====================================

On a 2-D mesh (replicate x shard) the shards' gradients are summed over the replicas once a step besides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .block import Block, blocks_of

Precision = Literal["bf16", "fp16", "fp32", "fp64"]
COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MASTER_DTYPE = COMPUTE_DTYPE | {"bf16": torch.float32, "fp16": torch.float32}


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Half precisions compute in half and reduce gradients in float32; the others are used throughout."""
    if precision in ("bf16", "fp16"):
        return MixedPrecisionPolicy(COMPUTE_DTYPE[precision], torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def shard(
    blocks: Sequence[Block | Sequence[Block]], zero: Sequence[int], mesh: DeviceMesh, precision: Precision
) -> None:
    """Apply ZeRO stage ``zero[i]`` to ``blocks[i]`` (several blocks that share a parameter: together, as one unit).

    ``mesh``: the data ranks, 1-D, or 2-D (replicate x shard) where a shard group spans fewer ranks than the data axis.
    """
    # Of what changing such a view does; a program changes none, for it writes nothing in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    policy = mixed_precision(precision)
    for unit, stage in zip(blocks, zero, strict=True):
        modules = [unit] if isinstance(unit, Block) else list(unit)
        together: Any = modules if len(modules) > 1 else modules[0]
        if stage == 0:
            flat = mesh if mesh.ndim == 1 else mesh._flatten("data")
            replicate(together, mesh=flat, mp_policy=policy)
        else:
            fully_shard(together, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
        for module in modules:
            module.zero_stage, module.data_mesh = stage, mesh


class Streams:
    """The streams on which FSDP2 gathers and reduces, the same for all stages of a rank; the current one where a rank is
    ``alone`` and has nobody to talk to.

    Memory that the caching allocator has given to a stream serves no other. With streams of its own each stage would keep
    what it gathers at most, and a rank alone its gradients, beside all else.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._taken: dict[str, Any] = {}

    def give(self, context: Any) -> None:
        """Put the first stage's streams in the place of a stage's own."""
        for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
            own = context.device_handle.current_stream() if self._alone else getattr(context, name)
            setattr(context, name, self._taken.setdefault(name, own))


class Microbatching:
    """Sets, before every backward pass, what the blocks of one stage module do with their gradients after it.

    Makes ``stage`` the root of its blocks' communication; every block must have been given to :func:`shard`.
    """

    def __init__(self, stage: nn.Module) -> None:
        blocks = blocks_of(stage)
        mesh = blocks[0].data_mesh
        assert mesh is not None
        self.hybrid = mesh.ndim == 2
        self.root: FSDPModule = fully_shard(stage, mesh=mesh, reshard_after_forward=False)
        self.streams = Streams(alone=mesh.size() == 1)
        self._take_streams()
        self.managed = [(block.zero_stage, as_managed(block)) for block in blocks]
        for module in (self.root, *(module for _, module in self.managed)):
            if mesh.size() > 1:  # One rank alone has nothing to divide by; by a factor of one FSDP2 divides into a new tensor.
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._prefetch()

    def _take_streams(self) -> None:
        """Let FSDP2, when it first runs, have the streams that :attr:`streams` gives it then."""
        context = self.root._get_fsdp_state()._comm_ctx
        begin = context.lazy_init

        def lazy_init(device: torch.device) -> None:
            begin(device)
            self.streams.give(context)

        context.lazy_init = lazy_init  # type: ignore[method-assign]

    def _prefetch(self) -> None:
        """Let every unit's backward pass gather the unit before it in this stage.

        FSDP2's own choice follows the order of all forward passes: under a pipeline, the first unit of a micro-batch
        would gather the last one of the micro-batch before, once more a step, for nothing.
        """
        units: dict[Any, FSDPModule] = {}
        for _, block in self.managed:  # Blocks that are one unit share a state; its forward is done with its last block.
            state = block._get_fsdp_state()
            units.pop(state, None)
            units[state] = block
        order = list(units.values())
        for before, unit in zip([*order[:1], *order], order, strict=False):
            unit.set_modules_to_backward_prefetch([before])

    def before_backward(self, last: bool, synchronise: bool) -> None:
        """``last``: no backward of this step follows; ``synchronise``: ZeRO 0 and 1 reduce their gradients in it."""
        self.root.set_is_last_backward(last)
        for stage, block in self.managed:
            every = stage >= 2
            block.set_requires_gradient_sync(every or synchronise, recurse=False)
            if self.hybrid and every:
                block.set_requires_all_reduce(synchronise, recurse=False)
            block.set_reshard_after_backward(stage == 3 or last, recurse=False)

    def hold(self) -> None:
        """Nothing is reduced or freed by the next pass."""
        self.root.set_is_last_backward(False)
        self.root.set_requires_gradient_sync(False)
        self.root.set_reshard_after_backward(False)

    @contextmanager
    def weight_part(self) -> Iterator[None]:
        """A pass in which no unit's backward pass begins or ends. Where a node that parameters join makes a block's output, its
        hook would ask for the end of all: gradients made so far would become float32, later ones not, which FSDP2 does not
        reduce together."""
        context = self.root._get_fsdp_state()._state_ctx
        groups = [group for _, block in self.managed for group in parameter_groups(block)]
        found = [(item, item._training_state) for item in (*context.all_states, *groups)]
        context.post_backward_final_callback_queued = True
        try:
            yield
        finally:
            context.post_backward_final_callback_queued = False
            for item, state in found:
                item._training_state = state

    def after_weights(self, last: bool) -> None:
        """What the hooks of a whole backward pass would do: reduce what ZeRO-2 blocks have accumulated; of the others, keep
        gradients in the masters' dtype, which would else wait for the stage's next pass as they were made, beside what they are
        added to. ``last``: of the step; the shards' sums over their copies follow."""
        groups: dict[Any, None] = {}  # Blocks that are one unit share theirs.
        for stage, block in self.managed:
            if stage == 2:
                block.set_requires_gradient_sync(True, recurse=False)
                if self.hybrid:
                    block.set_requires_all_reduce(last, recurse=False)
            groups |= dict.fromkeys(parameter_groups(block))
        for group in groups:
            group.post_backward()


def as_managed(block: nn.Module) -> FSDPModule:
    """The block as what FSDP2 made of it. Raises ValueError where it was never given to :func:`shard`."""
    if not isinstance(block, FSDPModule):
        raise ValueError(f"block {getattr(block, 'name', '')} has no ZeRO stage")
    return block


def parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of the module's own parameters; torch before 2.13 has at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
