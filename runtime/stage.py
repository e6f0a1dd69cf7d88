"""A stage of the pipeline: torch's own, whose blocks follow their ZeRO stages, with as few buffers as its schedule needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from .input_part import backward_inputs
from .own_gradients import own_gradients
from .random_stream import RandomStream
from .sends import Sends
from .weight_part import backward_weights
from .zero import Microbatching

BATCH = "batch."
"""Before the names of the batch's inputs on their way through torch's schedules, which have keywords of their own."""


class ZeroStage(PipelineStage):
    """A pipeline stage whose blocks follow their ZeRO stages in every micro-batch.

    torch's own stage accumulates whole gradients and reduces them once whatever the blocks were given; this one reduces
    ZeRO-2 and ZeRO-3 blocks' after every backward pass. It takes as many receive buffers in turns as it is told, where torch
    has one for every micro-batch; of what a stage of its rank hands over it lets go after the micro-batch's last pass, and of
    what it has ``sent`` when that has arrived, where torch keeps both until the step is over. ``answered``: whether a gradient
    comes back for what it sends, or it sends nothing.
    ``receives`` and ``sends``: the activations of one micro-batch at the stage's edges (meta tensors, ``requires_grad`` set
    where a gradient flows back), none at the ends of the chain.
    """

    def __init__(
        self, module: nn.Module, index: int, count: int, device: torch.device, group: ProcessGroup,
        receives: Sequence[Tensor] = (), sends: Sequence[Tensor] = (),
    ) -> None:
        self.control = Microbatching(module)
        kinds = [tensor.dtype for tensor in (*module.parameters(), *receives) if tensor.is_floating_point()]
        self.output_type = torch.promote_types(torch.float32, kinds[0])
        loss = torch.empty((), dtype=self.output_type, device="meta", requires_grad=True)
        super().__init__(
            module, index, count, device, input_args=tuple(receives),
            output_args=tuple(sends) if index < count - 1 else (loss,), group=group,
        )
        self.split_backward = False
        self._sent_back = [tensor.requires_grad for tensor in receives]
        self._sent_here = [tensor.requires_grad for tensor in sends]
        self.answered = index == count - 1 or any(self._sent_here)
        self.forward_slots: int | None = None
        self.gradient_slots: int | None = None
        self.sent: Sends | None = None
        self.loss_sums: list[Tensor] = []
        self._microbatches, self._finished = 0, 0
        self._streams: Callable[[int], RandomStream] | None = None

    def begin_step(self, microbatches: int, streams: Callable[[int], RandomStream] | None) -> None:
        """Forget the last step. ``streams``: the random stream of each micro-batch, where the model draws at random."""
        self._microbatches, self._finished, self._streams = microbatches, 0, streams
        self.loss_sums = []

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """torch's, without what a V schedule's rank would send to itself: gloo cannot (torch 2.11 tries)."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        """torch's, without the inputs that have no gradient: torch before 2.13 refuses to send none."""
        made = super()._create_grad_send_info(args_recv_info)
        return [stage if wanted else None for stage, wanted in zip(made, self._sent_back, strict=True)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """torch's, without the outputs that get no gradient: torch 2.11 waits for them too."""
        if self.is_last or not self.has_backward:
            return []
        infos = zip(self.grad_recv_info[bwd_chunk_id], self._sent_here, strict=True)
        return self._get_recv_ops(tuple(info for info, wanted in infos if wanted))

    def _prepare_forward_infra(self, num_microbatches: int, *arguments: Any, **keywords: Any) -> Any:
        """torch's, which makes a receive buffer for every micro-batch, with ``forward_slots`` buffers taken in turns."""
        slots = num_microbatches if self.forward_slots is None else min(self.forward_slots, num_microbatches)
        made = super()._prepare_forward_infra(max(1, slots), *arguments, **keywords)
        _take_in_turns(self.args_recv_info, slots, num_microbatches)
        return made

    def _prepare_backward_infra(self, num_microbatches: int, *arguments: Any, **keywords: Any) -> Any:
        """torch's, with ``gradient_slots`` buffers taken in turns."""
        slots = num_microbatches if self.gradient_slots is None else min(self.gradient_slots, num_microbatches)
        made = super()._prepare_backward_infra(max(1, slots), *arguments, **keywords)
        self.chunks = num_microbatches
        _take_in_turns(self.grad_recv_info, slots, num_microbatches)
        return made

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """torch's, with what is there already for an output that gets no gradient: torch 2.11 refuses none."""
        given = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=False)
        kept = tuple(info.buffer if gradient is None else gradient for info, gradient in given)
        super().set_local_bwd_input(kept, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """torch's; what the stage has made of it is let go of later (what is only passed on lies in a receive buffer)."""
        if self.sent is not None:
            received = (getattr(info, "buffer", None) for info in self.args_recv_info[fwd_chunk_id])
            buffers = {buffer.untyped_storage()._cdata for buffer in received if isinstance(buffer, Tensor)}
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            made = [value.detach() for value in outputs if _has_own_history(value)]
            made = [value for value in made if value.untyped_storage()._cdata not in buffers]
            self.sent.keep(("F", self.stage_index, fwd_chunk_id), made)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """torch's; the gradients are let go of later."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        if self.sent is not None:
            self.sent.keep(("B", self.stage_index, bwd_chunk_id), [operation.tensor for operation in operations])
        return operations

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """torch's, with the micro-batch's random stream among the arguments; keeps the loss sum of the last stage."""
        self._let_go("F", fwd_chunk_id)
        self._ask_for_gradients(fwd_chunk_id)
        inputs = {name.removeprefix(BATCH): value for name, value in (kwargs or {}).items()}
        extra = {} if self._streams is None else {"rng": self._streams(fwd_chunk_id)}
        output = super().forward_one_chunk(fwd_chunk_id, args, {**inputs, **extra}, save_forward_output)
        if self.is_last:
            self.loss_sums.append(output.detach().clone())
        return output

    def _ask_for_gradients(self, microbatch: int) -> None:
        """Of what was received with one, as torch 2.13 does: before, torch asks for all, refuses to send those that nobody
        wants, and forgets those of a buffer that was an output too (``detach_``)."""
        for info, wanted in zip(self.args_recv_info[microbatch], self._sent_back, strict=False):
            buffer = getattr(info, "buffer", None)
            if isinstance(buffer, Tensor):
                buffer.requires_grad_(wanted)

    def forward_maybe_with_nosync(self, *arguments: Any, **keywords: Any) -> Any:
        """torch's; what it returns can be sent, and is no view, which the input part of a backward pass could not detach."""
        output = super().forward_maybe_with_nosync(*arguments, **keywords)
        if not isinstance(output, tuple):
            return _as_message(output, alone=True)
        return tuple(_as_message(value, alone=len(output) == 1) for value in output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *arguments: Any, **keywords: Any
    ) -> Any:
        """torch's, after letting go of what has arrived."""
        self._let_go("B", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, *arguments, **keywords)
        if full_backward:
            self._forget_handed(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        """torch's, after letting go of what has arrived."""
        self._let_go("W", bwd_chunk_id)
        if not self.stage_index or any(self._sent_back):
            super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **keywords)
        else:  # Where no input has a gradient the weight part is the whole pass, as it is in torch on the first stage alone.
            self._whole_pass(*self.backward_state.pop(bwd_chunk_id))
        self._forget_handed(bwd_chunk_id)

    def _whole_pass(self, inputs: Any, _: Any, outputs: Any, gradients: Any) -> None:
        given = {"stage_output": outputs[0] if self.is_last else outputs, "output_grads": gradients, "input_values": inputs}
        self.backward_maybe_with_nosync("full", given)

    def _forget_handed(self, microbatch: int) -> None:
        """After a micro-batch's last pass: what a stage of the same rank has handed over for it."""
        for slots, table in ((self.forward_slots, self.args_recv_info), (self.gradient_slots, self.grad_recv_info)):
            if slots == 0:
                table[microbatch] = tuple(map(_empty, table[microbatch]))

    def _let_go(self, kind: str, microbatch: int) -> None:
        if self.sent is not None:
            self.sent.before((kind, self.stage_index, microbatch))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """One backward pass, or its input or weight part, and what each block's ZeRO stage does after it."""
        if backward_type == "weight":
            self._finished += 1
            self.control.hold()
            with self.control.weight_part():
                backward_weights(self.submod, bwd_kwargs["param_groups"])
            self.control.after_weights(last=self._finished == self._microbatches)
            return (), None
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        inputs = [value for value in bwd_kwargs["input_values"] if isinstance(value, Tensor)]  # not the random stream
        asked = [value.requires_grad for value in inputs]  # An input that is passed on as it is asks no more after the pass.
        if backward_type == "input" and not any(self._sent_back):
            return (None,) * len(inputs), None
        if backward_type == "input":
            self.control.hold()
            made, groups = backward_inputs(outputs, gradients, inputs, self.submod.parameters())
            return _apart(_or_zeros(made, inputs, asked), gradients), groups
        self._finished += 1
        done = self._finished == self._microbatches
        self.control.before_backward(last=done and not self.split_backward, synchronise=done)
        made = stage_backward(outputs, gradients, inputs)
        if self._finished == 1:
            own_gradients(self.submod.parameters(), (*(gradients or ()), *made))
        return _apart(_or_zeros(made, inputs, asked), gradients), None


def _take_in_turns(table: dict[int, Any], slots: int, microbatches: int) -> None:
    """Let the micro-batches take the first ``slots`` buffers in turns; where there are none, each has a place for what a stage
    of the same rank hands over."""
    first = table[0]
    for index in range(microbatches):
        table[index] = table[index % slots] if slots else tuple(map(_empty, first))


def _empty(info: Any) -> Any:
    """A receive buffer's entry with nothing in it (not None, of which torch 2.11 would clear the gradient)."""
    buffer = getattr(info, "buffer", None)
    if not isinstance(buffer, Tensor):
        return info
    emptied = copy(info)
    emptied.buffer = buffer.detach().new_empty(0)
    return emptied


def _has_own_history(value: Tensor) -> bool:
    """Whether autograd saw the tensor's memory being made: not so views of parameters, buffers and inputs."""
    owner = value if value._base is None else value._base
    return owner.grad_fn is not None


def _as_message(value: Tensor, *, alone: bool) -> Tensor:
    """The same memory, row by row (else a copy), in a tensor that autograd does not take for a view (``detach_`` refuses
    those). Not ``alone``, another output may be made of it: what autograd saved for that must not be detached with it."""
    if not value.is_contiguous():
        return value.contiguous()
    apart = value.requires_grad and (value._base is not None or not alone)
    return torch.ops.aten._unsafe_view(value, value.shape) if apart else value


def _or_zeros(
    made: Sequence[Tensor | None], inputs: Sequence[Tensor], asked: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Zeros in place of the gradients that are asked for and that none was made of (a value that is only read detached): the
    stage before waits for them, and torch before 2.13 refuses to send none."""
    given = zip(made, inputs, asked, strict=True)
    return tuple(torch.zeros_like(value) if gradient is None and wanted else gradient for gradient, value, wanted in given)


def _apart(made: Sequence[Tensor | None], received: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...]:
    """The gradients that were made, as messages: row by row in memory (autograd lays only the gradients of its leaves so), and
    none in the memory of one that was received: that of a value which is only passed on would be, and it may be on its way when
    the buffer is written again."""
    buffers = {tensor.untyped_storage()._cdata for tensor in received or () if tensor is not None}
    return tuple(
        tensor.clone(memory_format=torch.contiguous_format)
        if tensor is not None and (tensor.untyped_storage()._cdata in buffers or not tensor.is_contiguous()) else tensor
        for tensor in made
    )
