"""describe_fit: a fit in words: every parameter, what it was and became, and the error with and without each family."""

from __future__ import annotations

from planner.validate.fit import Fit


def describe_fit(fit: Fit) -> str:
    """A text of several lines: parameters first, then families, then the means."""
    lines = ["parameter".ljust(44) + "expected".rjust(12) + "fitted".rjust(12) + "  families"]
    for item, value, families in zip(fit.parameters, fit.values, fit.families, strict=True):
        if families:
            lines.append(item.name.ljust(44) + f"{item.expected:12.4g}{value:12.4g}  {len(families)}")
    lines += ["", "family".ljust(44) + "fitted".rjust(12) + "left out".rjust(12)]
    for name, (with_it, without) in fit.by_family.items():
        lines.append(name.ljust(44) + f"{with_it:12.1%}{without:12.1%}")
    lines.append("mean".ljust(44) + f"{fit.after:12.2%}{fit.left_out:12.2%}")
    trusted = [fit.by_family[name][0] for name in sorted(fit.trusted)]
    if trusted:
        mean = sum(trusted) / len(trusted)
        title = f"mean of {len(trusted)} GPU families of trust A"
        lines.append(title.ljust(44) + f"{mean:12.2%}{fit.left_out_trusted():12.2%}")
    lines += ["", "families that each parameter comes from"]
    lines += [f"{item.name}: {', '.join(told)}" for item, told in zip(fit.parameters, fit.families, strict=True) if told]
    return "\n".join(lines)
