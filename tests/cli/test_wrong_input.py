"""Arguments, models and jobs that are wrong: one line that says what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import EXAMPLES, SMALL, run

PLAN = ("plan", *SMALL)
ON = ("--cluster", "local-cpu:1x8", "--batch", "16")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            (*PLAN, "--cluster", "dgx-h1000:1"),
            "unknown profile 'dgx-h1000'; use one of aws-p3-16xlarge, b200-capped, dgx-2, dgx-a100-40gb",
        ),
        ((*PLAN, "--cluster", "dgx-h100"), "--cluster: 'dgx-h100' does not say how many nodes"),
        ((*PLAN, "--cluster", "dgx-h100:0"), "no positive number of nodes"),
        ((*PLAN, "--cluster", "dgx-h100:two"), "no positive number of nodes"),
        ((*PLAN, "--cluster", "dgx-h100:1x9"), "a node of dgx-h100 has 8"),
        ((*PLAN, "--cluster", "missing.yaml"), "missing.yaml: cannot be read"),
        (PLAN, "--cluster: is missing"),
        (("plan", "", *ON), "error: MODEL: is empty; write path/file.py:callable, hf:PATH or a JOB.yaml"),
        (("plan", "missing.py:gpt", *ON), "missing.py: no such file"),
        (("plan", "missing.py", *ON), "missing.py"),
        (("plan", "hf:missing", *ON), "missing: no such file"),
        (("plan", "hf:missing.yaml", *ON), "missing.yaml: no such file"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:nothing", *ON), "nothing is not defined"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:math", *ON), "math is not callable"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "layers", *ON), "--set: 'layers' is no assignment"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "leyers=3", *ON), "takes no keyword 'leyers'"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "layers=many", *ON), "--set layers"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "0"), "--batch: is 0"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "-4"), "--batch: is -4"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "many"), "--batch"),
        ((*PLAN, *ON, "--seq", "0"), "--seq: is 0"),
        ((*PLAN, *ON, "--precision", "int8"), "--precision: is 'int8'; one of bf16"),
        ((*PLAN, "--cluster", "dgx-v100:1", "--precision", "bf16"), "does not compute in bf16; it has fp16, fp32, fp64"),
        ((*PLAN, *ON, "--gap", "-1"), "--gap: is -1"),
        ((*PLAN, *ON, "--gap", "nan"), "--gap: is nan"),
        ((*PLAN, *ON, "--time-limit", "0"), "--time-limit: is 0"),
        ((*PLAN, *ON, "--pin", "colour=3"), "K one of pipeline"),
        ((*PLAN, *ON, "--pin", "tensor"), "'tensor' pins nothing"),
        ((*PLAN, *ON, "--pin", "tensor=3"), "--pin tensor: 3 does not divide the 8 devices; one of 1, 2, 4, 8"),
        ((*PLAN, *ON, "--pin", "data=4", "--pin", "tensor=4"), "data=4 x tensor=4 = 16 does not fit the 8 devices"),
        ((*PLAN, *ON, "--pin", "pipeline=1", "--pin", "data=2", "--pin", "tensor=2"), "= 4 does not fit the 8 devices"),
        ((*PLAN, *ON, "--pin", "schedule=zbv", "--pin", "recompute=full"), "--pin recompute"),
        ((*PLAN, *ON, "--pin", "context=2"), "--pin context: context=2 excludes 1, and context parallelism beyond it is"),
        ((*PLAN, *ON, "--pin", "expert not in [1,2]"), "expert not in [1,2] excludes 1, and expert parallelism beyond it is"),
        ((*PLAN, *ON, "--pin", f"microbatch={'9' * 20}"), "microbatch: has 20 digits; give a positive number, at most 1,000"),
        ((*PLAN, *ON, "--pin", f"tensor={'9' * 5000}"), "--pin tensor: has 5000 digits; give a positive number"),
        ((*PLAN, *ON, "--headroom", f"{'9' * 400}GiB"), "--headroom: has 400 digits; a part such as 10%"),
        ((*PLAN, *ON, "--pin", "microbatch=3"), "--pin microbatch: microbatch=3 does not divide the batch of 16"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "12", "--pin", "data=8"), "--pin data: data=8 does not divide"),
        ((*PLAN, *ON, "--colour", "red"), "shardwright plan: No such option: --colour"),
        ((*PLAN, *ON, "--set"), "error: shardwright plan: Option '--set' requires an argument. See `shardwright plan --help`."),
        (("plan",), "error: shardwright plan: Missing argument"),
        (("fly",), "error: shardwright: No such command 'fly'"),
        ((*PLAN, *ON, "-o", EXAMPLES), "is a directory"),
        ((*PLAN, *ON, "-o", EXAMPLES / "gpt.py" / "plan.yaml"), "cannot be written"),
        ((*PLAN, *ON, "-o", f"{'x' * 300}.yaml"), "cannot be written (File name too long)"),
        ((*PLAN, *ON, "--seq", "9" * 40), "--seq: has 40 digits; give a positive number, at most 1,000,000,000"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "9" * 30), "--batch: has 30 digits"),
        ((*PLAN, "--cluster", f"dgx-h100:{'9' * 20}"), "has more than 10,000,000 devices"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "dropout=.nan", *ON), "--set: dropout is '.nan'"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "layers=1e400", *ON), "--set: layers is '1e400'"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "vocab=0", *ON), "gpt.py:109: embedding has no rows"),
        (("profile", "-o", "/proc/machine.yaml"), "/proc/machine.yaml: cannot be written"),
        (("hardware", "abacus"), "unknown profile 'abacus'"),
        (("show", "missing.yaml"), "missing.yaml: cannot be read (No such file or directory)"),
        (("check", EXAMPLES), "cannot be read (Is a directory)"),
        (("emit", "missing.yaml"), "missing.yaml: cannot be read"),
        (("show", "/dev/zero"), "/dev/zero: cannot be read (it is a device, not a file)"),
        (("check", "/dev/zero"), "/dev/zero: cannot be read (it is a device, not a file)"),
        (("emit", "/dev/zero"), "/dev/zero: cannot be read (it is a device, not a file)"),
        (("why", "/dev/zero", "tensor=2"), "/dev/zero: cannot be read (it is a device, not a file)"),
        (("validate", "--runs", "/dev/zero"), "/dev/zero: cannot be read (it is a device, not a file)"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[object, ...], named: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert named in outcome.error
    assert outcome.out == ""


def test_no_advice_is_beyond_what_is_allowed() -> None:
    """A batch of eight times that micro-batch would be refused."""
    assert run(*PLAN, *ON, "--pin", "microbatch=999999999", "--pin", "data=8").error.endswith("; another degree")


def small(module: str, returned: str, *, inputs: str = "{'x': torch.randn(batch, 8)}", loss: str = "output.mean()",
          takes: str = "x") -> str:
    """A model file of one product."""
    sizes = "3" if module.startswith("Lazy") else "8, 3"
    return (
        f"import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.l = torch.nn.{module}({sizes})\n    def forward(self, {takes}):\n        x = self.l(x)\n"
        f"        return {returned}\nmodel = M\ndef example_inputs(batch, seq):\n    return {inputs}\n"
        f"def loss(output, batch):\n    return {loss}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
        ("def model(:", "SyntaxError"),
        ("model = 3", "model is not callable"),
        ("def model():\n    return 3", "returned int"),
        ("def model():\n    raise SystemExit(4)", "SystemExit"),
        ("def model(width):\n    return width", "needs the keyword 'width'"),
        (
            "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.e = torch.nn.Embedding(8, 8)\n    def forward(self, input_ids):\n        x = self.e(input_ids)\n"
            "        if x.sum() > 0:\n            x = x * 2\n        return x\nmodel = M",
            "model.py",
        ),
        (small("Linear", "x", inputs="{}"), "example_inputs(batch, seq) returned no dict of tensors"),
        (small("LazyLinear", "x"), "l.weight has no shape before the first forward pass; give the module its sizes"),
        (small("Linear", "x.detach()"), "the loss depends on no trained parameter; compute it from what forward() returns"),
        (small("Linear", "x", loss="batch['x'].mean()"), "the loss depends on no trained parameter"),
        (small("Linear", "x", loss="output[batch['y']].mean()"), "KeyError: 'y'; the inputs are x: example_inputs(batch,"),
        (small("Linear", "x", takes="x, mask"), "'mask'; the inputs are x: example_inputs(batch, seq) says which"),
    ],
)
def test_a_wrong_model_is_one_line(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(text)
    outcome = run("plan", f"{file}:model", "--cluster", "local-cpu:1x2", "--batch", 4, "--seq", 8, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 2
    assert named in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: [", "job.yaml: is not YAML at line"),
        ("model: m.py:b\nmodel: m.py:c", "job.yaml: is not YAML at line 2 (model is written twice); a job has at least"),
        ("model: m.py:b\nconstraints: {tensor: >= 2}", "'>' that cannot start any token); put quotes"),
        ("model: m.py:b\nconstraints:\n  tensor: >= 2\nbatch: 8", "but found '='); put quotes around what begins with >"),
        ("model: m.py:b\nconstraints:\n  schedule: != gpipe", "'!='); put quotes around what begins with >, ! or *"),
        ("model: m.py:b\nconstraints: {layers: {*: {zero: 1}}}", "found ':'); put quotes"),
        ("model: m.py:b\nbatch: 10000000000\ncluster: dgx-h100:1", "job.yaml: batch: has 11 digits"),
        ("batsh: 3\nmodel: m.py:b", "job.yaml: batsh: is no field"),
        ("model: m.py:b\nbatch: many", "job.yaml: batch: is 'many'"),
        ("model: m.py:b\noptimizer: {speed: 3}", "job.yaml: optimizer.speed: is no field"),
        ("model: m.py:b\nconstraints: [a]", "job.yaml: constraints: is ['a']; input should be a mapping of fields"),
        ("model: m.py:b\nconstraints: {colour: red}\ncluster: dgx-h100:1", "job.yaml: constraints.colour: is no field"),
        ("model: m.py:b\nconstraints: {tensor: <= x}\ncluster: dgx-h100:1", "constraints.tensor: 'x' is no degree"),
        ("model: m.py:b\nconstraints: {layers: {a: {tensor: 2}}}\ncluster: dgx-h100:1", "layers.a.tensor: tensor is"),
        ("model: m.py:b\nconstraints: {schedule: zbv, virtual: 3}\ncluster: dgx-h100:1", "virtual=3 contradicts schedule=zbv"),
        ("model: m.py:b\nconstraints: {tensor: 1.0}", "tensor: is 1.0; give a whole number, a word, a bound such as '<= 8'"),
        ("model: m.py:b\nconstraints: {layers: {a: {zero: {b: 1}}}}", "layers.a.zero: is {'b': 1}; give a whole number"),
        ("model: m.py:b\nconstraints: {forbid: [{zero: [[1]]}]}", "forbid.0.zero: is [[1]]; give a whole number"),
        ("model: m.py:b\nconstraints: {forbid: [{}]}", "constraints.forbid.0: is {}; dictionary should have at least 1 item"),
        ("model: m.py:b\nconstraints: {layers: {'a.*': {}}}", "constraints.layers.a.*: is {}; dictionary should have"),
        ("model: m.py:b\nset: {int: [1]}", "job.yaml: set.int: is [1]; give a number, true, false or a word"),
        ("model: m.py:b\nwithin: [1]", "job.yaml: within: is [1]; give a part of the step time, for example 10%"),
        ("model: m.py:b", "job.yaml: cluster: is missing; give one, for example dgx-h100:32"),
        ("model: m.py:b\ncluster: '8'", "job.yaml: cluster: unknown profile '8'; use one of"),
        ("model: m.py:b\ncluster: ''", "job.yaml: cluster: unknown profile ''"),
        ("model: m.py:b\ncluster: 'dgx-h100:99999999999'", "job.yaml: cluster: 'dgx-h100:99999999999' has more than"),
        ("model: m.py:b\ncluster: 'dgx-v100:1'\nprecision: bf16", "job.yaml: precision: V100-SXM2-32GB does not"),
        ("model: ''\ncluster: dgx-h100:1", "job.yaml: model: is ''"),
        ("model: m.py\ncluster: dgx-h100:1", "/m.py' names no callable; write path/file.py:callable"),
        (f"model: {EXAMPLES / 'gpt.py'}:gpt\ncluster: local-cpu:1x1\nset: {{depth: 1}}", "job.yaml: set.depth: "),
        (f"model: {EXAMPLES / 'gpt.py'}:gpt\ncluster: local-cpu:1x1\nset: {{layers: two}}", "job.yaml: set.layers: is 'two'"),
    ],
)
def test_a_wrong_job_is_one_line(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    outcome = run("plan", file)
    assert outcome.code == 2
    assert named in outcome.error


def test_a_link_to_a_device_is_one_line(tmp_path: Path) -> None:
    """It has no end: reading it takes all memory."""
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    for arguments in (("plan", endless), (*PLAN, "--cluster", endless), ("hardware", endless)):
        outcome = run(*arguments)
        assert outcome.code == 2
        assert "endless.yaml: cannot be read (it is a device, not a file)" in outcome.error


def test_a_missing_sequence_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(small("Linear", "x", inputs="{'x': torch.randn(batch, seq)}"))
    outcome = run("plan", f"{file}:model", "--cluster", "local-cpu:1x2", "--batch", 4, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 2
    assert "give --seq, which example_inputs is called with" in outcome.error


@pytest.mark.slow
def test_a_cluster_file_of_too_many_nodes_names_its_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: local-cpu\nnodes: 99999999999\n")
    outcome = run(*PLAN, "--cluster", file)
    assert (outcome.code, outcome.err) == (2, f"error: {file}: nodes: makes more than 10,000,000 devices; give fewer nodes\n")
