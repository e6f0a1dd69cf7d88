"""benchmarks/accelerator.py, end to end on a case that any machine runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import accelerator as script
from hardware_profiles import describe
from hardware_profiles.measure import Settings
from tests.hardware_profiles.test_measure import measured


def test_cases_are_named_once() -> None:
    keys = [case.key for case in script.CASES]
    assert len(set(keys)) == len(keys) >= 12
    assert {case.compiled for case in script.CASES} == {True, False}
    assert {case.recompute for case in script.CASES} == {"none", "selective", "full"}


@pytest.mark.slow
def test_a_tiny_case_is_prepared_run_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, found, output = tmp_path / "run", tmp_path / "measured.json", tmp_path / "results" / "accelerator.json"
    script.prepare(folder, "local-cpu:1x1", script.TINY)
    assert (folder / "measure" / "worker.py").exists()
    content = measured(Settings(1, "cuda"))
    found.write_text(json.dumps({
        "machine": asdict(content.machine), "observations": [asdict(item) for item in content.observations],
        "runs": {script.TINY[1].key: {"out_of_memory": True}},
    }))  # fmt: skip
    script.run(folder, found, 600.0, quick=True)
    runs = json.loads(found.read_text())["runs"]
    assert len(runs[script.TINY[0].key]["step_s"]) == 3
    assert runs[script.TINY[1].key] == {"out_of_memory": True}
    runs[script.TINY[0].key] |= {
        "allocated_bytes": 10 << 20, "reserved_bytes": 20 << 20, "device_bytes": 30 << 20, "kernels_s": 0.5, "kernel_count": 7,
    }
    found.write_text(json.dumps({**json.loads(found.read_text()), "runs": runs}))
    script.report(folder, found, output)
    result = json.loads(output.read_text())
    first, second = result["cases"]
    assert set(first["error_pct"]) == {"packaged", "measured", "kernels", "allocated", "reserved", "device"}
    assert first["parameters"] > 1e5
    assert second["out_of_memory"]
    assert result["allocated_error_pct"] == pytest.approx(abs(first["error_pct"]["allocated"]))
    assert {row.kind for row in describe(str(output.with_name("accelerator_profile.yaml")))} == {"measured"}
    assert "out of memory" in capsys.readouterr().out
