"""Buffers in the graph: what is read, what only the state holds, each value once."""

from __future__ import annotations

from tests.matrix.programs import small_graph


def test_every_value_is_kept_once_with_its_state_keys() -> None:
    graph = small_graph("buffered", layers=2)
    found = {buffer.fqn: (buffer.names, buffer.fixed) for buffer in graph.buffers}

    def both(name: str) -> tuple[str, ...]:
        return f"layers.0.{name}", f"layers.1.{name}"

    assert found == {
        "offsets": (("offsets",), False), "layers.0.gains": (both("gains"), False),
        "layers.0.table": (both("table"), False), "layers.0.secret": ((), False), "layers.0.mask": (both("mask"), True),
        "layers.0.count": (both("count"), False), "layers.0.nothing": (both("nothing"), False),
    }
