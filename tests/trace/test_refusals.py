"""Whatever is wrong with a model, ``shardwright plan`` says so in one line and exits with 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.cli import main
from planner.ir.errors import ModelError
from planner.trace import load_model

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Plan a model that is wrong; returns the error line."""
    output = str(tmp_path_factory.mktemp("refused") / "plan.yaml")

    def plan(model: str, *flags: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["plan", model, "--cluster", "local-cpu:1x1", "--batch", "1", "-o", output, *flags])
        said = capsys.readouterr()
        assert left.value.code == 2, said.err
        assert said.out == "", "an error belongs on standard error"
        assert "Traceback" not in said.err
        *progress, line = said.err.strip().splitlines()
        assert line.startswith("error: ") and not any(text.startswith("error") for text in progress)
        assert all(text.startswith("tracing ") for text in progress), progress
        return line.removeprefix("error: ")

    return plan


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Write a model file; returns its path."""

    def text(source: str) -> str:
        path = tmp_path / "model.py"
        path.write_text(source)
        return str(path)

    return text


def test_missing_file(refused: Refused) -> None:
    assert refused("nowhere.py:make") == "nowhere.py: no such file; write path/file.py:callable or hf:PATH"


def test_directory(refused: Refused, tmp_path: Path) -> None:
    assert refused(f"{tmp_path}:make") == f"{tmp_path}: is a directory; write path/file.py:callable or hf:PATH"


def test_no_python_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("make = 1")
    assert refused(f"{tmp_path}/model.txt:make") == f"{tmp_path}/model.txt: is no Python file; write path/file.py:callable"


def test_no_entry(refused: Refused) -> None:
    assert refused(str(GPT)) == f"MODEL: '{GPT}' names no callable; write path/file.py:callable or hf:PATH"
    assert f"{GPT}:gtp: gtp is not defined in {GPT}; callables there: " in refused(f"{GPT}:gtp")


def test_entry_is_not_callable(refused: Refused) -> None:
    assert f"math is not callable in {GPT}; callables there: " in refused(f"{GPT}:math")


def test_returns_no_module(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("def make():\n    return [1]\n")
    assert refused(f"{path}:make") == f"{path}:make: make returned list; it must return a torch.nn.Module"


def test_unknown_setting(refused: Refused) -> None:
    said = refused(f"{GPT}:gpt", "--set", "depth=3")
    assert said.startswith(f"--set depth: {GPT}:gpt takes no keyword 'depth'; it takes layers, hidden, heads")


@pytest.mark.parametrize(("setting", "right"), [
    ("layers=many", "is 'many' (str); {} takes int"),
    ("layers=2.5", "is 2.5 (float); {} takes int"),
    ("layers=true", "is True (bool); {} takes int"),
    ("bias=1", "is 1 (int); {} takes bool"),
    ("dropout=high", "is 'high' (str); {} takes float"),
    ("ffn_hidden=wide", "is 'wide' (str); {} takes int or none"),
])
def test_setting_of_the_wrong_type(refused: Refused, setting: str, right: str) -> None:
    key = setting.partition("=")[0]
    assert refused(f"{GPT}:gpt", "--set", setting) == f"--set {key}: {right.format(f'{GPT}:gpt')}"


def test_missing_keyword(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("def make(width):\n    return None\n")
    assert refused(f"{path}:make") == f"{path}:make: needs the keyword 'width'; give --set width=VALUE"


def test_syntax_error(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("import torch\n\ndef make(:\n    pass\n")
    assert refused(f"{path}:make").startswith(f"{path}:3: importing it failed: SyntaxError: ")


@pytest.mark.slow
@pytest.mark.parametrize(("line", "said"), [
    ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"), ("import no_such_module", "ModuleNotFoundError: No"),
    ("import json; json.loads('{')", "JSONDecodeError: "), ("import sys; sys.exit(0)", "SystemExit: 0"),
    ("assert False", "AssertionError: AssertionError"),
])
def test_file_and_builder_that_raise(refused: Refused, write: Callable[[str], str], line: str, said: str) -> None:
    path = write(f"import torch\n{line}\ndef make():\n    pass\n")
    assert refused(f"{path}:make").startswith(f"{path}:2: importing it failed: {said}")
    path = write(f"import torch\ndef make():\n    {line}\n")
    assert refused(f"{path}:make").startswith(f"{path}:3: building the model failed: {said}")


def test_a_library_beside_the_file_is_named(refused: Refused, write: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def width():\n    return 1 // 0\n")
    path = write("def make():\n    from beside import width\n    return width()\n")
    assert refused(f"{path}:make") == (
        f"{tmp_path}/beside.py:2: building the model failed: ZeroDivisionError: integer division or modulo by zero")


def test_a_constructor_that_looks_at_weights(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("""from torch import nn
from torch.nn.utils.parametrizations import orthogonal

def make():
    return orthogonal(nn.Linear(32, 32))
""")
    assert refused(f"{path}:make") == (
        f"{path}:5: building the model looks at the values of weights (aten.allclose.default), which are not computed while "
        "planning; do without; torch's orthogonal() takes use_trivialization=False"
    )


def test_forward_that_raises(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("""from torch import nn

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(8, 4)
    def forward(self, input_ids):
        return self.e(input_ids) @ self.e.weight

