"""The training loop."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checkpoint, metrics
from .agreement import by_flag, check_alike
from .block import blocks_of
from .claim import claimed
from .data import Batches, BatchInput, Identity, check_data, made_up, make_batches
from .errors import ProgramError, raise_together
from .initialize import Step, initialize
from .launch import Options, World, check_outputs
from .optimizer import LearningRate, LossScale, Optimizer, Reading, clip_factor, squared_norm, sum_over_world
from .parameters import Held, TiedParameter, held_by, require_gradients, zero_gradients
from .random_stream import RandomStream
from .schedule import Runner, Streams, run_step, split_batch
from .state import StateBuffer, unchanging
from .tied import TiedGradients, sum_partial_gradients
from .zero import MASTER_DTYPE, Precision


@dataclass(frozen=True)
class Program:
    """What an emitted program hands to :func:`train`.

    ``modules``: this rank's stage modules, ZeRO applied; ``runner``: their schedule. ``weigh``: the weights of a
    micro-batch's terms, from its inputs: of all, or the samples and what shares are of. ``batch``: samples a step over all
    data ranks; ``microbatches`` a step on each. ``sequence``: tokens a sample. ``recipes``: initial values by FQN (None: left
    as allocated); ``decays``: weight decay by FQN; ``aliases``: further names of tied parameters. ``tied``: those with copies
    in several stages, ``stage_ranks``: the pipeline rank of every stage. ``flops``: model FLOPs of a step; ``peak_flops`` of
    one device in a second (0: unknown). ``random``: stages take ``rng``. ``betas``, ``epsilon``: of AdamW. ``buffers``: the
    persistent ones; ``idle``: whole shapes of the parameters that take no part, by FQN. ``model``: tells it from others.
    """

    world: World
    modules: Sequence[nn.Module]
    runner: Runner
    weigh: Callable[..., tuple[Tensor, ...]]
    inputs: Sequence[BatchInput]
    batch: int
    microbatches: int
    sequence: int
    precision: Precision
    recipes: Mapping[str, Sequence[Step]] | None
    decays: Mapping[str, bool] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    tied: Sequence[TiedParameter] = ()
    stage_ranks: Sequence[int] = (0,)
    flops: float = 0.0
    peak_flops: float = 0.0
    random: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    buffers: Sequence[StateBuffer] = ()
    idle: Mapping[str, Sequence[int]] = field(default_factory=dict)
    model: str = ""


class Trainer:
    """The state of a training run: parameters, optimizer, loss scale and the number of steps done. ``failure``: what this rank
    alone has found wrong; all ranks are told with the numbers of the step, so that none waits for another."""

    def __init__(self, program: Program, options: Options) -> None:
        self.program, self.options, self.world = program, options, program.world
        self.seed, self.done, self._begun = options.seed, 0, False
        self._saved: int | None = None
        self.failure: ProgramError | None = None
        # Samples of the steps done, less what this program's batch makes of as many: other plans had other batches.
        self._samples_before = 0
        initialize(program.modules, program.recipes, options.seed, self.world.device)
        self.parameters: tuple[Held, ...] = held_by(program.modules, program.tied)
        self.tied = TiedGradients(self.world, program.tied, program.stage_ranks)
        rate = LearningRate(options.learning_rate, options.warmup, options.decay_steps)
        self.optimizer = Optimizer(self.parameters, rate, options.weight_decay, program.decays, program.betas, program.epsilon)
        self.loss_scale = LossScale(program.precision == "fp16")
        master = MASTER_DTYPE[program.precision]
        self.unchanging = unchanging(program.buffers, program.idle, program.recipes, options.seed, master)
        trained_on = self._restore()
        self.batches: Batches = make_batches(
            program.inputs, options.data, self.seed, program.batch, self.world.data_rank, self.world.data,
            self.world.device, self._samples_before,
        )
        if trained_on is not None and self.done < options.steps:
            check_data(trained_on, self.batches.identity)

    def gradients(self) -> tuple[float, float]:
        """Forward and backward of the next step: (mean loss, gradient norm). Leaves gradients times the loss scale."""
        return self._read(Reading(self._passes()))

    def step(self) -> tuple[float, float, float]:
        """One step of training: (mean loss, gradient norm, learning rate). Raises ProgramError, on every rank alike, where the
        loss or the norm is not finite and no loss scale is there to be lowered."""
        found = self._passes()
        self._begun = True
        if not self.done:
            self._dump()
        reading = Reading(found)
        rate = self._update(found[1])  # Launched while the backward pass runs: the device goes from one to the other.
        zero_gradients(self.parameters)
        loss, norm = self._read(reading)
        overflow = self.loss_scale.enabled and not math.isfinite(norm)
        if overflow:
            self.optimizer.take_back()
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(loss, norm)
        self.loss_scale.update(overflow)
        self.done += 1
        return loss, norm, rate

    def _passes(self) -> Tensor:
        """Forward and backward of the next step: mean loss (NaN where a rank has failed), gradient norm and total weight;
        float64 on the device."""
        batch = self._batch()
        streams = self._streams()
        weight, batch = weighed(self.program, batch, streams)
        scale = torch.where(weight > 0, self.loss_scale.value / weight.clamp(min=1e-30), 0.0)
        loss_sum = run_step(self.program.runner, batch, scale, streams)
        self.tied.complete(self.parameters)
        if not self._begun:
            require_gradients(self.parameters)  # Before others wait for this rank's: one that raises ends all.
        sum_partial_gradients(self.parameters, self.world.tensor)
        self.tied.sum(self.parameters)
        if self.failure is not None:
            loss_sum = loss_sum * math.nan
        local = [loss_sum / self.world.tensor.degree, squared_norm(self.parameters, self.world.device)]
        total, squared = sum_over_world(local)
        return torch.stack([total / weight.clamp(min=1e-30), squared.sqrt() / self.loss_scale.value, weight])

    def _batch(self) -> dict[str, Tensor]:
        try:
            return self.batches.at(self.done)
        except ProgramError as error:
            self.failure = self.failure or error
            return self.batches.blank()

    def _read(self, reading: Reading) -> tuple[float, float]:
        """Mean loss and gradient norm. Raises ProgramError, on every rank alike, where a rank has failed or the terms weigh
        less than nothing: only here are these numbers on the host, which must not wait earlier. What was updated meanwhile is
        lost."""
        loss, norm, weight = reading.wait()
        if not math.isfinite(loss):  # On every rank: one of them may have failed.
            raise_together(self.failure)
        if weight < 0:
            wrong = f"the total weight of step {self.done + 1} is negative ({weight:g})"
            raise ProgramError("loss", wrong, "weights that add up to 0 or more in every step")
        return loss, norm

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Keep what is wrong with what this rank does alone, for all to be told."""
        try:
            yield
        except ProgramError as error:
            self.failure = self.failure or error

    def _diverged(self, loss: float, norm: float) -> ProgramError:
        """What is said of a step whose update would make all parameters NaN, and every checkpoint after it."""
        onward = "begin again" if self._saved is None else f"go on from the checkpoint of step {self._saved}, or one before it,"
        return ProgramError(
            f"step {self.done + 1}", f"its loss is {loss:g} and its gradient norm {norm:g}, and no update was kept",
            f"{onward} with a lower --learning-rate, another --clip or other data",
        )

    def _update(self, norm: Tensor) -> float:
        """Clip and update; returns the learning rate."""
        factor = clip_factor(norm, self.options.clip) / self.loss_scale.value
        return self.optimizer.step(self.done + 1, factor, ~norm.isfinite() if self.loss_scale.enabled else None)

    def save(self) -> None:
        """Write a checkpoint of the steps done, where one was asked for."""
        if self.options.checkpoint is not None:
            checkpoint.save(
                self.options.checkpoint, self.parameters, self.optimizer, self.done,
                self._samples_before + self.done * self.program.batch, self.seed, self.batches.identity,
                self.loss_scale, self.program.aliases, self.unchanging, self.program.model,
            )
            self._saved = self.done

    def _restore(self) -> Identity | None:
        """Go on from the newest checkpoint; what its data is told by (None: there is none, or it does not say)."""
        trained_on = None
        found = None if self.options.checkpoint is None else checkpoint.newest(self.options.checkpoint)
        if found is not None:
            progress = checkpoint.load(found, self.parameters, self.optimizer, self.loss_scale, self.unchanging)
            self.done, self.seed = progress.step, progress.seed
            self._check_model(progress.model)
            trained_on = None if progress.data is None else Identity(**progress.data)
            self._saved = self.done
            self._samples_before = progress.samples - self.done * self.program.batch
        elif self.options.init_from is not None:
            checkpoint.load_parameters(self.options.init_from, self.parameters, self.unchanging)
        if found is not None or self.options.init_from is not None:
            for block in (block for module in self.program.modules for block in blocks_of(module)):
                block.fill_constants()
        if found is None and self.options.export_start is not None:
            checkpoint.export_start(self.options.export_start, self.parameters, self.program.aliases, self.unchanging)
        return trained_on

    def _check_model(self, trained: str) -> None:
        """Warn, on rank 0, where a run goes on with another model than was ``trained`` until now, whose tensors have the same
        names and shapes: that may be meant."""
        if trained and trained != self.program.model and self.world.rank == 0:
            wrong = f"not the model that the run trained until now ({trained}, now {self.program.model})"
            ways = "its code or settings, its loss, --seq, --precision or torch are others"
            print(f"warning: {self.options.checkpoint}: {wrong}: {ways}; its tensors fit", file=sys.stderr, flush=True)

    def _dump(self) -> None:
        """Write the whole gradients of the first step, where that was asked for, without the loss scale."""
        if self.options.dump_gradients is not None:
            gradients = [
                None if held.gradient is None else held.gradient / self.loss_scale.value for held in self.parameters
            ]
            checkpoint.export(self.options.dump_gradients, self.parameters, gradients, self.program.aliases)

    def _streams(self) -> Streams | None:
        if not self.program.random:
            return None
        step, world = self.done, self.world
        return lambda index: RandomStream(self.seed, step, index, world.data_rank, world.tensor.rank)


