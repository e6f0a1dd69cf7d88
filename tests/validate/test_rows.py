"""Reading tables of runs: what is scored, and what a wrong cell is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.commands.validate import DATA, FAILURES, RUNS
from planner.ir.errors import JobError
from planner.validate.rows import REQUIRED, parse_rows, read_failures, read_rows, scored_rows
from tests.validate import tables


def test_the_packaged_tables_have_the_rows_that_their_readme_counts() -> None:
    published, single = (read_rows(DATA / name) for name in RUNS)
    assert (len(published), sum(row.configured for row in published), len(scored_rows(published))) == (735, 593, 458)
    assert (len(single), len(scored_rows(single))) == (720, 720)
    assert len(read_failures(DATA / FAILURES)) == 6


def test_of_equal_configurations_the_last_is_scored() -> None:
    rows = parse_rows(tables.text({"row_id": "old"}, {"row_id": "new"}, {"row_id": "other", "tp": "2"}), "runs.csv")
    assert [row.row_id for row in scored_rows(rows)] == ["new", "other"]


@pytest.mark.parametrize("column", [
    "chip", "dtype", "zero", "kv_heads", "mlp_type", "fast_domain", "nic_GBps_per_gpu", "moe_topk", "hardware", "recompute",
])
def test_rows_that_differ_in_what_is_predicted_are_no_repeats(column: str) -> None:
    other = {"chip": "H100-SXM-80GB", "dtype": "fp16", "mlp_type": "gated", "hardware": "Jean Zay", "recompute": "full"}
    rows = parse_rows(tables.text({}, {"row_id": "other", column: other.get(column, "2")}), "runs.csv")
    assert [row.row_id for row in scored_rows(rows)] == ["toy", "other"]


@pytest.mark.parametrize("other", [
    {"tp": "1.0"}, {"recompute": "None"}, {"recompute": " none "}, {"seq_parallel": "0"}, {"seq_parallel": "no"},
    {"seq_parallel": ""}, {"dtype": "BF16"}, {"cp": ""}, {"vpp": "1.0"}, {"ep": "1"}, {"kv_heads": ""}, {"zero": "0.0"},
    {"nic_GBps_per_gpu": "25.00"}, {"fast_domain": "8.0"}, {"mlp_type": "Plain"}, {"chip": "A100 SXM 80GB"},
    {"zero_or_fsdp": "None"}, {"zero_or_fsdp": ""}, {"compile_or_fp8": "None"}, {"hardware": "a100 "},
    {"engine": "Torch-eager"},
])
def test_a_configuration_that_is_written_otherwise_is_the_same(other: dict[str, str]) -> None:
    rows = parse_rows(tables.text({}, {"row_id": "other"} | other), "runs.csv")
    assert [row.row_id for row in scored_rows(rows)] == ["other"]


@pytest.mark.parametrize("words", [{"recompute": "some"}, {"recompute": "none or so"}, {"dtype": ""}, {"fast_domain": ""}])
def test_what_a_row_leaves_open_or_says_in_words_that_are_not_known_is_another_configuration(words: dict[str, str]) -> None:
    rows = parse_rows(tables.text({}, {"row_id": "other"} | words), "runs.csv")
    assert [row.row_id for row in scored_rows(rows)] == ["toy", "other"]


@pytest.mark.parametrize("change", [{"trust": "C"}, {"step_time_s": ""}, {"full_config": "0"}])
def test_rows_without_trust_time_or_configuration_are_not_scored(change: dict[str, str]) -> None:
    assert not scored_rows([tables.row(**change)])


@pytest.mark.parametrize(
    ("change", "column"),
    [({"layers": "many"}, "layers"), ({"tp": "1.5"}, "tp"), ({"step_time_s": "-1"}, "step_time_s"),
     ({"step_time_s": "nan"}, "step_time_s"), ({"hidden": "1e30"}, "hidden"), ({"layers": "20000"}, "layers")],
)
def test_a_wrong_cell_is_named_by_row_and_column(change: dict[str, str], column: str) -> None:
    with pytest.raises(JobError) as error:
        tables.row(**change)
    assert error.value.where == f"runs.csv: row toy, column {column}"
    assert next(iter(change.values())) in error.value.wrong


def test_an_unknown_word_is_doubted_and_means_the_known_one_in_it() -> None:
    row = tables.row(recompute="selective (mlp)", zero="stage 3", seq_parallel="maybe", dtype="FP16", mlp_type="mixed")
    assert (row.recompute, row.zero, row.sequence_parallel, row.precision, row.gated) == ("selective", 3, False, "fp16", False)
    assert sorted(doubt.split(" ")[0] for doubt in row.doubts) == ["mlp_type", "recompute", "seq_parallel", "zero"]
    assert tables.row(recompute="some").recompute is None


@pytest.mark.parametrize(("trust", "meant"), [("b", "B"), (" A ", "A"), ("bad", "C"), ("", "")])
def test_trust_is_one_letter_however_it_is_cased(trust: str, meant: str) -> None:
    row = tables.row(trust=trust)
    assert (row.trust, bool(scored_rows([row]))) == (meant, meant in ("A", "B"))
    assert row.doubts == (("trust 'bad' is not known (one of A, B, C): taken as C",) if trust == "bad" else ())


def test_a_column_that_is_there_twice_is_named() -> None:
    with pytest.raises(JobError, match="has the column layers twice"):
        parse_rows(tables.text({}).replace("hidden", "layers", 1), "runs.csv")


@pytest.mark.parametrize(("names", "again"), [(("a", "b", "a "), "a"), (("line 4", "b", ""), "line 4")])
def test_a_name_that_two_rows_have_is_refused(names: tuple[str, ...], again: str) -> None:
    """What is scored and fitted is chosen by name: an untrusted row of the same name would be too."""
    with pytest.raises(JobError) as error:
        parse_rows(tables.text(*({"row_id": name, "trust": "AC"[at // 2]} for at, name in enumerate(names))), "runs.csv")
    assert (error.value.where, error.value.wrong) == ("runs.csv: line 4", f"has the row_id {again!r} of line 2 again")


def test_no_row_of_the_packaged_tables_is_called_as_another() -> None:
    tables_read = (*(read_rows(DATA / name) for name in RUNS), read_failures(DATA / FAILURES))
    names = [row.row_id for table in tables_read for row in table]
    assert len(set(names)) == len(names) == 735 + 720 + 6


def test_a_missing_column_is_named() -> None:
    with pytest.raises(JobError, match="has no column chip"):
        parse_rows(tables.text({}).replace(",chip", ",motor", 1), "runs.csv")


def test_columns_that_are_not_needed_may_be_missing() -> None:
    columns = [column for column in tables.STATED if column in REQUIRED]
    (row,) = parse_rows(",".join(columns) + "\n" + ",".join(tables.STATED[column] for column in columns) + "\n", "runs.csv")
    assert (row.row_id, row.configured, row.trust, row.family) == ("line 2", True, "B", "A100-SXM-80GB")
    assert row.doubts == ()


def test_a_run_without_a_family_is_called_by_what_is_said_of_it() -> None:
    unnamed = {"family": "", "engine": " ", "chip": "", "hardware": ""}
    said = ({"engine": "megatron", "chip": "H100"}, {"chip": "H100", "hardware": "DGX"}, {"hardware": "DGX"}, {})
    assert [tables.row(**unnamed | cells).family for cells in said] == ["megatron|H100", "H100", "DGX", "no family"]


def test_a_table_that_excel_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(tables.text({}).replace("\n", "\r\n").encode("utf-8-sig"))
    (row,) = read_rows(tmp_path / "runs.csv")
    assert row == tables.row()


def test_columns_may_come_in_any_order() -> None:
    lines = [line.split(",") for line in tables.text({}).splitlines()]
    turned = "\n".join(",".join(reversed(line)) for line in lines)
    assert parse_rows(turned, "runs.csv") == (tables.row(),)


def test_zero_is_read_from_the_source_s_words_where_its_own_column_is_empty() -> None:
    assert tables.row(zero="", zero_or_fsdp="zero3 (FSDP2)").zero == 3


def test_a_line_with_too_few_cells_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(tables.text({}) + "short,line\n", encoding="utf-8")
    with pytest.raises(JobError, match="line 3"):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nowhere\.csv"):
        read_rows(tmp_path / "nowhere.csv")
