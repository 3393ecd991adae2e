"""The numbers of a program and its loss, which jdp and the oracle share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

SCALE = 8.0  # of the loss, at first
TINY = 2.0**-13  # of a gradient near 1; float16 is subnormal below 6.1e-5

_EXTRA = {
    "none": [],
    "primes": [(7,), (), (13, 3), (1,)],
    "empty": [(0,), (3, 0), (5,)],
    "divisible": [(24,), (5, 48), (2, 24, 3), ()],
}
_LARGE = [(3_001,), (40_009,), (300_007,)]  # 2.4 MB of float64
_HUGE = (4.1, 6.57)  # powers of ten: 0.1 to 30 MB of float64


class Over(NamedTuple):
    """What a loss does over the ranks; the oracle, which has all rows, does nothing."""

    mean: Callable[[Any], Any]  # of a mean over rows
    total: Callable[[Any], Any]
    gather: Callable[[Any], Any]  # rows of all ranks
    gradient: Callable[[Any], Any]  # mean gradient
    divide: Callable[[Any, Any], Any]  # by a weight, which may be 0
    scan: Callable[..., Any]
    elsewhere: Callable[..., Any]  # a function of rows, on the ranks that ids name


def params(p):
    """Draw the parameters: float arrays of the program's dtypes, in NumPy."""
    draw = np.random.default_rng(p.seed)
    d = p.width
    shapes = {"w1": (3, d), "b1": (d,), "w2": (d, 2)}
    if p.model in ("scan", "scan_layers", "late"):
        shapes["layers"] = (3, d, d)
    if p.model in ("late_models", "models"):
        shapes["layers"] = (2, 3, d, d)
    if p.model == "embedding":
        shapes["table"] = (5, d)
    if p.model == "unused":
        shapes["unused"] = (3,)
    tree = {name: draw.normal(size=shape) * 0.7 for name, shape in shapes.items()}
    for name in {"w2", "layers"} & tree.keys():
        tree[name] *= (4 / d) ** 0.5
    tree["extra"] = [draw.normal(size=shape) for shape in _extra(p)]
    names = ["float64", "float32"] if p.dtype == "mixed" else [p.dtype]
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [np.asarray(x, jnp.dtype(names[i % len(names)])) for i, x in enumerate(leaves)]
    tree = treedef.unflatten(leaves)
    if p.model == "integer":
        tree["integer"] = np.arange(d, dtype=np.int32) % 4
    return tree


def _extra(p):
    if p.extra == "large":
        return _LARGE[: 1 + p.seed % 3]
    if p.extra == "huge":
        size = int(10 ** np.random.default_rng([p.seed, 2]).uniform(*_HUGE))
        return [(size,), (size // 24, 24)][p.seed % 2 :][:1]
    return _EXTRA[p.extra]


def is_frozen(p, name):
    """Whether the parameter of this name does not train."""
    return p.trainable != "all" and name in ("b1", "extra")


def trainable(p, params):
    """Return what `TrainState.create(trainable=)` gets."""
    if p.trainable == "tree":
        return {name: not is_frozen(p, name) for name in params}
    if p.trainable == "path":
        return lambda path, leaf: not is_frozen(p, path.split("'")[1])
    return None


def batches(p):
    """Draw the global batches: a list of dicts of NumPy arrays, rank by rank."""
    draw = np.random.default_rng([p.seed, 1])
    found = [_batch(p, draw) for _ in range(p.num_steps)]
    if p.skips:
        found[1]["x"][draw.integers(p.ranks * p.rows)] = np.nan
    return found


def _batch(p, draw):
    shape = (p.ranks, p.rows)
    batch = {
        "x": draw.normal(size=(*shape, 3)),
        "y": draw.normal(size=(*shape, 2)),
        "ids": draw.integers(5, size=shape),
    }
    if p.weight in ("mask", "zero"):
        # Rank r counts about r / ranks of its rows, and of "zero" every other one nothing.
        mask = draw.random(shape) < 0.3 + 0.7 * draw.permutation(p.ranks)[:, None] / p.ranks
        mask[draw.integers(p.ranks), 0] = True
        if p.weight == "zero" and p.ranks > 1:
            mask[draw.permutation(p.ranks)[: p.ranks // 2]] = False
        mask[np.argmax(mask.sum(1)), 0] |= not mask.any()
        batch["mask"] = mask
    if p.weight == "float":
        batch["w"] = draw.uniform(0.05, 3.0, shape) * draw.uniform(0.1, 2.0, (p.ranks, 1))
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}


def weights(rows):
    """Return how much each row counts."""
    if "mask" in rows:
        return rows["mask"].astype(float)
    return rows["w"] if "w" in rows else jnp.ones(rows["x"].shape[0])


def optimizer(p):
    rate = 0.2 / TINY if p.tiny else 0.2
    return {
        "sgd": lambda: optax.sgd(rate),
        "momentum": lambda: optax.sgd(rate, momentum=0.9),
        "skipping": lambda: optax.sgd(rate, momentum=0.9),
        "loss_scale": lambda: optax.sgd(rate, momentum=0.9),
        "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate)),
        "trust": lambda: optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1)),
        "multi_steps": lambda: optax.MultiSteps(
            optax.sgd(rate, momentum=0.5), 2
        ).gradient_transformation(),
        "adam": lambda: optax.adam(0.1, eps=1e-3),
        "labelled": lambda: optax.multi_transform(
            {"matrix": optax.sgd(rate, momentum=0.9), "other": optax.sgd(rate / 2)},
            lambda tree: jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "other", tree),
        ),
        "injected": lambda: optax.inject_hyperparams(optax.sgd)(
            optax.linear_schedule(rate, rate / 4, p.num_steps), momentum=0.5
        ),
    }[p.optimizer]()