def make():
    return M()
""")
    assert refused(f"{path}:make", "--seq", "4").startswith(f"{path}:8: cannot be traced: ")


INPUTS = """import torch
from torch import nn

def example_inputs(batch, seq):
    return {line}

def make():
    return nn.Linear(4, 4)
"""


def test_a_compiled_librarys_line_is_not_the_users(
    refused: Refused, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is relative, as that of a file beside the model's where the command runs there."""
    path = write(INPUTS.replace("{line}", "__import__('numpy').random.randint(0, 0, batch)"))
    monkeypatch.chdir(Path(path).parent)
    assert refused(f"{path}:make").startswith(f"{path}:5: example_inputs failed: ValueError: high <= 0")


@pytest.mark.slow
@pytest.mark.parametrize(("line", "said"), [
    ("{'input': torch.zeros(batch, seq // 2)}", ":5: example_inputs failed: TypeError: unsupported operand"),
    ("{'input': __import__('numpy').random.randint(0, 0, batch)}", ":5: example_inputs failed: ValueError: high <= 0"),
    ("exit('no data')", ":5: example_inputs failed: SystemExit: no data"),
    ("{'input': __import__('numpy').stack([])}", ":5: example_inputs failed: ValueError: need at least one array"),
    ("[torch.zeros(batch, 4)]", ":make: example_inputs(batch, seq) returned no dict of tensors"),
    ("{'class': torch.zeros(batch, 4)}", ":make: example_inputs: the key 'class' is no name of an argument; give an"),
    ("{'the input': torch.zeros(batch, 4)}", ":make: example_inputs: the key 'the input' is no name of an argument; give an"),
    ("{'input': torch.zeros(4, batch)}", ":make: example_inputs: input has shape (4, 2) with a batch of 2; the first dim must"),
    ("{'input': torch.zeros(batch, batch)}", ":make: example_inputs: input has shape (2, 2) in float32 with a batch of 2, "
     "(3, 3) in float32 of 3; only the first dim may depend on the batch"),
    ("{f'input{batch}': torch.zeros(batch)}", ":make: example_inputs: gives input2 with a batch of 2, input3 of 3; the names"),
    ("{'input': torch.zeros(batch, 4, dtype=torch.uint16)}", ":make: example_inputs: input is uint16; give it in one of"),
    ("{'input': torch.zeros(batch, 4, dtype=torch.float8_e5m2)}", ":make: example_inputs: input is float8_e5m2; give it in"),
    ("{'input': torch.eye(batch, 4).to_sparse()}", ":make: example_inputs: input is a sparse_coo tensor; give a dense one"),
    ("{'input': torch.nested.nested_tensor([torch.ones(4)] * batch)}", ":make: example_inputs: input is a nested tensor; give"),
    ("{'input': torch.nested.nested_tensor([torch.ones(4)] * batch, layout=torch.jagged)}", ":make: example_inputs: input is "),
    ("{'input': torch.zeros(batch, 4)}", ":make: the model's output"),
])
def test_example_inputs(refused: Refused, write: Callable[[str], str], line: str, said: str) -> None:
    path = write(INPUTS.replace("{line}", line))
    if said == ":make: the model's output":
        assert "labels" in refused(f"{path}:make")
    else:
        assert refused(f"{path}:make").startswith(path + said)


def test_a_batch_input_and_a_buffer_of_one_name(refused: Refused, write: Callable[[str], str]) -> None:
    """Where what depends on no parameter reads both."""
    path = write("""import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer('mask', torch.ones(4))
    def forward(self, x, mask):
        scale = (mask * self.mask).softmax(-1)
        return self.net(x) * scale

def example_inputs(batch, seq):
    return {'x': torch.zeros(batch, 4), 'mask': torch.ones(batch, 4)}

def loss(outputs, batch):
    return outputs.square().mean()

def make():
    return Model()
""")
    assert refused(f"{path}:make") == (
        f"{path}:make: mask is a batch input and a buffer, and what depends on no parameter reads both; "
        "give one of them another name"
    )


