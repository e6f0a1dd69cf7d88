"""Reading tables of runs: what is scored, and what a wrong cell is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.commands.validate import DATA, FAILURES, RUNS
from planner.ir.errors import JobError
from planner.validate.rows import parse_rows, read_failures, read_rows, scored_rows
from tests.validate import tables


def test_the_packaged_tables_have_the_rows_that_their_readme_counts() -> None:
    published, single = (read_rows(DATA / name) for name in RUNS)
    assert (len(published), sum(row.configured for row in published), len(scored_rows(published))) == (735, 593, 458)
    assert (len(single), len(scored_rows(single))) == (720, 720)
    assert len(read_failures(DATA / FAILURES)) == 6


def test_of_equal_configurations_the_last_is_scored() -> None:
    rows = parse_rows(tables.text({"row_id": "old"}, {"row_id": "new"}, {"row_id": "other", "tp": "2"}), "runs.csv")
    assert [row.row_id for row in scored_rows(rows)] == ["new", "other"]


@pytest.mark.parametrize("change", [{"trust": "C"}, {"step_time_s": ""}, {"full_config": "0"}])
def test_rows_without_trust_time_or_configuration_are_not_scored(change: dict[str, str]) -> None:
    assert not scored_rows([tables.row(**change)])


@pytest.mark.parametrize(
    ("change", "column"),
    [({"layers": "many"}, "layers"), ({"tp": "1.5"}, "tp"), ({"recompute": "some"}, "recompute"),
     ({"step_time_s": "-1"}, "step_time_s"), ({"zero": "4"}, "zero"),
     ({"seq_parallel": "maybe"}, "seq_parallel"), ({"step_time_s": "nan"}, "step_time_s")],
)
def test_a_wrong_cell_is_named_by_row_and_column(change: dict[str, str], column: str) -> None:
    with pytest.raises(JobError) as error:
        tables.row(**change)
    assert error.value.where == f"runs.csv: row toy, column {column}"
    assert next(iter(change.values())) in error.value.wrong


def test_a_missing_column_is_named() -> None:
    with pytest.raises(JobError, match="has no column engine"):
        parse_rows(tables.text({}).replace(",engine", ",motor", 1), "runs.csv")


def test_a_line_with_too_few_cells_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(tables.text({}) + "short,line\n", encoding="utf-8")
    with pytest.raises(JobError, match="line 3"):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nowhere\.csv"):
        read_rows(tmp_path / "nowhere.csv")
