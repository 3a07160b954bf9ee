"""How many held-out problems tell a change, and how to have more of them."""

import math
from typing import Any

POWER = 7.85  # (1.96 + 0.84)^2, for an interval of 95% and a power of 80%
LEAST_PROBLEMS, LEAST_CONVERSATIONS = 50, 10  # with fewer losses than that an interval is too narrow


def hold_out_more(num: int, settings: dict[str, Any]) -> str:
    """How to, of now so many problems."""
    how = "a higher --eval-limit" if settings.get("eval_limit") == num else "--eval-data FILE or --data TRAIN,HELD_OUT"
    return f"hold out more with {how}" + ", or ask each more often" * (settings.get("loss_type") != "sft")


def at_the_start(num: int, settings: dict[str, Any]) -> list[str]:
    """A line where so many held-out problems will tell little, if about every third answer changes for good or bad."""
    if not settings.get("eval_every", True):
        return ["nothing held out is evaluated (--eval-every 0), so there will be no verdict"]
    more = hold_out_more(num, settings)
    if settings.get("loss_type") == "sft":
        told = f"with {num} held out the loss says little of other conversations: {more}"
        return [told] if 0 < num < LEAST_CONVERSATIONS else []
    least, enough = (min(1, math.sqrt(POWER / 3 / size)) for size in (max(num, 1), LEAST_PROBLEMS))
    told = f"with {num} held out a change shows from {least:.0%} of the values' range on, "
    told += f"with {LEAST_PROBLEMS} from {enough:.0%} on"
    return [f"{told}: {more} when it is trained (evaluate.py --samples 8)"] if 0 < num < LEAST_PROBLEMS else []
