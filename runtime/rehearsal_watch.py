"""Who makes what: watches the parts of a step, so that the storage log knows what each storage is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .block import blocks_of
from .loop import Program, Trainer
from .rehearsal_memory import StorageLog
from .schedule import PlainRunner, Runner
from .stage import ZeroStage
from .zero import as_managed, parameter_groups


def watch_groups(program: Program, log: StorageLog) -> None:
    """Let the log know what FSDP2 makes, and what autograd and FSDP2 hand over."""
    for group in _groups(program):
        for name in ("unshard", "wait_for_unshard"):
            watch(group, name, log, "buffers")
        watch(group, "post_backward", log, "buffers", lambda group=group: _claim_gradients(group, log))  # type: ignore[misc]


def watch(owner: Any, name: str, log: StorageLog, category: str, around: Callable[[], None] = lambda: None) -> None:
    """What the method makes is of a category; ``around`` is called before and after it."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        around()
        with log.made_for(category):
            result = method(*args, **kwargs)
        around()
        return result

    setattr(owner, name, watched)


def hold_constants(program: Program, log: StorageLog) -> None:
    """Let the model's constants be buffers from the first time that something asks for them, as they are on a GPU."""
    model: dict[str, Any] = type(program.modules[0]).forward.__globals__
    held: dict[str, Tensor] = {}

    def constant(key: str, device: torch.device) -> Tensor:
        if key not in held:
            with log.made_for("buffers"):
                held[key] = torch.empty_like(model["CONSTANTS"][key], device=device)
        return held[key]

    model["constant"] = constant


def mark_passes(runner: Runner, log: StorageLog) -> None:
    """Let the log know when a pass of a micro-batch begins: forward, backward or a part of it, on any stage."""
    if isinstance(runner, PlainRunner):
        mark_calls(runner._control, "before_backward", log, "pass")
        return
    for stage in runner.stages:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            mark_calls(stage, name, log, "pass")


def mark_calls(owner: Any, name: str, log: StorageLog, kind: str) -> None:
    """Every call of the method is marked."""
    method = getattr(owner, name)

    @wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        log.mark(kind)
        return method(*args, **kwargs)

    setattr(owner, name, marked)


def _groups(program: Program) -> Iterator[Any]:
    """FSDP2's parameter groups, each once."""
    seen: set[int] = set()
    for module in program.modules:
        for block in blocks_of(module):
            for group in parameter_groups(as_managed(block)):
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def _claim_gradients(group: Any, log: StorageLog) -> None:
    """Gradients in all their forms: autograd's, accumulated in the master's dtype, reduced to the own shard."""
    for item in group.fsdp_params:
        whole = getattr(item, "_unsharded_param", None)
        log.claim(None if whole is None else whole.grad, "gradients")
        log.claim(item.unsharded_accumulated_grad, "gradients")
        log.claim(item.sharded_param.grad, "gradients")
    log.claim(group._partial_reduce_output, "gradients")


def claim_state(trainer: Trainer, log: StorageLog) -> None:
    """What lives from step to step."""
    for held in trainer.parameters:
        log.claim(held.parameter.detach(), "parameters")
    for group in _groups(trainer.program):
        for item in group.fsdp_params:
            for tensor in item.all_gather_outputs:
                log.claim(tensor, "parameters")
    for state in trainer.optimizer.adamw.state.values():
        for tensor in state.values():
            log.claim(tensor, "optimizer")
    for module in trainer.program.modules:
        for buffer in module.buffers():
            log.claim(buffer, "buffers")
    for stage in getattr(trainer.program.runner, "stages", ()):
        _claim_receives(stage, log)


def _claim_receives(stage: ZeroStage, log: StorageLog) -> None:
    """What a pipeline stage receives into."""
    for received in (stage.args_recv_info, getattr(stage, "grad_recv_info", {})):
        for entries in received.values():
            for entry in entries:
                buffer = getattr(entry, "buffer", None)
                log.claim(buffer.detach() if isinstance(buffer, Tensor) else None, "buffers")