def test_inputs_that_no_argument_takes(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("""import torch
from torch import nn

class Model(nn.Module):
    def forward(self, image, text):
        return image

def example_inputs(batch, seq):
    return {'picture': torch.zeros(batch, 4), 'labels': torch.zeros(batch)}

def make():
    return Model()
""")
    assert refused(f"{path}:make") == (
        f"{path}:make: forward takes image, text, example_inputs gives picture, labels; "
        "give an input the name of the argument that takes it"
    )


@pytest.mark.parametrize(("returned", "said"), [
    ("y.mean()", "is a tensor of shape () in float32"), ("y.long()", "is a tensor of shape (1000003, 5, 4) in int64"),
    ("{'y': y}", "is a dict"),
])
def test_output_that_is_no_logits(refused: Refused, write: Callable[[str], str], returned: str, said: str) -> None:
    path = write(
        "from torch import nn\n\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.table = nn.Embedding(4, 4)\n"
        f"    def forward(self, input_ids):\n        y = self.table(input_ids)\n        return {returned}\n\n"
        "def make():\n    return Model()\n"
    )
    assert refused(f"{path}:make", "--seq", "5") == (
        f"the model's output: {said}; return logits [batch, seq, vocabulary], or define loss()"
    )


def test_batch_where_the_model_wants_tokens(refused: Refused, write: Callable[[str], str]) -> None:
    path = write(
        "from torch import nn\n\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.table = nn.Embedding(4, 4)\n"
        "    def forward(self, batch):\n        return self.table(batch)\n\n"
        "def make():\n    return Model()\n"
    )
    said = refused(f"{path}:make", "--seq", "5")
    assert said.startswith(f"{path}:8: cannot be traced: TypeError: ")
    assert said.endswith("; batch is given the dict of all inputs: annotate it as Tensor, or give it another name than batch, "
                         "to be given the first alone")


def test_loss_is_no_function(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("loss = 3\ndef make():\n    pass\n")
    assert refused(f"{path}:make") == f"{path}: defines loss as int; define loss(outputs, batch)"


def test_no_sequence(refused: Refused, write: Callable[[str], str]) -> None:
    path = write("from torch import nn\n\ndef make():\n    return nn.Embedding(4, 4)\n")
    assert refused(f"{path}:make").startswith("--seq: is not given; ")


def test_sequence_beyond_the_table(refused: Refused) -> None:
    said = refused(f"{GPT}:gpt", "--seq", "16", "--set", "seq=8", "--set", "layers=1")
    assert said.startswith(f"{GPT}:") and said.endswith(
        "position 15 is looked up in positions.weight, which has 8 rows; give --seq 8 or less, or a longer table")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Write a config.json; returns its path."""

    def values(**fields: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path / "config.json"

    return values


def test_no_config(refused: Refused, tmp_path: Path) -> None:
    right = "hf:PATH is a config.json or the directory that holds one"
    assert refused(f"hf:{tmp_path}") == f"{tmp_path}/config.json: no such file; {right}"
    assert refused(f"hf:{tmp_path}/other.json") == f"{tmp_path}/other.json: no such file; {right}"


@pytest.mark.slow
@pytest.mark.parametrize("loop", [
    "for sample in x", "for sample in x.unbind(0)", "for sample in x.split(1)", "for sample in torch.chunk(x, len(x))",
    "for sample in (x[index] for index in range(len(x)))", "for sample in (x[i:i + 1, :2] for i in range(x.shape[0]))",
    "for sample in (x.select(0, index) for index in range(x.size(0)))",
])
def test_loop_over_samples(refused: Refused, write: Callable[[str], str], loop: str) -> None:
    """Before a million of them have been traced."""
    path = write(f"""import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
    def forward(self, input_ids):
        x = self.a(input_ids)
        few = [x[:, place] for place in range(3)] + list(x[:, :3].unbind(1))
        return torch.stack([self.b(sample) {loop}]) + sum(few).mean()
""")
    assert refused(f"{path}:Net", "--seq", "200") == (
        f"{path}:9: goes through the samples of the batch one by one; "
        "compute all of them at once, or give torch.vmap what one sample needs"
    )


def test_config_is_no_json(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert refused(f"hf:{tmp_path}").startswith(f"{tmp_path}/config.json: is no JSON (")


def test_config_without_type(refused: Refused, config: Callable[..., Path]) -> None:
    file = config(hidden_size=8)
    assert refused(f"hf:{file}") == f"{file}: model_type: is missing; it must name a transformers model type, such as llama"


def test_unknown_type(refused: Refused, config: Callable[..., Path]) -> None:
    file = config(model_type="nonsense")
    assert refused(f"hf:{file}").startswith(f"{file}: model_type: 'nonsense' is unknown to transformers ")


def test_unknown_architecture(refused: Refused, config: Callable[..., Path]) -> None:
    for name in ("NoSuchModel", "GPT2Config", "pipeline"):
        file = config(model_type="gpt2", architectures=[name])
        said = refused(f"hf:{file}")
        assert said.startswith(f"{file}: architectures: transformers ")
        assert said.endswith(f"has no model class '{name}'; name one that it has")


def test_config_that_does_not_fit_together(refused: Refused, config: Callable[..., Path]) -> None:
    file = config(model_type="gpt2", n_embd=30, n_head=4, n_layer=1, vocab_size=8, bos_token_id=0, eos_token_id=0)
    assert refused(f"hf:{file}").startswith(f"{file}: GPT2LMHeadModel refuses it: ValueError: ")


def test_config_setting(refused: Refused, config: Callable[..., Path]) -> None:
    file = config(model_type="llama")
    assert refused(f"hf:{file}", "--set", "depth=3").startswith("--set depth: LlamaConfig has no field 'depth'; it has ")
    assert refused(f"hf:{file}", "--set", "hidden_size=wide").startswith("--set hidden_size: is 'wide': ")


def test_no_transformers(config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(model_type="llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError) as error:
        load_model(f"hf:{file}", {}, None)
    assert str(error.value) == f"hf:{file}: needs transformers; pip install 'shardwright[huggingface]'"
