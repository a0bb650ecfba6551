"""LG-FedAvg: personal bodies under a shared head."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.methods.fedper import FedPer


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """(phi_i, h_i) <- SGD_i(phi_i, h) jointly; h <- sum_i p_i h_i; the body phi_i never leaves its client.

    FedPer turned round. `personal` names what stays: `~head`, any other part, `none` (FedAvg) or `all` (Local).
    The paper starts from a model that FedAvg has trained; here clients begin with the initial body, so that methods are
    compared from the same start. Pass such a module for its warm start: clients and newcomers begin with its body.
    """

    personal: str = "~head"
    """The part that stays with its client, by default all but the head; none is FedAvg, all is Local."""

    shared = "the head"
    keeps = "its body"
    down = up = "head"
    newcomer = "the shared head over a body trained from the initialisation for one round"
    cite = "Liang et al., Think locally, act globally: federated learning with local and global representations, 2020"
