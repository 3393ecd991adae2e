"""Fits the law of a collective, a start and bytes per second, to measured times. Needs no JAX."""

from collections.abc import Sequence


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fit t = alpha + bytes / beta to measured times, with small relative errors.

    Args:
      points: (bytes, seconds), of at least two sizes.

    >>> fitted([(1000, 3e-6), (2000, 4e-6), (4000, 6e-6)])
    (2e-06, 1000000000.0, 0.0)
    """
    alpha, slope = _least_squares(points)
    if alpha < 0:  # through 0: weighted, so that each point counts by its relative error
        alpha = 0.0
        slope = sum(b / t for b, t in points) / sum((b / t) ** 2 for b, t in points)
    if slope <= 0:
        alpha, slope = len(points) / sum(1 / t for _, t in points), 0.0
    alpha, beta = _rounded(alpha), _rounded(1 / slope) if slope else float("inf")
    worst = max(abs((alpha + b / beta) / t - 1) for b, t in points)
    return alpha, beta, round(worst, 6)


def _least_squares(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    # Of (alpha + slope * b) / t - 1: the normal equations of two unknowns.
    aa = sum(1 / t**2 for _, t in points)
    ab = sum(b / t**2 for b, t in points)
    bb = sum((b / t) ** 2 for b, t in points)
    ya, yb = sum(1 / t for _, t in points), sum(b / t for b, t in points)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise ValueError(f"{len(points)} points of one size fix no law. Measure several sizes.")
    return (ya * bb - yb * ab) / determinant, (aa * yb - ab * ya) / determinant


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")
