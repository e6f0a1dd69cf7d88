"""`shardwright why`: what another decision would cost, term by term, and what more of the cluster would buy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.ir.errors import JobError, NoPlanFits

if TYPE_CHECKING:
    from planner.ir.plan import Plan, Prediction
    from planner.search import SearchResult
    from planner.why import Answer, Gain, Part


def why(
    path: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="A plan.yaml that `shardwright plan` wrote.")],
    pins: Annotated[list[str] | None, typer.Argument(
        metavar="[K=V]...", help="What to ask for: tensor=4, 'recompute in [none]'; none: what more hardware buys.")] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="Forbid a combination: 'schedule=zbv, tensor>=4'.")] = None,
    headroom: Annotated[str | None, typer.Option(help="Memory of every device that is kept free: 10% or 4GiB.")] = None,
    gap: Annotated[float, typer.Option(help="Stop within this part of the optimum.")] = 0.001,
    time_limit: Annotated[float, typer.Option(help="Seconds of each solve; the honest gap is reported.")] = 20.0,
    json_: Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")] = False,
) -> None:
    """Solve a plan's job again with other constraints and say what changes and what that costs (exit 3 where nothing fits)."""
    from planner.bundle import read
    from planner.constraints_text import parse_constraints
    from planner.why import ask, request_of, sensitivity

    if not gap >= 0:
        raise JobError("--gap", f"is {gap}", "give a part of the step time, for example 0.001")
    if not time_limit > 0:
        raise JobError("--time-limit", f"is {time_limit}", "give a positive number of seconds")
    asked = parse_constraints(pins or (), forbid or (), headroom)
    bundle = read(path)
    request = request_of(bundle, gap=gap, time_limit_s=time_limit)
    if not asked.limits:
        gains = tuple(sensitivity(bundle, request, _progress))
        print(json.dumps(_gains_json(gains)) if json_ else _gains_text(gains))
        if all(gain.result is None for gain in gains):
            raise typer.Exit(NoPlanFits.exit_code)
        return
    answer = ask(bundle, asked, request, _progress)
    print(json.dumps(_answer_json(answer)) if json_ else _answer_text(answer))
    if answer.result is None:
        raise typer.Exit(NoPlanFits.exit_code)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _answer_text(answer: Answer) -> str:
    from planner.show import seconds, size

    said = " and ".join(answer.asked.written)
    if answer.result is None:
        return f"{said}: {answer.refusal}"
    before, after = answer.before[1], answer.result.prediction
    more = after.step_s - before.step_s
    word = "more" if more >= 0 else "less"
    lines = [
        f"{said}: {seconds(after.step_s)} a step, {seconds(abs(more))} {word} than the plan's {seconds(before.step_s)}"
        f" ({more / before.step_s:+.2%}); {_proof(answer.result)}",
    ]
    if not before.fits:
        lines.append("the plan itself does not fit")
    if more < 0 and before.fits:
        lines.append(
            "quicker than the plan: it was edited, was forbidden this, or its search stopped at its gap or time limit"
        )
    lines += ["", *_columns([("what changes", "plan", "then"), *answer.decisions])]
    if answer.result.plan == answer.before[0]:
        lines.append("nothing: the plan is the best one found under this too")
    elif not answer.decisions:
        lines.append("nothing of these: which layers have what, or where their tensors are split")
    lines += ["", *_columns([("where a step goes", "plan", "then", "more"), *_rows(answer.seconds, seconds)])]
    lines += ["", *_columns([("largest rank's memory", "plan", "then", "more"), *_rows(answer.memory, size)])]
    return "\n".join(lines)


def _rows(parts: tuple[Part, ...], unit: Any) -> list[tuple[str, ...]]:
    total = ("total", sum(part.before for part in parts), sum(part.after for part in parts))
    named = [(part.name, part.before, part.after) for part in parts if part.before or part.after]
    return [
        (name.replace("_", " "), unit(before), unit(after), ("-" if after < before else "+") + unit(abs(after - before)))
        for name, before, after in (*named, total)
    ]


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as text, the first column to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows]


def _proof(result: SearchResult) -> str:
    from planner.show import seconds

    return f"at most {result.optimality_gap:.3%} from the best: none takes less than {seconds(result.lower_bound_s)}"


