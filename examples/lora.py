"""Teach British English to a model that reads American: LoRA, then all of its parameters.

pip install --no-deps g2p-en misaki     # a trained model, and a British dictionary (Python < 3.13)
python examples/lora.py                 # 4 virtual CPU devices
jdp run --nproc-per-node 2 examples/lora.py --ranks 1
"""

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jdp

BATCH_SIZE, NUM_TEST = 128, 997  # over all ranks; a prime, which no batch size divides
LETTERS, SOUNDS, START, END = 10, 12, 2, 3  # of the longest word, and the numbers of two sounds
RANK, SCALE = 4, 2  # of the adapters
MIN_GAIN = 0.1  # of words without a mistake

VOWELS = "ɑAA ɒAA ɔAO əAH ᵊAH ʌAH ɜER ɪIH iIY ʊUH uUW ɛEH aAE AEY IAY QOW WAW YOY".split()
CONSONANTS = "ɹR ʧCH ʤJH ʃSH ʒZH θTH ðDH ŋNG jY hHH ɡG bB dD fF kK lL mM nN pP sS tT vV wW zZ"
NAMES = {each[0]: each[1:] for each in VOWELS + CONSONANTS.split()}
ALL = {NAMES[v[0]] + stress for v in VOWELS for stress in "012"} | {"UW"}
ALL |= {each[1:] for each in CONSONANTS.split()}
NUMBERS = {name: number for number, name in enumerate(sorted(ALL), start=4)}  # in the model


def inside(package, file):
    return Path(find_spec(package).submodule_search_locations[0], file)  # without importing it


def numbers_of(ipa):
    """Return the numbers of the sounds of a word: ˈ and ˌ are before the vowel that they stress."""
    found, stress = [], "0"
    for sign in ipa.replace("əː", "ɜ").replace("ː", ""):
        if sign in "ˈˌ":
            stress = "1" if sign == "ˈ" else "2"
            continue
        name = NAMES[sign]
        if name + stress in NUMBERS:  # a vowel
            name, stress = name + stress, "0"
        found.append(NUMBERS[name])
    return [*found, END]


def read_rows():
    """Return words to train on and to test: numbers of letters and of sounds, then zeros."""
    entries = json.loads(inside("misaki", "data/gb_gold.json").read_text(encoding="utf-8"))
    letters, sounds = [], []
    for word, ipa in entries.items():
        if isinstance(ipa, str) and set(word) <= set("abcdefghijklmnopqrstuvwxyz"):
            row = [ord(x) - ord("a") + 3 for x in word] + [2], numbers_of(ipa)
            if len(row[0]) <= LETTERS and len(row[1]) <= SOUNDS:
                letters.append(row[0] + [0] * (LETTERS - len(row[0])))
                sounds.append(row[1] + [0] * (SOUNDS - len(row[1])))
    rows = {"letters": np.array(letters, np.int32), "sounds": np.array(sounds, np.int32)}
    order = np.random.default_rng(0).permutation(len(sounds))
    chosen = order[NUM_TEST:], order[:NUM_TEST]
    return [{name: column[each] for name, column in rows.items()} for each in chosen]


def new_adapters(base):
    """Return two thin matrices for each that the model multiplies with: LoRA trains these."""
    random = np.random.default_rng(0)
    return {
        name: {
            "down": np.float32(random.normal(size=(RANK, w.shape[1])) / w.shape[1] ** 0.5),
            "up": np.zeros((len(w), RANK), np.float32),
        }
        for name, w in base.items()
        if "_w" in name
    }


def weights_of(params, base):
    """Return the weights of the model: `params`, or those of the base with adapters added."""
    return (
        params
        if base is None
        else base
        | {
            name: base[name] + SCALE * adapter["up"] @ adapter["down"]
            for name, adapter in params.items()
        }
    )


