"""What pydantic says of a wrong field, as one line about a file says it."""

from __future__ import annotations

from pydantic import ValidationError


def first_problem(error: ValidationError) -> tuple[str, str, str]:
    """The first wrong field by its dotted path, what is wrong with it, and what would be right."""
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return path, "is no field", "remove it, or correct its name"
    if problem["type"] == "missing":
        return path, "is missing", "give it"
    given, right = repr(problem["input"]), problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"] == "model_type":  # pydantic's words name a class of ours
        right = "input should be a mapping of fields"
    return path, f"is {given if len(given) <= 60 else given[:57] + '...'}", right
