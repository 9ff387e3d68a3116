"""Reads the shares of `--mix`. Needs only the standard library."""

import math
import re
from fractions import Fraction

_SHARE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_LONGEST_ROUND = 100_000
"""Largest sum of shares in lowest terms: after so many rows every source has had exactly its share."""


def read_shares(text: str) -> tuple[int, ...]:
    """Return the shares in lowest terms: 3 and 1 for "3,1" and "0.75,0.25".

    Raises:
        ValueError: what is wrong with them.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not _SHARE.fullmatch(part) or not Fraction(part)), None)
    if wrong is not None or len(parts) < 2:
        raise ValueError("expected a number above 0 for each --train-file, such as 3,1")
    exact = [Fraction(part) for part in parts]
    unit = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * unit) for share in exact]
    shares = tuple(share // math.gcd(*whole) for share in whole)
    if sum(shares) > _LONGEST_ROUND:
        raise ValueError(f"in whole numbers they add up to {sum(shares):,}, and {_LONGEST_ROUND:,} is the most; round")
    return shares