def gru(weights, name):
    """Return a function of a hidden state and the last letters or sounds, to the next state."""
    known = weights[f"{name}_emb"] @ weights[f"{name}_w_ih"].T + weights[f"{name}_b_ih"]

    def advance(hidden, last):
        r, z, n = jnp.split(known[last], 3, axis=-1)
        hidden_r, hidden_z, hidden_n = jnp.split(
            hidden @ weights[f"{name}_w_hh"].T + weights[f"{name}_b_hh"], 3, axis=-1
        )
        kept = jax.nn.sigmoid(z + hidden_z)
        return kept * hidden + (1 - kept) * jnp.tanh(n + jax.nn.sigmoid(r + hidden_r) * hidden_n)

    return advance


def scores_of(weights, letters, heard=None):
    """Return the scores of each next sound, after those heard, or after those it says itself."""
    read, speak = gru(weights, "enc"), gru(weights, "dec")

    def next_sound(carry, sound):
        hidden = speak(*carry)
        scores = hidden @ weights["fc_w"].T + weights["fc_b"]
        return (hidden, scores.argmax(-1) if sound is None else sound), scores

    def next_letter(hidden, letter):
        return jnp.where(letter[:, None] > 0, read(hidden, letter), hidden), None

    hidden = jnp.zeros((len(letters), weights["fc_w"].shape[1]))
    hidden, _ = lax.scan(next_letter, hidden, letters.T)
    start = jnp.full(len(letters), START)
    heard = None if heard is None else heard.T
    return lax.scan(next_sound, (hidden, start), heard, length=SOUNDS)[1].swapaxes(0, 1)


@jdp.train_step(weight=lambda batch: batch["mask"].sum())
def train(state, batch, base):  # the state has what is trained, and no more
    def loss_fn(params, batch):
        sounds = batch["sounds"]
        scores = scores_of(weights_of(params, base), batch["letters"], sounds)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, sounds)
        return losses.sum(1, where=sounds > 0).mean(where=batch["mask"])

    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@jdp.eval_step(weight=lambda batch: batch["mask"].sum())
def test(params, batch, base):
    said = scores_of(weights_of(params, base), batch["letters"]).argmax(-1)
    is_right = (said == batch["sounds"]) | (batch["sounds"] == 0)
    return {"accuracy": is_right.all(1).mean(where=batch["mask"])}


def accuracy(params, base, rows):
    batches = jdp.batches(rows, BATCH_SIZE, epochs=1, shuffle=False)
    return jdp.evaluate(test, params, batches, base)["accuracy"]


def fit(params, base, rows, num_steps, rate, folder):
    """Return the trained parameters."""
    rates = optax.cosine_decay_schedule(rate, num_steps)
    tx = jdp.replicated(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates)))
    state = jdp.TrainState.create(params, tx)
    batches = jdp.batches(rows, BATCH_SIZE, num_steps=num_steps, mask=True)
    with jdp.Checkpointer(folder, resume=True) as checkpointer:
        state = checkpointer.restore(state, batches)
        for batch in batches:
            state, _ = train(state, batch, base)
            checkpointer.step(state, batches)
    return state.params


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="virtual CPU devices; 0: all devices")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    with np.load(inside("g2p_en", "checkpoint20.npz")) as file:
        base = dict(file)
    rows, test_rows = read_rows()

    mesh = jdp.init(cpu_ranks=args.ranks or None)
    # On all devices once: each step would copy NumPy arrays to them.
    placed = jax.device_put(base, NamedSharding(mesh, PartitionSpec()))
    for name, params, frozen, rate in (
        ("LoRA", new_adapters(base), placed, 1e-2),
        ("all parameters", base, None, 1e-3),
    ):
        folder = Path("checkpoints", name.replace(" ", "_"))  # a second run continues
        begin = time.monotonic()
        before = accuracy(params, frozen, test_rows)
        params = fit(params, frozen, rows, args.steps, rate, folder)
        after = accuracy(params, frozen, test_rows)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        trained = sum(x.size for x in jax.tree.leaves(params))
        print(
            f"{name}: {trained:,} numbers trained, {before:.1%} -> {after:.1%} of {NUM_TEST} words "
            f"right, {time.monotonic() - begin:.0f} s, {size:,} bytes of checkpoints"
        )
        if after - before < MIN_GAIN:
            sys.exit(f"expected {MIN_GAIN:.0%} more")


if __name__ == "__main__":
    main()