def _gains_text(gains: tuple[Gain, ...]) -> str:
    from planner.constraints import flag_of
    from planner.show import seconds, size

    base = gains[0].result
    rows: list[tuple[str, ...]] = [("change", "step", "saved", "at most", "memory", "gap")]
    for gain in gains:
        if gain.result is None:
            rows.append((gain.change, "-", "-", "-", "-", "-"))
            continue
        result, saved, most = gain.result, "", ""
        if base is not None and gain is not gains[0]:
            saved = f"{1 - result.prediction.step_s / base.prediction.step_s:+.2%}"
            most = f"{1 - result.lower_bound_s / base.prediction.step_s:+.2%}"
        rows.append((gain.change, seconds(result.prediction.step_s), saved, most, size(result.prediction.peak_memory_bytes),
                     f"{result.optimality_gap:.3%}"))
    refused = [f"{gain.change}: {gain.refusal}" for gain in gains if gain.result is None]
    if len(refused) == len(gains):
        return "\n".join(refused)
    notes = ["saved: by the best plan found, of the step as it is; at most: what is not ruled out by the bound"]
    broken = next((gain.broken for gain in gains if gain.broken is not None), None)
    if broken is not None:
        limit = f"{flag_of(broken)} {broken}, a constraint of its certificate"
        notes.append(f"the plan itself does not count where it breaks {limit}")
    return "\n".join([*_columns(rows), *refused, *notes])


def _plan_json(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    from dataclasses import asdict

    from planner.decisions import decisions_of, largest_rank

    memory = largest_rank(prediction)
    return {
        "decisions": decisions_of(plan), "step_s": prediction.step_s, "tokens_per_s": prediction.tokens_per_s,
        "breakdown_s": {name: float(value) for name, value in asdict(prediction.breakdown).items()},
        "peak_memory_bytes": prediction.peak_memory_bytes, "memory_bytes": {**asdict(memory), "total": memory.total},
    }


def _search_json(result: SearchResult) -> dict[str, Any]:
    return {
        "optimality_gap": result.optimality_gap, "lower_bound_s": result.lower_bound_s, "candidates": result.candidates,
        "solved": result.solved, "seconds": dict(result.seconds),
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    from planner.remedies import words_of

    report: dict[str, Any] = {
        "asked": list(answer.asked.written), "fits": answer.result is not None, "plan": _plan_json(*answer.before),
    }
    if answer.result is None:
        found = answer.explanation
        return {**report, "why": answer.refusal, "limits": None if found is None else {
            "limit_bytes": found.limit_bytes, "needed_bytes": found.needed_bytes, "proven_bytes": found.proven_bytes,
            "excess_bytes": found.needed_bytes - found.limit_bytes, "conflict": list(found.conflict),
            "conflict_is_smallest": found.smallest, "remedies": words_of(found.remedies),
        }}
    result = answer.result
    return {
        **report, "then": _plan_json(result.plan, result.prediction),
        "changes": {name: {"plan": before, "then": after} for name, before, after in answer.decisions},
        "cost_s": {**{part.name: float(part.more) for part in answer.seconds},
                   "step": result.prediction.step_s - answer.before[1].step_s},
        "cost_bytes": {**{part.name: int(part.more) for part in answer.memory},
                       "peak": result.prediction.peak_memory_bytes - answer.before[1].peak_memory_bytes},
        "search": _search_json(result),
    }


def _gains_json(gains: tuple[Gain, ...]) -> dict[str, Any]:
    from planner.constraints import flag_of

    base = gains[0].result
    rows = []
    for gain in gains:
        row: dict[str, Any] = {"change": gain.change, "fits": gain.result is not None}
        if gain.result is None:
            row["why"] = gain.refusal
        else:
            result = gain.result
            row |= _plan_json(result.plan, result.prediction) | {"search": _search_json(result)}
            if base is not None:
                row["saved_s"] = base.prediction.step_s - result.prediction.step_s
                row["saved_at_most_s"] = base.prediction.step_s - result.lower_bound_s
        if gain.broken is not None:
            row["plan_breaks"] = f"{flag_of(gain.broken)} {gain.broken}"
        rows.append(row)
    return {"sensitivity": rows}
