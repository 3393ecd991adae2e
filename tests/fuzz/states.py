"""The state of a program in each library: its parameters, its optimizer, one update."""

import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class OfFlax:
    """Flax's TrainState."""

    def create(self, params, tx):
        state = flax.training.train_state.TrainState
        state = state.create(apply_fn=None, params=params, tx=tx)
        return state.replace(step=jnp.int32(0))

    def params(self, state):
        return state.params

    def updated(self, state, grads, synced):
        if not synced:
            return state.apply_gradients(grads=grads)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, synced=True)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    def named(self, state):
        return {name: getattr(state, name) for name in ("params", "opt_state", "step")}


class Model(nnx.Module):
    """A variable for each parameter."""

    def __init__(self, params):
        self.names = tuple(params)
        for name, value in params.items():
            variables = jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), value)
            setattr(self, name, nnx.List(variables) if isinstance(value, list) else variables)


class OfNnx:
    """A model of nnx beside its optimizer."""

    def create(self, params, tx):
        model = Model(params)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def params(self, state):
        model, found = state[0], {}
        for name in model.names:
            value = getattr(model, name)
            is_one = isinstance(value, nnx.Param)
            found[name] = value.get_value() if is_one else [each.get_value() for each in value]
        return found

    def updated(self, state, grads, synced):
        model, optimizer = state
        variables = jax.tree.structure(nnx.state(model, nnx.Param))
        grads = variables.unflatten(jax.tree.leaves(grads))
        optimizer.update(model, grads, **({"synced": True} if synced else {}))
        return model, optimizer

    def named(self, state):
        optimizer = state[1]
        opt_state = nnx.as_pure(optimizer.opt_state)
        return {
            "params": self.params(state),
            "opt_state": opt_state,
            "step": optimizer.step.get_value(),
        }


class OfJdp:
    """jdp's TrainState, which `subject` creates."""

    def params(self, state):
        return state.params

    def updated(self, state, grads, synced):
        return state.apply_gradients(grads, synced=synced)

    def named(self, state):
        return {name: getattr(state, name) for name in ("params", "opt_state", "step", "seed")}


OF = {"jdp": OfJdp(), "flax": OfFlax(), "nnx": OfNnx()}
