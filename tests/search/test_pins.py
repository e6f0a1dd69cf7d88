"""Constraints: what is wrong is named with what is allowed; what is asked for holds in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.constraints import Combination, Condition, Constraints, Headroom
from planner.constraints_text import parse_constraints, parse_pins, parse_section
from planner.ir.errors import NoPlanFits, PinError
from planner.ir.plan import Mesh
from planner.search import Request, search
from planner.search.allowed import Allowed
from planner.search.candidates import Candidate, allowed_choices, enumerate_candidates
from tests.search.made import make_cluster, make_costed, make_graph


def test_pins_are_read() -> None:
    assert parse_pins(["tensor=8", "schedule = 1f1b", "sequence_parallel=true", "zero=0"]).conditions == (
        Condition("tensor", "=", (8,)), Condition("schedule", "=", ("1f1b",)), Condition("sequence_parallel", "=", (True,)),
        Condition("zero", "=", (0,)),
    )


def test_bounds_sets_and_layers_are_read() -> None:
    found = parse_constraints(
        ["tensor<=8", "recompute in [none, selective]", "layers.*: zero=3", "schedule not in [zbv]", "zero>=1"],
        ["schedule=gpipe, tensor>=4", "recompute in [none,full], zero=3"], "10%",
    )
    assert found.conditions == (
        Condition("tensor", "<=", (8,)), Condition("recompute", "in", ("none", "selective")),
        Condition("zero", "=", (3,), "layers.*"), Condition("schedule", "not in", ("zbv",)), Condition("zero", ">=", (1,)),
    )
    assert found.forbidden == (
        Combination((Condition("schedule", "=", ("gpipe",)), Condition("tensor", ">=", (4,)))),
        Combination((Condition("recompute", "in", ("none", "full")), Condition("zero", "=", (3,)))),
    )
    assert found.headroom == Headroom(0.1) and found.headroom.of(1000) == 100
    assert parse_constraints(headroom="4GiB").headroom == Headroom(size_bytes=2**32)


@pytest.mark.parametrize("text", [
    "tensor=8", "tensor<=8", "recompute in [none,selective]", "layers.*: zero=3", "schedule not in [zbv]", "zero!=3",
    "sequence_parallel=false", "a:b: zero=1", "a, b: zero=1", "a: b: recompute in [none,full]",
])
def test_what_is_printed_is_read_again(text: str) -> None:
    (condition,) = parse_pins([text]).conditions
    assert str(condition) == text


def test_patterns_of_layers_may_hold_colons_and_commas() -> None:
    """Torch allows both in the names of modules."""
    written = parse_constraints(["a:b: zero=1"], ["a,b:c: zero=3, d, e: recompute=none, tensor=2"])
    (several,) = written.forbidden
    assert [(c.layers, c.name) for c in (*written.conditions, *several.conditions)] == [
        ("a:b", "zero"), ("a,b:c", "zero"), ("d, e", "recompute"), (None, "tensor"),
    ]
    section = {"layers": {"a:b": {"zero": 1}, "x=1, y: zero": {"recompute": "!= full"}}}
    assert parse_section(section, "job.yaml: constraints").conditions == (
        Condition("zero", "=", (1,), "a:b"), Condition("recompute", "!=", ("full",), "x=1, y: zero"),
    )


@pytest.mark.parametrize(("section", "message"), [
    ({"layers": {"": {"zero": 1}}}, "constraints.layers..zero: an empty pattern names no layer"),
    ({"layers": {"a": {"colour": 1}}}, "constraints.layers.a.colour: 'colour' is no decision; one of pipeline"),
    ({"tensor": []}, "constraints.tensor: is an empty list"), ({"recompute": ["none,full"]}, "'none,full' is unknown"),
    ({"tensor": ""}, "constraints.tensor: '' is no degree"), ({"schedule": "in []"}, "'\\[\\]' is no set of values"),
])
def test_wrong_sections_are_named(section: dict[str, object], message: str) -> None:
    with pytest.raises(PinError, match=message):
        parse_section(section, "job.yaml: constraints")


@pytest.mark.parametrize("text", ["10%", "2.5%", "4 GiB", "300 MiB", "17 B", "0.0123456789%", "99.99999999%", "7.25%"])
def test_headroom_is_printed_as_it_is_read(text: str) -> None:
    assert str(parse_constraints(headroom=text).headroom) == text


def test_a_job_file_says_the_same() -> None:
    section = {
        "tensor": 8, "pipeline": "<= 4", "recompute": ["none", "selective"], "sequence_parallel": True,
        "schedule": "not in [zbv]", "layers": {"layers.*": {"zero": 3}}, "forbid": [{"schedule": "gpipe", "tensor": ">=4"}],
        "headroom": "10%",
    }
    flags = parse_constraints(
        ["tensor=8", "pipeline<=4", "recompute in [none,selective]", "sequence_parallel=true", "schedule not in [zbv]",
         "layers.*: zero=3"],
        ["schedule=gpipe,tensor>=4"], "10%",
    )
    found = parse_section(section, "job.yaml: constraints")
    assert [str(limit) for limit in found.limits] == [str(limit) for limit in flags.limits]
    assert found.conditions[0].field == "job.yaml: constraints.tensor"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tensor"], "write K=V"), (["colour=3"], "K one of pipeline"), (["tensor=0"], "positive number"),
        (["tensor=²"], "positive number"), (["zero=4"], "one of 0, 1, 2, 3"), (["schedule=fast"], "one of gpipe"),
        (["recompute=some"], "one of none"), (["tensor=[2,4]"], r"several values; tensor in \[2,4\]"),
        (["tensor in 4"], "no set of values"), (["tensor in []"], "no set of values"), (["recompute<=full"], "has no order"),
        (["zero>=7"], "no ZeRO stage"), (["zero not in [0,1,2,3]"], "no value"), (["layers.*: tensor=2"], "one for all layers"),
        ([": zero=1"], "--pin zero: an empty pattern names no layer"),
        (["sequence_parallel=maybe"], "true or"), (["tensor=2", "tensor=4"], "both 2 and 4"),
        (["tensor<=2", "tensor>=4"], "tensor>=4 contradicts tensor<=2"),
        (["tensor=1", "sequence_parallel=true"], "sequence_parallel=true contradicts tensor=1"),
        (["zero in [1,2]", "layers.*: zero=3"], r"layers.\*: zero=3 contradicts zero in \[1,2\]"),
        (["context=2"], "not supported yet"), (["expert>=2"], "not supported yet"),
        (["schedule=zbv", "zero=3"], "zero=0, 1 or 2"),
        (["zero=3", "schedule in [zbv,interleaved-zero-bubble]"], "torch loses"),
        (["schedule=gpipe", "virtual=2"], "one stage"), (["schedule=interleaved-1f1b", "virtual=1"], "two stages a rank"),
        (["schedule=zbv", "virtual>=3"], "exactly two|two stages"), (["schedule=zbv", "pipeline=1"], "2 pipeline ranks"),
        (["pipeline=1", "virtual=2"], "virtual=1"), (["data=4", "zero_group=3"], "divisor"),
        (["zero_group=4", "data=6"], "zero_group=4 contradicts data=6: 4 does not divide data=6"),
        (["data=134", "zero_group not in [1,2,67,134]"], "no such group divides data=134"),
        (["schedule=zbv", "layers.*: recompute=full"], "contradicts schedule=zbv"),
    ],
)
def test_wrong_pins_are_named(texts: list[str], message: str) -> None:
    with pytest.raises(PinError, match=message):
        parse_pins(texts)


@pytest.mark.parametrize("texts", [
    ("data>=100", "zero_group=8"), ("zero_group>=65", "data=256"), ("data!=7", "zero_group=100"),
    ("data=134", "zero_group not in [1,2,134]"),
])
def test_a_group_that_divides_an_admitted_degree_is_no_contradiction(texts: tuple[str, ...]) -> None:
    assert len(parse_pins(texts).conditions) == 2


@pytest.mark.parametrize(("forbidden", "headroom", "message"), [
    ("schedule", None, "--forbid: 'schedule' pins nothing"),
    ("schedule=zbv, tensor=x", None, "--forbid tensor: 'x' is no degree"),
    (" ", None, "--forbid: '' pins nothing"), ("schedule=zbv,", None, "--forbid: '' pins nothing"),
    (None, "100%", "leaves no memory"), (None, "much", "--headroom: 'much' is no amount"), (None, "-1GiB", "no amount"),
])
def test_wrong_limits_are_named(forbidden: str | None, headroom: str | None, message: str) -> None:
    with pytest.raises(PinError, match=message):
        parse_constraints((), [forbidden] if forbidden else [], headroom)


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["pipeline=3"], r"pipeline=3 leaves no candidate on 8 devices.*pipeline in \[1, 2, 4\]"),
     (["data=4", "tensor=4"], "data=4 and tensor=4 leave no candidate"),
     (["pipeline=8"], "4 blocks"), (["tensor=1", "pipeline=2", "data=2"], "tensor=1 and pipeline=2 and data=2 leave"),
     (["microbatch=8", "schedule=1f1b", "pipeline>=2", "zero=0"], "microbatch=8 and schedule=1f1b and pipeline>=2 leave"),
     (["nothing.*: zero=1"], "'nothing.\\*' names no layer; the model's are blocks.0"),
     (["data<=2", "zero_group>=4"], "data<=2 and zero_group>=4 leave"),
     (["blocks.1: zero=1", "blocks.*: zero=0"], "blocks.1: zero=1 and blocks.*: zero=0 leave")],
)
def test_impossible_pins_are_named(texts: list[str], message: str) -> None:
    graph = make_graph("aaaa")
    with pytest.raises(PinError, match=message):
        search(graph, make_cluster(8, 1000), Request(8, 4, "fp32", parse_pins(texts)), costing=lambda _: None)


def test_what_cannot_be_placed_is_no_matter_of_memory() -> None:
    pins = parse_pins(["tensor>=2", "sequence_parallel=true"])
    with pytest.raises(PinError, match="tensor>=2 and sequence_parallel=true leave no placement"):
        search(make_graph("aaaa"), make_cluster(8, 1000), Request(8, 4, "fp32", pins), costing=lambda _: None)


def test_what_does_not_fit_is_explained() -> None:
    graph = make_graph("aaaa")
    costed = make_costed(graph, 0)
    pins = parse_pins(["tensor=1", "microbatch=1", "recompute=none"])
    with pytest.raises(NoPlanFits, match=r"rank of stage .* bytes too few"):
        search(graph, make_cluster(2, 60), Request(4, 4, "fp32", pins), costing=lambda _: costed)


CANDIDATE = Candidate(Mesh(pipeline=2, data=2), 1, 4, "1f1b", 1, ((2,),))


def spaces(*texts: str, forbidden: tuple[str, ...] = (), candidate: Candidate = CANDIDATE) -> tuple[Allowed, ...]:
    return allowed_choices(candidate, parse_constraints(texts, forbidden), make_graph("eaab"))


def test_layers_keep_to_their_own_constraints() -> None:
    (found,) = spaces("blocks.1: recompute=full", "zero<=1", "*.3: zero=0")
    every = ("none", "selective", "full")
    assert found == Allowed(every, (0, 1), (), ((every, (0, 1)), (("full",), (0, 1)), (every, (0, 1)), (every, (0,))))
    (alike,) = spaces("blocks.*: zero=1")
    assert alike == Allowed(every, (1,))


def test_forbidden_combinations_leave_every_other_space() -> None:
    every, stages = ("none", "selective", "full"), (0, 1, 2, 3)
    assert set(spaces(forbidden=("recompute=full, zero=3",))) == {
        Allowed(("none", "selective"), stages), Allowed(every, (0, 1, 2)),
    }
    assert spaces(forbidden=("schedule=zbv, recompute=full",)) == (Allowed(every, stages),)
    assert spaces(forbidden=("schedule=1f1b, recompute=full",)) == (Allowed(("none", "selective"), stages),)
    assert spaces(forbidden=("schedule=1f1b, tensor<=4",)) == ()


def test_one_rank_has_every_stage() -> None:
    """Of a copy that only it has, stage 3 frees what it computes with between two passes."""
    alone = replace(CANDIDATE, mesh=Mesh(pipeline=2, tensor=2), zero_groups=((1,),))
    assert spaces(candidate=alone)[0].zero == (0, 1, 2, 3) and spaces("zero=3", candidate=alone)[0].zero == (3,)
    (found,) = spaces("*.3: zero=1", candidate=alone)
    assert [found.of_block(block)[1] for block in range(4)] == [(0, 1, 2, 3)] * 3 + [(1,)]


def names_of(constraints: Constraints, name: str) -> set[object]:
    request = Request(8, 4, "fp32", constraints)
    found = enumerate_candidates(make_graph("aaaa"), make_cluster(8, 1000), request)
    return {each.decided[name] for candidate in found for each in candidate.each}


def test_candidates_keep_to_bounds_and_sets() -> None:
    assert names_of(parse_pins(["tensor<=2"]), "tensor") == {1, 2}
    assert names_of(parse_pins(["data in [2,4]"]), "data") == {2, 4}
    assert names_of(parse_pins(["schedule!=1f1b", "pipeline=1"]), "schedule") == {"gpipe"}
    assert names_of(parse_pins(["zero_group<=2", "data=8"]), "zero_group") == {1, 2}
    both = parse_constraints((), ["pipeline=2, tensor=2"])
    assert names_of(both, "tensor") == {1, 2, 4, 8}
    found = enumerate_candidates(make_graph("aaaa"), make_cluster(8, 1000), Request(8, 4, "fp32", both))
    assert not any(candidate.mesh.pipeline == candidate.mesh.tensor == 2 for candidate in found)


def test_the_plan_keeps_to_constraints_of_layers_and_headroom() -> None:
    graph, cluster = make_graph("eaaab"), make_cluster(2, 900)
    costed = make_costed(graph, 3, zeros=(0, 1, 3))
    constraints = parse_constraints(["data=2", "microbatch=1", "tensor=1", "blocks.2: recompute=full", "blocks.3: zero=3"],
                                    headroom="200B")
    result = search(graph, cluster, Request(8, 4, "fp32", constraints), costing=lambda _: costed)
    decisions = [decision for stage in result.plan.stages for decision in stage.decisions]
    assert decisions[2].recompute == "full" and decisions[3].zero == 3
    assert result.prediction.peak_memory_bytes <= 700 < cluster.chip.memory_bytes
