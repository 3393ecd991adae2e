"""How slow the slowest of n ranks is, if each is slow by chance in each step."""

import math
import random
from statistics import NormalDist, fmean
from typing import NamedTuple

NONE, LOGNORMAL, EXPONENTIAL = "none", "lognormal", "exponential"
KINDS = (NONE, LOGNORMAL, EXPONENTIAL)
NUM_SAMPLES = 16


class Stragglers(NamedTuple):
    """The distribution of a rank's slowness in a step: a factor of its computation, of mean 1.

    The factors of ranks and steps are independent.

    Attributes:
      kind: "none"; "lognormal"; or "exponential", 1 - scale + an exponential of mean scale.
      scale: standard deviation of the logarithm, or mean of the exponential; 0 to 1.
      seed: of the samples.
    """

    kind: str = NONE
    scale: float = 0.0
    seed: int = 0

    def slowest(self, num_ranks: int, num_samples: int = NUM_SAMPLES) -> list[float]:
        """Return samples of the factor of the slowest of `num_ranks` ranks.

        The largest of n is below x with the n-th power of the probability of one, so each sample
        takes one random number, for any n. One number is drawn from each of `num_samples` equal
        parts of [0, 1], which makes the error of a mean small.

        >>> max(Stragglers(EXPONENTIAL, 0.02).slowest(8)) < 1.2
        True
        """
        if self.kind == NONE or self.scale == 0:
            return [1.0]
        chosen = random.Random(self.seed)
        shares = [max((i + chosen.random()) / num_samples, 1e-9) for i in range(num_samples)]
        # The mean of one rank is 1, so what its samples miss corrects those of n.
        missed = fmean(self._of_slowest(share, 1) for share in shares)
        return [self._of_slowest(share, num_ranks) / missed for share in shares]

    def _of_slowest(self, share: float, num_ranks: int) -> float:
        above = -math.expm1(math.log(share) / num_ranks)  # of one rank; 1 - above would lose digits
        if self.kind == EXPONENTIAL:
            return 1 - self.scale - self.scale * math.log(above)
        return math.exp(-self.scale * (NormalDist().inv_cdf(above) + self.scale / 2))
