"""predict_rows: price prepared rows and evaluate them, as every plan is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hardware_profiles import Cluster, Engine
from hardware_profiles import engine as engine_called
from planner.evaluate import evaluate_counted, replayed
from planner.ir.plan import Prediction
from planner.validate.prepare import PreparedRow
from planner.validate.rows import Row


@dataclass(frozen=True)
class RowPrediction:
    """What is predicted of a row, beside the row."""

    prepared: PreparedRow
    prediction: Prediction

    @property
    def row(self) -> Row:
        return self.prepared.row

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less one; None where none was measured."""
        return None if self.row.step_s is None else self.step_s / self.row.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, less one; None where none was measured."""
        return None if self.row.peak_bytes is None else self.prediction.peak_memory_bytes / self.row.peak_bytes - 1.0


def predict_rows(
    prepared: Iterable[PreparedRow], *, change_cluster: Callable[[Cluster], Cluster] | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> tuple[RowPrediction, ...]:
    """Predict every row. ``change_cluster`` replaces numbers of a row's chip and links, ``engines`` whole engines by name
    (``NAME`` or ``NAME+RECIPE``); a fit calls this with its trial values."""
    return tuple(predict_row(item, change_cluster, engines) for item in prepared)


def predict_row(
    item: PreparedRow, change_cluster: Callable[[Cluster], Cluster] | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> RowPrediction:
    """Predict one row."""
    cluster = item.job.cluster if change_cluster is None else change_cluster(item.job.cluster)
    given = (engines or {}).get(item.plan.engine)
    engine = engine_called(item.plan.engine) if given is None else given
    prediction = evaluate_counted(item.plan, item.counted, cluster, engine)
    return RowPrediction(item, replayed(prediction, item.plan, item.counted.graph, cluster))
