"""A plan on disk: plan.yaml, and beside it the traced graph and the resolved cluster, each fingerprinted."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_profiles import Cluster, ProfileFormatError, cluster_from_yaml, cluster_to_yaml
from hardware_profiles.files import text_of
from planner.constraints_kept import broken_limit
from planner.constraints_text import parse_texts
from planner.evaluate import evaluate_plan
from planner.ir.errors import PlanFileError, ProfileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.ir.replacing import replacing
from planner.ir.serialize import from_json, to_json
from planner.plan_file import dump, load, placed_for
from planner.search import Certificate

if TYPE_CHECKING:
    from planner.compile import Compiled

_BESIDE = "`shardwright plan` writes it beside the plan: keep the three files together"


class _Tried(Exception):
    """It would have been written."""


@dataclass(frozen=True)
class Bundle:
    """A plan, what it is for, and what the one evaluator says of it. ``text``: the plan file's own."""

    path: Path
    text: str
    plan: Plan
    graph: ModelGraph
    cluster: Cluster
    prediction: Prediction
    certificate: Certificate


def graph_path(plan_path: Path) -> Path:
    return plan_path.with_name(_named(plan_path)[0] + ".graph.json")


def cluster_path(plan_path: Path) -> Path:
    return plan_path.with_name(_named(plan_path)[0] + ".cluster.yaml")


def alternative_path(plan_path: Path, rank: int) -> Path:
    """Where the plan of this rank is written beside the best one: ``plan.2.yaml``."""
    stem, suffix = _named(plan_path)
    return plan_path.with_name(f"{stem}.{rank}{suffix}")


def _named(plan_path: Path) -> tuple[str, str]:
    """The plan's own name, and YAML's suffix: what follows the dot of any other (``plan.v1``) tells plans apart."""
    return (plan_path.stem, plan_path.suffix) if plan_path.suffix in (".yaml", ".yml") else (plan_path.name, "")


def check_output(path: Path, inputs: Collection[Path] = ()) -> None:
    """Raise PlanFileError where ``path`` cannot be written, or is one of ``inputs``, before time is spent on what would be
    written there."""
    right = "give -o a path that is writable"
    try:
        if path.is_dir():
            raise PlanFileError(str(path), "is a directory", "give -o a file, for example plan.yaml")
        if path.exists() and not path.is_file():  # A pipe waits for a reader, a device keeps nothing.
            raise PlanFileError(str(path), "is no regular file", "give -o a file, for example plan.yaml")
        if any(path.exists() and file.exists() and path.samefile(file) for file in inputs):
            raise PlanFileError(str(path), "is what the plan is made from", "give -o another name")
        # Only trying tells: of a long name, of a file system that cannot be written to. What is tried is taken back.
        with suppress(_Tried), replacing() as files:
            files.write(path, "")
            if not path.exists():
                files.place()
            raise _Tried
    except OSError as error:
        raise PlanFileError(str(path), f"cannot be written ({error.strerror})", right) from error


def check_outputs(path: Path, plans: int, inputs: Collection[Path]) -> None:
    """As :func:`check_output` of all files that so many plans are written to, the best of them to ``path``."""
    check_output(path, inputs)
    # Of alternatives, which may be many: those that are there already, and the last, which has the longest name.
    number = re.compile(re.escape(_named(path)[0]) + r"\.(\d{1,9})\.")
    try:
        names = os.listdir(path.parent) if path.parent.exists() else []
    except OSError as error:
        wrong = f"cannot be read ({error.strerror})"
        raise PlanFileError(str(path.parent), wrong, "give -o a path in another folder") from error
    there = {int(found[1]) for name in names if (found := number.match(name + "."))}
    ranks = sorted(rank for rank in there | {plans} if 2 <= rank <= plans)
    for plan in (path, *(alternative_path(path, rank) for rank in ranks)):
        for file in (plan, graph_path(plan), cluster_path(plan)):
            check_output(file, inputs)


def save(compiled: Compiled, path: Path) -> str:
    """Write the three files of the best plan and of each alternative, all of them or, where one fails, none; returns the best
    plan's text. Raises PlanFileError where they cannot be written."""
    check_output(path)
    graph, cluster = to_json(compiled.graph), cluster_to_yaml(compiled.cluster)
    others = enumerate(compiled.alternatives, 2)
    results = {path: compiled.result, **{alternative_path(path, rank): result for rank, result in others}}
    texts = {
        plan: dump(result.plan, result.prediction, compiled.graph, result.certificate,
                   placed_for=placed_for(result.plan, compiled.graph, compiled.cluster))
        for plan, result in results.items()
    }
    try:
        with replacing() as files:
            for plan, text in texts.items():
                files.write(graph_path(plan), graph)
                files.write(cluster_path(plan), cluster)
                files.write(plan, text)
    except OSError as error:
        raise PlanFileError(str(path), f"cannot be written ({error.strerror})", "give -o a path that is writable") from error
    return texts[path]


def beside(path: Path) -> dict[str, str]:
    """What belongs to a plan, by the names that it has beside a plan.yaml. Raises PlanFileError."""
    copy = Path("plan.yaml")
    return {str(name(copy)): _read_text(name(path), _BESIDE) for name in (graph_path, cluster_path)}


def read(path: Path) -> Bundle:
    """Load, verify the fingerprints and re-cost. Raises PlanFileError or ProfileError."""
    text = _read_text(path, "make one with `shardwright plan`")
    graph_file, cluster_file = graph_path(path), cluster_path(path)
    try:
        graph = from_json(_read_text(graph_file, _BESIDE))
    except PlanFileError as error:
        where = error.where if error.where == str(graph_file) else f"{graph_file}: {error.where}"
        raise PlanFileError(where, error.wrong, error.right) from error
    try:
        cluster = cluster_from_yaml(_read_text(cluster_file, _BESIDE), str(cluster_file))
    except ProfileFormatError as error:
        raise ProfileError(error.where, error.wrong, error.right) from error
    plan, certificate = load(text, str(path), graph, cluster)
    prediction = evaluate_plan(plan, graph, cluster)
    found = Bundle(path, text, plan, graph, cluster, prediction, certificate)
    return found if _is_covered(found) else replace(found, certificate=replace(certificate, lower_bound_s=0.0))


def _is_covered(bundle: Bundle) -> bool:
    """Whether the proof is about this plan: an edit may have left the space that was searched, by breaking what it was searched
    under or (other edits may too) as a plan that beats the bound shows."""
    certificate, prediction = bundle.certificate, bundle.prediction
    constraints = parse_texts(certificate.constraints, f"{bundle.path}: certificate.constraints")
    kept = broken_limit(constraints, bundle.plan, bundle.graph, bundle.cluster, prediction) is None
    return kept and prediction.step_s >= certificate.lower_bound_s * (1 - 1e-6)


def _read_text(path: Path, right: str) -> str:
    try:
        return text_of(path)
    except UnicodeDecodeError as error:
        raise PlanFileError(str(path), "is not text", right) from error
    except OSError as error:
        raise PlanFileError(str(path), f"cannot be read ({error.strerror})", right) from error
