"""Classes: the axes along which a value may differ, and those along which it was summed."""

from typing import Any, NamedTuple


class AbstractValue(NamedTuple):
    """The facts about one value in a program that every rank runs.

    The one-rank value is what one rank would compute from the whole batch. Over n ranks, a *mean*
    is the one-rank value; averaging a mean again over the same ranks does not change it. A *total*
    is n times the one-rank value, as `psum` of the ranks' own means is.

    The analysis reads the division by n off the program: after the sum, by the number of ranks
    (`pmean`, the scale of jdp's own reductions), or before it, by a rank's share of the weight of
    all ranks. Where a sum was divided by something else, or its operand was divided, the analysis
    cannot tell whether it is a mean and calls it *unclear*: `psum(losses) / psum(counts)` is a
    mean, `psum(gradient) / 2` is not.

    Attributes:
      axes: mesh axes along which ranks may hold different values. Empty: uniform.
      reduced: mesh axes along which it is a sum or mean of values that differed, or was added up or
        put together from several of these. Since then it was at most scaled by a uniform value,
        negated, cast, reshaped, sliced or copied.
      zero: whether it is known to be zero everywhere.
      total: the axes in `reduced` along which it is a total: nothing has divided it by n.
      unclear: the axes in `reduced` along which it may be a total or a mean. Along the other axes
        in `reduced` it is a mean.
      repeated: mesh axes along which it is a sum over ranks of a value that was equal on every
        rank, and so is n times too large.
      even: mesh axes along which it was computed from means over ranks that all count the same, and
        from no other exchange between ranks.
      undivided: mesh axes along which it may depend, through any operations, on a total that no
        number has scaled since.
      duplicated: mesh axes along which it may depend in this way on a sum of equal values.
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

    def either(self, other: "AbstractValue") -> "AbstractValue":
        """Return the facts about a value of a function that is called in several places."""
        pairs: Any = zip(self, other, strict=True)  # sets, except for zero
        joined = AbstractValue._make(mine | its for mine, its in pairs)
        return joined._replace(zero=self.zero and other.zero)
