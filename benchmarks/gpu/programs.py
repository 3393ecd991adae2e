"""Training steps to compile for GPUs: models as shapes, in bfloat16, unrolled or as scanned
layers."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

WIDTH, DIM, HEADS, LENGTH = 2048, 1024, 16, 512


class Model(NamedTuple):
    """Equal layers.

    Attributes:
      layer: name of a leaf of one layer -> its shape.
      apply: `apply(params of a layer, x) -> x`.
      rows: shape of a batch of all ranks.
      num_layers: number of layers.
      last_leaves: leaves of the first layer whose gradients are the last ones of backpropagation,
      so that no matmul can hide their reduction.
    """

    layer: dict[str, tuple[int, ...]]
    apply: Callable[[Any, jax.Array], jax.Array]
    rows: tuple[int, ...]
    num_layers: int
    last_leaves: tuple[str, ...]

    def num_bytes(self, leaves: tuple[str, ...]) -> int:
        return sum(2 * functools.reduce(int.__mul__, self.layer[name], 1) for name in leaves)

    def layer_bytes(self) -> int:
        return self.num_bytes(tuple(self.layer))

    def gradient_bytes(self) -> int:
        return self.num_layers * self.layer_bytes()

    def ceiling_bytes(self, scanned: bool) -> int:
        """Return the bytes of all gradients that a matmul follows."""
        # A loop returns the gradients of its last layer at its end, all at once.
        last = tuple(self.layer) if scanned else self.last_leaves
        return self.gradient_bytes() - self.num_bytes(last)


def _mlp_layer(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"])


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def _block(p: Any, x: jax.Array) -> jax.Array:
    num_rows, length, dim = x.shape
    heads = (num_rows, length, HEADS, dim // HEADS)
    parts = jnp.split(_norm(x, p["norm1"]) @ p["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(heads) for part in parts)
    scores = jnp.einsum("rthd,rshd->rhts", q, k).astype(jnp.float32) / heads[-1] ** 0.5
    weights = jax.nn.softmax(scores).astype(x.dtype)
    x = x + jnp.einsum("rhts,rshd->rthd", weights, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


_BLOCK: dict[str, tuple[int, ...]] = {
    "norm1": (DIM,),
    "qkv": (DIM, 3 * DIM),
    "out": (DIM, DIM),
    "norm2": (DIM,),
    "up": (DIM, 4 * DIM),
    "down": (4 * DIM, DIM),
}

MODELS = {
    "mlp": Model({"w": (WIDTH, WIDTH)}, _mlp_layer, (8 * 8192, WIDTH), 4, ("w",)),
    "transformer": Model(_BLOCK, _block, (8 * 8, LENGTH, DIM), 12, ("norm1",)),
}
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-3, mu_dtype=jnp.float32)}


def lowered(
    model: str,
    optimizer: str,
    mesh: Mesh,
    *,
    scan: Callable[..., Any] | None = None,
    remat: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> Any:
    """Lower a jdp step.

    Args:
      model: key of `MODELS`.
      optimizer: key of `OPTIMIZERS`.
      mesh: mesh to compile for.
      scan: `lax.scan` or a function like it, over stacked layers. None: layers are unrolled.
      remat: recompute the inside of a layer in the backward pass.
      accumulate: number of micro-batches.
      **options: options of `jdp.replicated`.
    """
    made, tx = MODELS[model], jdp.replicated(OPTIMIZERS[optimizer], **options)
    apply = jax.checkpoint(made.apply) if remat else made.apply

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        if scan is not None:
            x, _ = scan(lambda x, p: (apply(p, x), None), x, params)
        else:
            for p in params:
                x = apply(p, x)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @jdp.train_step
    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, x)
        return state.apply_gradients(grads), {"loss": loss}

    rows = jax.ShapeDtypeStruct(made.rows, jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    return step.lower(_state(made, tx, mesh, stacked=scan is not None), rows)


def _state(model: Model, tx: Any, mesh: Mesh, *, stacked: bool) -> jdp.TrainState:
    where = NamedSharding(mesh, P())

    def shape(sizes: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    def layer(*before: int) -> Any:
        return {name: shape((*before, *x), jnp.bfloat16) for name, x in model.layer.items()}

    num_layers = model.num_layers
    params = layer(num_layers) if stacked else [layer() for _ in range(num_layers)]
    opt_state = jax.tree.map(lambda x: shape(x.shape, x.dtype), jax.eval_shape(tx.init, params))
    return jdp.TrainState(
        step=shape((), jnp.int32),
        params=params,
        opt_state=opt_state,
        model_state=None,
        seed=shape((), jnp.uint32),
        tx=tx,
        trainable=(True,) * len(jax.tree.leaves(params)),
    )


@functools.cache  # JAX takes one handler for each name.
def register_handlers() -> str:
    """Register the ring's handlers, so that XLA compiles calls to them, and return their kind."""
    built = Path(jdp.__file__).parent / "lib" / "libjdp_cuda.so"
    library = built if built.exists() else _compiled_stand_in()
    functions = ctypes.CDLL(str(library))
    for name in ("jdp_ring_start", "jdp_ring_done"):
        capsule = jax.ffi.pycapsule(getattr(functions, name))
        jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
    return library.name


def _compiled_stand_in() -> Path:
    source = Path(__file__).with_name("uncalled_handlers.cc")
    target = Path(tempfile.mkdtemp(), "libuncalled_handlers.so")
    include = f"-I{jax.ffi.include_dir()}"
    flags = ["-std=c++17", "-w", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, include, source, "-o", target], check=True)
    return target
