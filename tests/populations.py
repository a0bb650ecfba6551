"""Three populations after a textbook exercise: which personalization suits whom? Each has the structure it is told to
have (see docs/advise.md) and nothing else; the sizes are those of the story.

All draw inputs x ~ N(0, 1) in 20 dimensions and label them by a teacher: hidden features z = relu(W x) and, for client
i, the class argmax V_i z + b_i. W is the same for everybody. What differs is V_i or b_i, and who comes when.
"""

from dataclasses import dataclass

import numpy as np

INPUTS, HIDDEN, CLASSES = 20, 8, 4


@dataclass(frozen=True)
class Population:
    clients: list  # one (x, y) each
    unseen: int  # how many of them are kept out of training
    newcomers: str  # how often new clients come: often, some or none
    groups: int = 1


def _labelled(rng, W, V, n, preference=0.0):
    x = rng.standard_normal((n, INPUTS)).astype(np.float32)
    return x, (np.maximum(x @ W, 0) @ V + preference).argmax(1)


def _teacher(rng):
    """W [inputs, hidden] and a V [hidden, classes] whose classes are about equally frequent."""
    W = rng.standard_normal((INPUTS, HIDDEN))
    return W, _reading(rng)


def _reading(rng):
    V = rng.standard_normal((HIDDEN, CLASSES))
    return V - V.mean(0)  # no class is favoured by the positive mean of relu


def hospitals(seed=0, count=10, n=400):
    """Overlapping: V_i = V + D_i with D_i of V's own size, drawn for each hospital; nobody like another, none alien.

    400 cases are many for the 32 numbers of V_i and few for the 160 of W behind a relu. No newcomers.
    """
    rng = np.random.default_rng(seed)
    W, V = _teacher(rng)
    return Population([_labelled(rng, W, V + _reading(rng), n) for _ in range(count)], 0, "none")


def phones(seed=0, count=120, n=40):
    """Many users with 40 samples each. A habit is a preference: class c scores b_ic more, with b_i drawn for each user
    as large as the scores themselves vary. Half of the phones come only after training."""
    rng = np.random.default_rng(seed)
    W, V = _teacher(rng)
    scale = (np.maximum(rng.standard_normal((1000, INPUTS)) @ W, 0) @ V).std()
    users = [_labelled(rng, W, V, n, scale * rng.standard_normal(CLASSES)) for _ in range(count)]
    return Population(users, count // 2, "often")


def businesses(seed=0, count=30, n=80):
    """Three types with unrelated V_1, V_2, V_3; a customer of a type has exactly its V. New customers now and then."""
    rng = np.random.default_rng(seed)
    W, _ = _teacher(rng)
    kinds = [_reading(rng) for _ in range(3)]
    return Population([_labelled(rng, W, kinds[i % 3], n) for i in range(count)], count // 5, "some", 3)
