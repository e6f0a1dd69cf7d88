"""Trains gpt with 8 devices (pipeline 2 x data 2 x tensor 2).

    torchrun --nproc-per-node 8 train.py --steps 100
"""

import torch

from model import ALIASES, BUFFERS, CHAIN, CROSSING, DECAYS, IDLE, INPUTS, MADE_FOR, RECIPES, SHARED, Stage, weigh
from runtime import launch
from runtime.block import blocks_of
from runtime.loop import Program, train
from runtime.parameters import TiedParameter
from runtime.schedule import make_schedule, stages_of_rank
from runtime.settings import Settings, by_variable, check_settings
from runtime.stage import ZeroStage
from runtime.zero import MASTER_DTYPE, shard

MODEL = ""  # of the trace that this was emitted from
PRECISION = "bf16"
SEQUENCE = 16
MESH = {"pipeline": 2, "data": 2, "tensor": 2}  # slowest to fastest
ZERO_GROUP = 2  # data ranks that one ZeRO shard group spans
BATCH, MICRO, ACCUMULATION = 8, 1, 4  # samples; samples; micro-batches a step
SCHEDULE, VIRTUAL = "1f1b", 1
STAGES = [  # first block, last (exclusive), ZeRO stage of each
    (0, 2, [1] * 2),
    (2, 5, [1] * 3),
]

DEFAULTS = {  # of the options of the same names
    "learning_rate": 0.0003, "warmup": 10,
    "weight_decay": 0.1, "clip": 1.0,
}
BETAS, EPSILON = (0.9, 0.95), 1e-08  # AdamW


def build_stages(world, indices):
    """This rank's stages: made without memory, sharded over the data axis."""
    torch.set_default_dtype(MASTER_DTYPE[PRECISION])
    with torch.device("meta"):
        modules = [Stage(*STAGES[index][:2], world.tensor) for index in indices]
    torch.set_default_dtype(torch.float32)
    for module, index in zip(modules, indices, strict=True):
        first, _, zero = STAGES[index]
        chain, units = blocks_of(module), module.units()
        stages = [zero[members[0] - first] for members in units]
        blocks = [[chain[member - first] for member in members] for members in units]
        shard([unit[0] if len(unit) == 1 else unit for unit in blocks], stages, world.data_mesh, PRECISION)
    return modules


def crossing(module_names, world):
    """What passes between two stages for one micro-batch, without memory."""
    tensors = []
    for name in module_names:
        shape, dtype, dim, gradient = CROSSING[name]
        local = [world.tensor.size(extent) if at == dim else extent for at, extent in enumerate(shape)]
        tensors.append(torch.empty(local, dtype=dtype, device="meta", requires_grad=gradient))
    return tensors


def build(device=None):
    """Mesh, stages, ZeRO and schedule: the program of this rank."""
    settings = Settings(
        precision=PRECISION, mesh=MESH, zero_group=ZERO_GROUP, total=BATCH, micro=MICRO, accumulation=ACCUMULATION,
        schedule=SCHEDULE, virtual=VIRTUAL, stages=STAGES, recomputes=[cls.recomputes for _, cls, _ in CHAIN],
        shared=SHARED, made_for=MADE_FOR, betas=BETAS, epsilon=EPSILON, sequence=SEQUENCE, inputs=INPUTS,
    )
    check_settings(settings)
    world = launch.start(
        **MESH, order=tuple(MESH), zero_group=ZERO_GROUP, device=device, accelerators=True, told=by_variable(settings),
    )
    pipeline = MESH["pipeline"]
    owned = [stages_of_rank(SCHEDULE, pipeline, rank, VIRTUAL) for rank in range(pipeline)]
    owner = [next(r for r in range(pipeline) if index in owned[r]) for index in range(len(STAGES))]
    indices = owned[world.pipeline_rank]
    modules = build_stages(world, indices)
    stages = modules
    if pipeline > 1:
        stages = [
            ZeroStage(
                module, index, len(STAGES), world.device, world.pipeline_group,
                receives=crossing(module.receives, world), sends=crossing(module.sends, world),
            )
            for index, module in zip(indices, modules, strict=True)
        ]
    holders = {
        fqn: tuple(index for index, (first, last, _) in enumerate(STAGES) if any(first <= b < last for b in blocks))
        for fqn, blocks in SHARED.items()
    }
    return Program(
        world=world, modules=modules, runner=make_schedule(SCHEDULE, stages, ACCUMULATION), weigh=weigh, inputs=INPUTS,
        batch=BATCH, microbatches=ACCUMULATION, sequence=SEQUENCE, precision=PRECISION, recipes=RECIPES,
        decays=DECAYS, aliases=ALIASES,
        tied=[TiedParameter(fqn, stages) for fqn, stages in holders.items() if len(stages) > 1], stage_ranks=owner,
        flops=0 * BATCH, peak_flops=0, random=False,
        betas=BETAS, epsilon=EPSILON, buffers=BUFFERS, idle=IDLE, model=MODEL,
    )


def main():
    options = launch.parse_options(**DEFAULTS)
    train(build(), options)


if __name__ == "__main__":
    launch.main_guard(main)
