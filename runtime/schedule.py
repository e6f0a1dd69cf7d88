"""Pipeline schedules: torch's own, with a loss that the last stage computes; and the plain loop without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from .own_gradients import own_gradients
from .random_stream import RandomStream
from .receives import slots_in_order, slots_of_single
from .sends import Sends, events_of, releases
from .stage import BATCH, ZeroStage
from .zero import Microbatching

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
Streams = Callable[[int], RandomStream]
"""The random stream of a micro-batch, by its index."""

SINGLE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
MULTIPLE = {
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv")
GATHERING = (schedules.UNSHARD, schedules.RESHARD)


def stages_of_rank(name: ScheduleName, pipeline: int, rank: int, virtual: int) -> tuple[int, ...]:
    """Indices of the stages that a pipeline rank owns: round robin, or a V for zbv (Qi et al. 2024, section 6)."""
    if name == "zbv":
        return rank, 2 * pipeline - 1 - rank
    return tuple(range(rank, pipeline * virtual, pipeline))


class _Scale:
    """What the loss sum is multiplied by before its backward pass: set anew every step."""

    def __init__(self) -> None:
        self.factor: Tensor | float = 1.0

    def __call__(self, loss: Tensor, target: Tensor) -> Tensor:
        """``loss``: the last stage's output. ``target`` is not used: the stage has had it as an input."""
        return loss * self.factor


class PipelineRunner:
    """Runs a step of torch's schedule over this rank's stages."""

    def __init__(self, name: ScheduleName, stages: Sequence[ZeroStage], microbatches: int) -> None:
        self.stages, self.microbatches, self._scale = tuple(stages), microbatches, _Scale()
        self.split_backward = name in SPLIT_BACKWARD
        for stage in stages:
            stage.split_backward, stage.control.streams = self.split_backward, stages[0].control.streams
        arguments: dict[str, Any] = {"loss_fn": self._scale, "scale_grads": False}
        if name in SINGLE:
            self.schedule: Any = SINGLE[name](stages[0], microbatches, **arguments)
        else:
            self.schedule = MULTIPLE[name](list(stages), microbatches, **arguments)
            self._let_go_of_sends()
            self._leave_gathering_to_blocks()
        self._take_in_turns(name)

    def _let_go_of_sends(self) -> None:
        """Tell the stages when what they have sent has arrived (:mod:`runtime.sends`)."""
        orders = {rank: events_of(order) for rank, order in self.schedule.pipeline_order.items()}
        silent = {stage.stage_index for stage in self.stages if not stage.answered}
        sends = Sends(releases(orders, self.schedule.rank, silent))
        for stage in self.stages:
            stage.sent = sends

    def _leave_gathering_to_blocks(self) -> None:
        """torch gathers all blocks of a stage whenever it is one of the next three to act, and lets them go when it is not:
        with more stages a rank, every turn would gather again what ZeRO 1 and 2 keep, and ZeRO 3's blocks all at once. What a
        block gathers is for its ZeRO stage to say (:mod:`runtime.zero`), as under schedules of one stage a rank."""
        schedule = self.schedule
        order, ours = schedule.pipeline_order_with_comms, schedule.rank
        order[ours] = [action for action in order[ours] if action.computation_type not in GATHERING]
        schedule.unsharded_stages.update(stage.stage_index for stage in self.stages)

    def _take_in_turns(self, name: ScheduleName) -> None:
        """Tell the stages how many receive buffers they need (:mod:`runtime.receives`). A stage to which no gradient comes back
        cannot know when what it passes on has left."""
        schedule, count, own = self.schedule, self.microbatches, [stage.stage_index for stage in self.stages]
        for stage in self.stages:
            index = stage.stage_index
            if name in SINGLE:
                slots = slots_of_single(name, index, stage.num_stages, count)
            else:
                order, rank = schedule.pipeline_order_with_comms[schedule.rank], schedule.rank
                slots = slots_in_order(order, name, stage.num_stages // len(own), rank, index, count)
                if not stage.answered and slots[0]:
                    slots = count, slots[1]
            stage.forward_slots, stage.gradient_slots = slots

    def step(self, batch: Mapping[str, Tensor], scale: Tensor | float, streams: Streams | None) -> Tensor:
        """See :func:`run_step`."""
        self._scale.factor = scale
        for stage in self.stages:
            stage.begin_step(self.microbatches, streams)
        losses: list[Tensor] = []
        device = self.stages[0].device
        target = torch.zeros(self.microbatches, device=device)
        inputs = {f"{BATCH}{name}": tensor for name, tensor in batch.items()}
        self.schedule.step(target=target, losses=losses, return_outputs=False, **inputs)
        for stage in self.stages:
            if stage.sent is not None:
                stage.sent.end_step()
        sums = [loss.detach() for stage in self.stages for loss in stage.loss_sums]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=device)


class PlainRunner:
    """Runs a step of a whole model: micro-batch after micro-batch, forward then backward."""

    split_backward = False

    def __init__(self, stage: nn.Module, microbatches: int) -> None:
        self.stage, self.microbatches, self._control = stage, microbatches, Microbatching(stage)

    def step(self, batch: Mapping[str, Tensor], scale: Tensor | float, streams: Streams | None) -> Tensor:
        """See :func:`run_step`."""
        sums = []
        for index, chunk in enumerate(split_batch(batch, self.microbatches)):
            last = index == self.microbatches - 1
            self._control.before_backward(last=last, synchronise=last)
            extra = {"rng": streams(index)} if streams is not None else {}
            loss = self.stage(**chunk, **extra)
            (loss * scale).backward()
            if index == 0:
                own_gradients(self.stage.parameters())
            sums.append(loss.detach())
        return torch.stack(sums).sum()


Runner = PipelineRunner | PlainRunner


def split_batch(batch: Mapping[str, Tensor], microbatches: int) -> list[dict[str, Tensor]]:
    """The batch's micro-batches, in order; every tensor is split on its first dim, evenly."""
    chunks = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
    return [{name: parts[index] for name, parts in chunks.items()} for index in range(microbatches)]


def make_schedule(name: ScheduleName, stages: Sequence[ZeroStage | nn.Module], microbatches: int) -> Runner:
    """The runner of this rank's ``stages``: :class:`ZeroStage` under a pipeline, the one plain module without."""
    if all(isinstance(stage, ZeroStage) for stage in stages):
        return PipelineRunner(name, stages, microbatches)  # type: ignore[arg-type]
    (stage,) = stages
    assert isinstance(stage, nn.Module)
    return PlainRunner(stage, microbatches)


def run_step(
    runner: Runner, batch: Mapping[str, Tensor], scale: Tensor | float = 1.0, streams: Streams | None = None
) -> Tensor:
    """Forward and backward of every micro-batch of the local ``batch``; gradients are left in the parameters.

    The loss of a micro-batch is a sum; ``scale`` (1 / global weight, times the loss scale) multiplies it for the
    backward pass. Returns the unscaled sum over this rank's micro-batches: zero on ranks without the last stage.
    ``streams``: given where the model draws at random; stages then take ``rng``.
    """
    return runner.step(batch, scale, streams)
