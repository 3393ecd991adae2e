"""Classes: over which axes a value may differ, and whether it was summed over them."""

from typing import Any, NamedTuple


class Class(NamedTuple):
    """The knowledge about one value in a program that every rank runs.

    The number that one rank would compute from the whole batch is the measure of a sum and a mean.
    A *mean* over n ranks has that number. It is idempotent: the mean of it, over the same ranks, is
    itself. A *total* has n times that number, as `psum` of the ranks' own means has.

    The division by n is read off the program: after the sum, by the number of ranks (`pmean`, the
    scale of jdp's own reductions), or before it, by a rank's share of the weight of all ranks.
    Whether a sum that was divided by something else, or whose operand had been divided, is a mean,
    is *unclear*: `psum(losses) / psum(counts)` is one, `psum(gradient) / 2` is not.

    Attributes:
      axes: mesh axes along which ranks may hold different values. Empty: uniform.
      reduced: mesh axes along which it is a sum or mean of values that differed, or several of
        those added up or put together, and since then was only scaled by something uniform,
        negated, cast, reshaped, sliced or copied.
      zero: it is zero everywhere, as far as that can be read off the program.
      total: those of `reduced` along which it is a total: nothing has divided it by n.
      unclear: those of `reduced` along which it may be a total or a mean. Along the rest it is a
        mean.
      repeated: mesh axes along which it is a sum over ranks of what was the same on every rank: n
        times too large, whatever it was.
      even: mesh axes along which it was computed from means over ranks that all count alike, and
        from nothing else that ranks exchanged.
      undivided: mesh axes along which it may depend, through whatever operations, on a total that
        no number has scaled since.
      duplicated: mesh axes along which it may depend so on a sum of what was the same.
    """

    axes: frozenset[str]
    reduced: frozenset[str]
    zero: bool
    total: frozenset[str] = frozenset()
    unclear: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    undivided: frozenset[str] = frozenset()
    duplicated: frozenset[str] = frozenset()

    def either(self, other: "Class") -> "Class":
        """Return what is known of a function's value that is called in several places."""
        pairs: Any = zip(self, other, strict=True)  # of sets but for zero
        joined = Class._make(mine | its for mine, its in pairs)
        return joined._replace(zero=self.zero and other.zero)
