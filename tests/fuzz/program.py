"""What a program of the fuzzer is, which programs make sense, and drawing them."""

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """One training run; every default is the simplest choice."""

    seed: int = 0  # of parameters, rows and weights
    processes: int = 1
    mesh: tuple[int, ...] = (2,)  # ranks along each data axis
    order: str = "mesh"  # in which the step names two data axes
    tx_order: str = "same"  # in which the optimizer names them
    auto: int = 1  # devices on a further axis, which the compiler partitions
    library: str = "jdp"  # whose state holds parameters and optimizer
    tx: str = "replicated"  # or jdp.sharded: "kept" is stage 3 with keep_gathered
    min_size: int = 1  # of a leaf that is split
    over: str = "all"  # the data axes that leaves are split over
    grad: str = "jax"  # whose value_and_grad, where both can
    model: str = "mlp"
    width: int = 4  # of the hidden layers; 24 divides by most numbers of ranks
    extra: str = "none"  # further leaves
    dtype: str = "float64"
    tiny: bool = False  # gradients near 1e-5, a learning rate to match
    trainable: str = "all"
    state: str = "none"  # of a rank or of rows, beside the parameters
    optimizer: str = "sgd"
    loss: str = "rows"
    weight: str = "none"
    rows: int = 5  # of a rank
    split: str = "whole"  # into micro-batches
    noise: str = "none"  # by which key
    reduce: str = "apply"
    algorithm: str = "auto"
    bucket_bytes: int = 4 * 2**20
    run: str = "train_step"
    apart: bool = False  # ranks share no memory, as on several hosts
    devices: int = 0  # that run a step of `ranks` virtual ranks; 0: one for each, as usual
    loop: str = "python"
    feed: str = "arrays"
    metrics: str = "loss"
    donate: bool = True
    compiler: str = "quick"  # or as users compile, which takes a third longer

    def __repr__(self):
        return f"Program({', '.join(f'{name}={value!r}' for name, value in self.features())})"

    @property
    def ranks(self):
        return math.prod(self.mesh)

    @property
    def axes(self):
        """The data axes in the order that the step gives."""
        axes = ("a", "b") if len(self.mesh) == 2 else ("data",)
        return axes[::-1] if self.order == "reversed" else axes

    @property
    def tx_axes(self):
        return self.axes[::-1] if self.tx_order == "other" else self.axes

    @property
    def stage(self):
        """Stage of jdp.sharded, 0 for others."""
        return {"stage=1": 1, "stage=2": 2, "stage=3": 3, "kept": 3}.get(self.tx, 0)

    @property
    def is_local(self):
        """Whether ranks train alone, for `EVERY` steps at a time."""
        return self.tx == "local_steps"

    @property
    def is_diloco(self):
        """Whether these ranks have an outer optimizer."""
        return self.is_local and self.seed % 2 == 1

    @property
    def skips(self):
        """Whether the second update is skipped, for NaN in a row."""
        return self.optimizer in ("skipping", "loss_scale")

    @property
    def num_steps(self):
        # Training multiplies rounding errors: of 16 bits nothing is left after four steps.
        return 2 if self.dtype in ("bfloat16", "float16") else 4

    @property
    def splits(self):
        """Rows of a rank in each micro-batch."""
        how, _, number = self.split.partition("=")
        k = {"whole": 1, "accumulate": int(number or 0)}.get(how, -(-self.rows // int(number or 1)))
        size = -(-self.rows // k)
        return [size] * (k - 1) + [self.rows - (k - 1) * size]

    def features(self):
        """(name, value) of every field that is not the default."""
        fields = dataclasses.fields(self)
        pairs = [(field.name, getattr(self, field.name), field.default) for field in fields]
        return [(name, value) for name, value, default in pairs if value != default]


CHOICES = {
    "processes": [1],
    "mesh": [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (1, 2)],
    "order": ["mesh", "reversed"],
    "tx_order": ["same", "other"],
    "auto": [1, 2],
    "library": ["jdp", "flax", "nnx"],
    "tx": "replicated stage=1 stage=2 stage=3 kept local_steps".split(),
    "min_size": [1, 10, 100],
    "over": ["all", "inner", "outer"],
    "grad": ["jax", "jdp"],
    "model": "mlp scan scan_layers late late_models models embedding shared unused integer".split(),
    "width": [4, 24],
    "extra": ["none", "primes", "empty", "divisible", "large", "huge"],
    "dtype": ["float64", "float32", "bfloat16", "float16", "mixed"],
    "tiny": [False, True],
    "trainable": ["all", "tree", "path"],
    "state": ["none", "rank", "rows"],
    "optimizer": [
        *("sgd", "momentum", "clip", "trust", "multi_steps", "adam", "labelled", "injected"),
        *("skipping", "loss_scale"),
    ],
    "loss": [
        *("rows", "batch_mean", "batch_sum", "all_gather", "exchange", "maml", "global_mean"),
        *("jvp", "linearize", "vmap"),
    ],
    "weight": ["none", "mask", "zero", "float"],
    "rows": [5, 4, 6, 7, 1],
    "split": ["whole", "accumulate=2", "accumulate=3", "micro_batch_rows=2", "micro_batch_rows=4"],
    "noise": ["none", "shared", "rank"],
    "reduce": ["apply", "synced", "sum", "by_axis"],
    "algorithm": ["auto", "xla", "ring", "native", "quantized"],
    "bucket_bytes": [4 * 2**20, 1, 100],
    "run": ["train_step", "shard_map", "typed", "pmap"],
    "apart": [False, True],
    "devices": [0, 3, 2],
    "loop": ["python", "scan", "alternate", "two_in_jit", "evaluated"],
    "feed": ["arrays", "batches"],
    "metrics": ["loss", "all"],
    "donate": [True, False],
    "compiler": ["quick", "default"],
}

# Steps of ranks that train alone, from one outer update to the next; it divides `num_steps`.
EVERY = 2

# What the result does not depend on: such programs share one run of the oracle.
WAYS = tuple(
    "order tx_order auto library tx min_size over grad algorithm bucket_bytes run apart devices "
    "feed donate compiler".split()
)

# With two CPU devices in each process.
CHOICES_OF_PROCESSES = {
    n: CHOICES
    | {"processes": [n], "mesh": [(2 * n,), (2, n), (n,), (8,)], "devices": [0, 2 * n]}
    | {"run": ["train_step", "shard_map"]}
    for n in (2, 3)
}


def is_valid(p):
    """Whether the program means something: what it does not allow says nothing about jdp."""
    is_step = p.run == "train_step"
    exact_split = not p.split.startswith("accumulate") or p.rows % len(p.splits) == 0
    return (
        exact_split
        and p.ranks * p.auto <= 8
        and (p.processes == 1 or (p.devices or p.ranks * p.auto) == 2 * p.processes)
        and (len(p.mesh) == 2 or (p.order, p.tx_order) == ("mesh", "same"))
        and (len(p.mesh) == 2 or p.reduce != "by_axis")
        and (p.stage or (p.min_size, p.over) == (1, "all"))
        and (len(p.mesh) == 2 or p.over == "all")
        # A key is numbered by the axes of the optimizer, rows by those of the step.
        and (p.tx_order == "same" or p.noise != "rank")
        # Adam divides rounding errors by rounding errors, unless they are small.
        and (p.optimizer != "adam" or p.dtype == "float64")
        # A trust ratio divides by the norm of a gradient, which float16 may round to 0.
        and (p.optimizer != "trust" or p.dtype != "float16")
        # A rate that is injected has the dtype of the first parameter.
        and (p.optimizer != "injected" or p.dtype == "float64")
        # A row without weight may have NaN, and state of ranks keeps it.
        and (not p.skips or (p.weight, p.state) == ("none", "none"))
        # Only there the author's function has the scale, and the loss is a float32 at least.
        and (p.optimizer != "loss_scale" or (is_step and p.library == "jdp"))
        and (p.optimizer != "loss_scale" or p.loss != "global_mean")
        # Ranks that train alone have losses of their own rows, and a state of jdp's.
        and (not p.is_local or (is_step and p.library == "jdp" and not p.skips))
        and (not p.is_local or (p.loss, p.weight, p.reduce) == ("rows", "none", "apply"))
        and (not p.is_local or (p.state, p.devices) == ("none", 0))
        and (not p.is_local or (p.model not in ("late", "late_models", "integer")))
        # An evaluation sees the outer parameters.
        and (not p.is_local or p.loop != "evaluated")
        and (not p.tiny or p.optimizer in ("sgd", "momentum"))
        # jax.value_and_grad(allow_int=True) is the only gradient that allows integers.
        and (p.model != "integer" or (p.split == "whole" and p.run != "typed" and p.grad == "jax"))
        and (p.model != "integer" or (p.loss not in ("maml", "global_mean")))
        and (p.model != "integer" or p.reduce in ("apply", "sum"))
        # The gradient of a global mean is reduced, of all rows, and its function has no aux.
        and (p.loss != "global_mean" or (p.reduce == "apply" and p.state == "none"))
        and (p.loss != "global_mean" or p.split == "whole" or p.noise == "none")
        # A tangent of integers is not a number.
        and (p.model != "integer" or p.loss not in ("jvp", "linearize"))
        # Only a TrainState of jdp has frozen parameters, keys, and state of ranks.
        and (p.library == "jdp" or (p.trainable, p.state, p.noise) == ("all", "none", "none"))
        # optax alone would add updates to integers.
        and (p.library == "jdp" or (is_step and p.model != "integer"))
        # Only a step of jdp's splits state over the ranks.
        and (is_step or p.state == "none")
        # In a function of the author's own the weight is given at each call, for all axes at once.
        and (is_step or p.weight == "none" or p.reduce == "synced")
        # A collective of the loss cannot know it there, and so neither what its gradient is.
        and (is_step or p.weight == "none" or p.loss == "rows")
        and (is_step or (p.loop, p.feed, p.auto) == ("python", "arrays", 1))
        and (is_step or p.donate)
        # Virtual ranks lie on one axis.
        and (not p.devices or (is_step and len(p.mesh) == 1 and p.auto == 1))
        and ((p.state, p.stage) == ("none", 0) or p.ranks % (p.devices or 1) == 0)
        and p.devices <= p.ranks
        # An evaluation sees all rows at once.
        and (p.loop != "evaluated" or p.split == "whole")
        and (p.run != "pmap" or len(p.mesh) == 1)
        and (not p.apart or p.algorithm != "native")
        and (p.feed == "arrays" or p.loop in ("python", "alternate", "evaluated"))
    )


def problem(p):
    """Return the program without the ways in which jdp computes it."""
    ways = dict.fromkeys(WAYS)
    ways |= {"reduce": "apply" if p.reduce != "sum" else "sum", "processes": 1}
    ways["model"] = "scan" if p.model in ("scan_layers", "late") else p.model
    ways["tx"] = p.tx if p.is_local else None
    ways["loop"] = "alternate" if p.loop in ("alternate", "two_in_jit") else "python"
    return dataclasses.replace(p, **ways)


def refusal(p):
    """Why jdp may refuse this program, or None where it must run."""
    if p.run == "typed" and p.algorithm in ("ring", "native", "quantized"):
        return "types cannot say that this algorithm leaves the same value on all ranks"
    if p.processes > 1 and p.run == "shard_map" and p.algorithm == "native":
        return (
            "which processes share memory cannot be seen from inside a shard_map without its mesh"
        )
    if p.weight != "none" and p.loss in ("batch_sum", "all_gather"):
        return "a psum or an all_gather in a weighted loss has no weight of its own"
    if p.weight != "none" and p.loss == "exchange":
        return "a rank of weight 0 would drop the gradients of rows that it received"
    if p.devices and p.loss == "exchange":
        return "an exchange between ranks has no form for virtual ranks"
    if p.algorithm == "native" and p.loss == "maml":
        return "nothing orders the native calls of functions that JAX traces by themselves"
    if p.algorithm == "native" and p.auto > 1:
        return "the compiler would gather what it splits before a call of foreign code"
    if p.algorithm == "native" and p.devices:
        return "virtual ranks are summed by jdp"
    if p.weight != "none" and p.reduce == "by_axis":
        return "a weight belongs to all data axes at once"
    if p.auto > 1 and p.dtype in ("bfloat16", "float16", "mixed"):
        return "XLA:CPU aborts on an all-reduce of small floats beside an axis of the compiler's"
    once = ("maml", "all_gather", "batch_sum", "jvp", "linearize")
    if p.model in ("late", "late_models") and p.loss in once:
        return "only reverse mode over one loss is defined for gradients that are reduced late"
    return None
