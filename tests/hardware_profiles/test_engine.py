"""Engines: strict files, a source for every number, recipes that combine, and today's eager torch as the default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_profiles import DEFAULT_ENGINE, Engine, ProfileFormatError, engine, engine_names
from hardware_profiles.engine import fitted_numbers, origin


def test_an_engine_without_numbers_is_eager_torch_where_every_operation_reads_and_writes_once() -> None:
    eager = engine("torch-eager")
    assert eager == DEFAULT_ENGINE
    own = ("loss_forward", "loss_backward", "sums", "gather_copies", "reduce_copies", "host_s")
    plain = Engine()
    assert replace(eager, **dict.fromkeys(own, 0), optimizer_passes=plain.optimizer_passes) == plain


@pytest.mark.parametrize("name", engine_names())
def test_every_number_of_an_engine_has_a_kind_and_a_source(name: str) -> None:
    found = engine(name)
    assert found.name == name
    for source in found.sources.values():
        kind, _, where = source.partition(": ")
        assert kind in ("datasheet", "measured", "fitted")
        assert len(where) > 3


def test_engines_that_plan_hide_nothing() -> None:
    """The search agrees with the evaluator for these only while their traffic is waited for."""
    for name in ("torch-eager", "torch-compiled"):
        found = engine(name)
        assert (found.gathers_hidden, found.gathers_floor, found.gradients_hidden, found.gradients_floor) == (0, 1, 0, 1)
        assert (found.sends_exposed, found.sends_blocking, found.sends_scattered, found.step_s) == (1, 0, False, 0)
        assert found.outputs_kept == 1


def test_recipes_lie_over_their_engine_and_combine() -> None:
    plain, narrow, both = (engine(name) for name in ("torchtitan", "torchtitan+fp8", "torchtitan+fp8+async"))
    assert (plain.matmul_dtype, narrow.matmul_dtype, both.matmul_dtype) == (None, "float8", "float8")
    assert narrow.tensor_exposed == plain.tensor_exposed
    assert both.tensor_exposed == engine("torchtitan+async").tensor_exposed
    assert both.cast_passes == narrow.cast_passes


@pytest.mark.parametrize("name", ["", "megatron-9", "megatron+fp9", "torchtitan+fp8+later"])
def test_an_unknown_engine_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ProfileFormatError, match=r"unknown engine .*use one of .*torch-eager"):
        engine(name)


def test_a_number_knows_the_document_that_gives_it() -> None:
    assert origin("torchtitan+fp8", "cast_passes") == "torchtitan+fp8"
    assert origin("torchtitan-eager+fp8", "cast_passes") == "torchtitan+fp8"
    assert origin("torchtitan-eager", "pointwise_traffic") == "torchtitan-eager"
    assert origin("torchtitan-eager", "gathers_floor") == "torchtitan"
    assert origin("torch-eager", "host_s") == "torch-eager"
    assert origin("torch-eager", "tensor_exposed") is None
    assert "gathers_floor" in fitted_numbers("torchtitan")
    assert "optimizer_passes" not in fitted_numbers("torchtitan")
