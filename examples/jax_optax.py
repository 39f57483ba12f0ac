"""AdamW in curved weight space in JAX: a network predicts each character of this file from the eight before it.

    python examples/jax_optax.py --out runs/jax              # again: resumes from the last checkpoint

It needs the extra "jax": jax and optax. JAX places the arrays on its default device. The network's names are Flax's, so
that the default chooses the kernels.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from symexplin.optax import sel_adamw

CONTEXT, WIDTH, VOCABULARY = 8, 64, 128
Params = dict[str, dict[str, jax.Array]]


def initial(key: jax.Array) -> Params:
    """Return the parameters: "up" and "down" will be curved, the embedding and the head stay plain."""
    lecun, keys = jax.nn.initializers.lecun_normal(), jax.random.split(key, 4)
    return {
        "embed": {"embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH))},
        "up": {"kernel": lecun(keys[1], (CONTEXT * WIDTH, WIDTH))},
        "down": {"kernel": lecun(keys[2], (WIDTH, WIDTH))},
        "head": {"kernel": lecun(keys[3], (WIDTH, VOCABULARY))},
    }


def loss(params: Params, windows: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the last character of each window."""
    x = params["embed"]["embedding"][windows[:, :-1]].reshape(len(windows), -1)
    for name in ("up", "down"):
        x = jax.nn.gelu(x @ params[name]["kernel"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"]["kernel"], windows[:, -1]).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    steps = options.steps
    text = jnp.array(list(Path(__file__).read_bytes()))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=steps // 10, decay_steps=steps)
    optimizer = sel_adamw(schedule, weight_decay=0.01, max_grad_norm=1.0)  # and no optax.clip_by_global_norm

    @jax.jit
    def update(params: Params, state: optax.OptState, key: jax.Array) -> tuple[Params, optax.OptState, jax.Array]:
        """Take one step on 64 windows of the text."""
        starts = jax.random.randint(key, (64, 1), 0, len(text) - CONTEXT)
        value, grads = jax.value_and_grad(loss)(params, text[starts + jnp.arange(CONTEXT + 1)])
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = initial(jax.random.key(0))
    state, first, last = optimizer.init(params), 0, options.out / "last.npz"
    if last.exists():
        first, *leaves = np.load(last).values()
        params, state = jax.tree.unflatten(jax.tree.structure((params, state)), map(jnp.asarray, leaves))
    for step in range(int(first), steps):
        params, state, value = update(params, state, jax.random.fold_in(jax.random.key(1), step))
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {value:.3f}")
            options.out.mkdir(parents=True, exist_ok=True)
            np.savez(options.out / "new.npz", step + 1, *jax.tree.leaves((params, state)))
            (options.out / "new.npz").replace(last)  # atomic
