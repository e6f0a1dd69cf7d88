"""`shardwright profile`: its errors are one line and leave no file; what it writes is a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hardware_profiles import resolve_cluster
from hardware_profiles.measure import MeasureError, Measurement, Probe, Settings, machine, pool
from tests.commands import run
from tests.hardware_profiles.test_measure import measured


def stand_in(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None = None) -> list[Settings]:
    """A measurement that takes no time. Returns the settings that it is called with."""
    asked: list[Settings] = []

    def measure(settings: Settings, progress: object) -> Measurement:
        asked.append(settings)
        if outcome is not None:
            raise outcome
        return measured(settings)

    monkeypatch.setattr("hardware_profiles.measure.measure", measure)
    return asked


def test_what_is_written_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    path = tmp_path / "here" / "machine.yaml"
    done = run("profile", "-o", path, "--ranks", 4, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert asked == [Settings(4, "cpu")]
    assert (done.json["profile"], done.json["ranks"]) == (str(path), 4)
    assert {field["kind"] for field in done.json["fields"]} == {"measured"}
    assert resolve_cluster(f"{path}:1x2").devices == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["machine.yaml"]
    assert "attention_tile" in run("hardware", path).out
    table = run("profile", "-o", path, "--ranks", 2, "--device", "cpu", "--quick").out
    assert "chip.gemm.float32.maximum" in table
    assert asked[-1] == Settings(2, "cpu", quick=True)


@pytest.mark.parametrize(("options", "says"), [
    (("--ranks", 0), "--ranks: is 0; give a number of processes from 1 up"),
    (("--device", "tpu"), "--device: is 'tpu'; one of auto, cpu, cuda"),
    (("--ranks", "many"), "--ranks"),
])  # fmt: skip
def test_a_wrong_option_is_one_line(
    options: tuple[object, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in(monkeypatch)
    done = run("profile", "-o", tmp_path / "machine.yaml", *options)
    assert done.code == 2
    assert says in done.error
    assert not asked
    assert not list(tmp_path.iterdir())


def test_ranks_without_memory_for_them_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them is started; one a core is never refused."""
    asked = stand_in(monkeypatch)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 3 << 30)
    monkeypatch.setattr(machine, "usable_cores", lambda: 4.0)
    done = run("profile", "-o", tmp_path / "machine.yaml", "--device", "cpu", "--ranks", 100_000)
    assert done.code == 2
    assert "--ranks: is 100000; at most 6: this machine has" in done.error and "a process takes 0.5 GiB" in done.error
    assert not asked and not list(tmp_path.iterdir())
    assert run("profile", "-o", tmp_path / "machine.yaml", "--device", "cpu", "--ranks", 6).code == 0
    monkeypatch.setattr(machine, "usable_cores", lambda: 64.0)
    assert run("profile", "-o", tmp_path / "machine.yaml", "--device", "cpu", "--ranks", 64).code == 0


def test_a_place_that_cannot_be_written_is_known_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "machine.yaml"):
        done = run("profile", "-o", place, "--device", "cpu")
        assert done.code == 2
        assert str(place) in done.error
    assert not asked


@pytest.mark.parametrize("name", ["machine", "machine.json"])
def test_a_name_that_no_cluster_could_have_is_known_before_measuring(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--cluster` takes it for the name of a packaged profile, and so did what is printed in the end."""
    asked = stand_in(monkeypatch)
    done = run("profile", "-o", tmp_path / name, "--device", "cpu")
    assert done.code == 2
    assert f"{tmp_path / name}: is no YAML file; give -o a file whose name ends in .yaml" in done.error
    assert not asked and not list(tmp_path.iterdir())


def test_a_device_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    os.mkfifo(tmp_path / "pipe.yaml")
    done = run("profile", "-o", tmp_path / "pipe.yaml", "--device", "cpu")
    assert done.code == 2 and "pipe.yaml: is no regular file; give -o a file" in done.error
    assert not asked and (tmp_path / "pipe.yaml").is_fifo()


def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, KeyboardInterrupt())
    done = run("profile", "-o", tmp_path / "machine.yaml", "--device", "cpu")
    assert done.code == 130
    assert "was not written" in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_a_failed_rank_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, MeasureError("profile", "rank 1 failed (out of memory)", "try --ranks 1, or --quick"))
    done = run("profile", "-o", tmp_path / "machine.yaml", "--device", "cpu")
    assert done.code == 2
    assert "rank 1 failed" in done.error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_measure_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ranks, a probe of every kind."""
    probes = (
        Probe("gemm", (64, 64, 64)), Probe("attention", (1, 1, 32, 16, 1)), Probe("attention_backward", (1, 1, 32, 16, 1)),
        Probe("stream", (1 << 12,)), Probe("launch"), Probe("hook"),
        *(Probe("function", (1 << 11,), name=name) for name in ("gelu_tanh", "layer_norm_backward", "cross_entropy_loss")),
    )  # fmt: skip
    exchanges = tuple(
        Probe(subject, (4096, 2)) for subject in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    )
    monkeypatch.setattr(pool, "compute_probes", lambda settings: probes)
    monkeypatch.setattr(pool, "exchange_probes", lambda settings: exchanges)
    seen: list[tuple[int, int]] = []
    done = pool.measure(Settings(2, "cpu", quick=True), lambda count, total, what: seen.append((count, total)))
    assert [item.probe for item in done.observations] == [*probes, *exchanges]
    assert all(item.seconds > 0 for item in done.observations if item.probe.subject != "hook")
    assert seen[-1] == (28, 28)
    assert done.machine.reserve_bytes > 50 << 20


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "compute_probes", lambda settings: (Probe("function", (1 << 11,), name="no such function"),))
    monkeypatch.setattr(pool, "exchange_probes", lambda settings: ())
    with pytest.raises(MeasureError, match="KeyError"):
        pool.measure(Settings(2, "cpu", quick=True), lambda *_: None)
