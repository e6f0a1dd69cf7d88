"""Traffic that runs beside compute: what of it a rank waits for.

A transfer on a stream of its own hides behind the compute that runs meanwhile, all but its first part (nothing runs yet that
could hide it) and only as far as the compute leaves it links and memory bandwidth:

``exposed = max(floor x traffic, traffic - hidden x compute)``.

Both arguments of the maximum are linear in the blocks' times, so a step stays a maximum of linear sums, which the
solver's cuts need.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """``hidden``: seconds of traffic that one second of compute hides, 0 (nothing) to 1; ``floor``: the part of the
    traffic that is waited for whatever the compute."""

    hidden: float = 0.0
    floor: float = 1.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.hidden <= 1.0 and 0.0 <= self.floor <= 1.0):
            raise ValueError(f"hidden {self.hidden} and floor {self.floor} must lie in 0 to 1")

    def exposed_s(self, compute_s: float, traffic_s: float) -> float:
        """Seconds that a rank waits for ``traffic_s`` beside ``compute_s``."""
        return max(self.floor * traffic_s, traffic_s - self.hidden * compute_s)


NO_OVERLAP = Overlap()