def weighed(program: Program, batch: Mapping[str, Tensor], streams: Streams | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight of all terms of a step, 0-dim float: over the micro-batches, then an all-reduce over the data axis; and the
    batch. Where the loss adds averages over other weights, the weight is the number of samples, and the batch tells the stages
    what each average's sum is scaled by: its share, that weight over its own. ``streams``: of the micro-batches, where
    the model draws at random: masks may weigh terms."""
    parts = []
    for index, chunk in enumerate(split_batch(batch, program.microbatches)):
        extra = {} if streams is None else {"rng": streams(index)}
        parts.append(program.weigh(**chunk, **extra))
    weights = torch.stack([torch.stack([one.double() for one in part]) for part in parts]).sum(0)
    dist.all_reduce(weights, group=program.world.data_group)
    shares = [entry for entry in program.inputs if entry.role == "share"]
    ratios = torch.where(weights == 0, 0.0, weights[0] / weights)[1:]
    samples = next(iter(batch.values())).shape[:1]
    told = {entry.keyword: ratio.to(entry.dtype).repeat(samples) for entry, ratio in zip(shares, ratios, strict=True)}
    return weights[0].clone(), {**batch, **told}


def train(program: Program, options: Options) -> None:
    """Train to step ``options.steps``; report every step from rank 0; save where asked."""
    check_alike(by_flag(vars(options)), "give all nodes the same")
    check_outputs(options)
    with claimed(options.checkpoint):
        _train(program, options)


def _train(program: Program, options: Options) -> None:
    trainer = Trainer(program, options)
    if options.compile:
        if program.runner.split_backward:
            raise ProgramError("--compile", "loses gradients under a zero-bubble schedule", "leave it out")
        compile_blocks(program.modules)
    if program.world.rank == 0:
        with trainer.failing():
            for line in _first_lines(program, options, trainer.done, trainer.seed):
                metrics.say(line)
    while trainer.done < options.steps:
        begin = time.perf_counter()
        loss, norm, rate = trainer.step()
        seconds = time.perf_counter() - begin
        if program.world.rank == 0:
            report = metrics.StepReport(
                trainer.done, loss, norm, rate, seconds, program.batch * program.sequence / seconds,
                _mfu(program, seconds), metrics.peak_memory_bytes(program.world.device),
            )
            with trainer.failing():
                metrics.say(report.line(options.steps, program.batch))
            with trainer.failing():
                if options.metrics is not None:
                    metrics.append(options.metrics, report)
        last = trainer.done == options.steps
        if last or (options.checkpoint_every and trainer.done % options.checkpoint_every == 0):
            trainer.save()
    raise_together(trainer.failure)


def _first_lines(program: Program, options: Options, done: int, seed: int) -> Iterator[str]:
    """What is said before the first step of a run that resumes after step ``done`` (0: it begins) under ``seed``."""
    if program.world.stands_in:
        yield "this plan is for accelerators and torch sees none: it trains on the CPU's cores"
    if done:
        left = "" if done < options.steps else f": nothing is left to do up to step {options.steps}"
        yield f"resumed from {options.checkpoint} after step {done}{left}"
        yield from _of_the_beginning(options, seed)
    drawn = made_up(program.inputs)
    if options.data is not None and drawn:
        yield f"{options.data} holds tokens alone; made up (runtime/data.py): {', '.join(drawn)}"


def _of_the_beginning(options: Options, seed: int) -> Iterator[str]:
    """What becomes of the options that are of a run's beginning, where that lies behind: a run that is started again by the
    same command has written the files already."""
    if options.seed != seed:
        yield f"--seed: {options.seed} is not taken: this run resumes, with its checkpoint's, which is {seed}"
    if options.init_from is not None:
        yield f"--init-from: {options.init_from} is not read: it is of the beginning, and this run resumes"
    for flag, file in (("--export-start", options.export_start), ("--dump-gradients", options.dump_gradients)):
        if file is not None:
            done = "is left as it is" if file.exists() else "is not written"
            yield f"{flag}: {file} {done}: it is of the beginning, and this run resumes"


def compile_blocks(modules: Sequence[nn.Module]) -> None:
    """Compile every block's forward in place; ZeRO's hooks stay outside of it."""
    for module in modules:
        for block in blocks_of(module):
            block.forward = torch.compile(block.forward)


def _mfu(program: Program, seconds: float) -> float:
    available = program.peak_flops * program.world.size * seconds
    return program.flops / available if available else 0.0