def outer_optimizer(p):
    """Return the optimizer that joins ranks that trained alone."""
    return optax.sgd(0.7, momentum=0.9, nesterov=True) if p.is_diloco else optax.sgd(1.0)


def loss(p, over, params, rows, noise):
    """Return the mean loss over `rows` and `(mean output, output of each row)`.

    Args:
      p: the program.
      over: what a collective is here.
      params: as from `params`.
      rows: leaves of a batch.
      noise: `[rows, 2]`, added to the output of the model.
    """
    w = weights(rows)

    def mean(x):
        return over.divide(jnp.tensordot(w, x, 1), w.sum())

    def errors(params):
        return ((predict(p, over, params, rows) + noise - rows["y"]) ** 2).sum(-1)

    def center_of(params, scale):
        return over.mean(mean(jnp.tanh(scale * predict(p, over, params, rows))))

    out = predict(p, over, params, rows) + noise
    match p.loss:
        case "rows" | "global_mean":
            of_row = ((out - rows["y"]) ** 2).sum(-1)
        case "batch_mean":
            center, square = over.mean((mean(out), mean(out**2)))
            normal = (out - center) / jnp.sqrt(square - center**2 + 0.5)
            of_row = ((normal - rows["y"]) ** 2).sum(-1)
        case "batch_sum":
            center = over.divide(over.total(jnp.tensordot(w, out, 1)), over.total(w.sum()))
            of_row = ((out - 2 * center - rows["y"]) ** 2).sum(-1)
        case "all_gather":
            others, their_w = over.gather(out), over.gather(w)
            near = jnp.exp(-((out[:, None] - others) ** 2).sum(-1))
            of_row = jnp.log(0.1 + near @ their_w) + ((out - rows["y"]) ** 2).sum(-1)
        case "exchange":
            mixed = over.elsewhere(lambda x: jnp.tanh(x @ params["w2"][:2]), out, rows["ids"])
            of_row = ((out + mixed - rows["y"]) ** 2).sum(-1)
        case "maml":
            inner = over.gradient(jax.grad(lambda params: mean(errors(params)))(params))
            adapted = jax.tree.map(lambda x, g: x - (0.05 * g).astype(x.dtype), params, inner)
            of_row = errors(adapted)
        case "jvp":
            of_row, slope = jax.jvp(errors, (params,), (_tangent(params),))
            of_row = of_row + 0.1 * jnp.sin(slope)
        case "linearize":
            center, push = jax.linearize(lambda params: center_of(params, 1.0), params)
            of_row = errors(params) + 0.3 * (center * push(_tangent(params))).sum()
        case "vmap":
            centers = jax.vmap(center_of, (None, 0))(params, jnp.array([0.5, 1.5]))
            of_row = errors(params) + ((out[:, None] - centers) ** 2).sum((1, 2))
        case _:
            raise ValueError(f"there is no loss {p.loss!r}")
    return mean(of_row) * (TINY if p.tiny else 1.0), (mean(out.sum(-1)), out[:, 0])


def _tangent(params):
    """Return tangents that vary over the axes that `params` vary over, as `linearize` demands."""
    return jax.tree.map(
        lambda x: (0.3 * _waves(x)).astype(x.dtype) + 0 * lax.stop_gradient(x), params
    )


def _waves(x):
    return jnp.cos(jnp.arange(x.size, dtype=float)).reshape(x.shape)


def predict(p, over, params, rows):
    """Run the model: `[rows, 2]`, at least float32."""
    x = rows["x"].astype(params["w1"].dtype)
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    if "table" in params:
        h = h + params["table"][rows["ids"]]
    if "integer" in params:
        h = h * (1 + params["integer"].astype(h.dtype) / 4)
    if p.model in ("late_models", "models"):
        h = jax.vmap(lambda layers: _layers(over.scan, h, layers))(params["layers"]).mean(0)
    elif p.model == "models":
        h = jax.vmap(lambda layers: _compete(over.scan, h, layers), axis_name="models")(
            params["layers"]
        )[0]
    elif "layers" in params:
        h = _layers(lax.scan if p.model == "scan" else over.scan, h, params["layers"])
    out = h @ params["w2"]
    if p.model == "shared":
        out = out + jnp.tanh(h + out @ params["w2"].T) @ params["w2"]
    out = out.astype(jnp.promote_types(out.dtype, jnp.float32))
    for leaf in params["extra"]:
        pattern = (_waves(leaf) / max(1, leaf.size) ** 0.5).astype(leaf.dtype)
        out = out + jnp.sum(leaf * pattern) * jnp.sin(rows["x"][:, :1])
    return out


def _layers(scan, h, layers):
    return scan(lambda h, w: ((jnp.tanh(h @ w) + h).astype(h.dtype), None), h, layers)[0]


def _compete(scan, h, layers):
    """Run one of several models, which see each other's mean."""
    own = _layers(scan, h, layers)
    return (0.5 * lax.pmean(own, "models") + 0.1 * lax.psum(jnp.tanh(own), "models")).astype(
        h.dtype
    )
