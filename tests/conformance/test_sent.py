"""Every method says of every tensor that its clients send what it may hold, and honest clients keep to it."""

from __future__ import annotations

import pytest

from coterie import registry
from coterie.contract.sent import Vectors
from coterie.running.check import DEMANDS, examine

METHODS = sorted(registry.methods())
VARIANTS = [
    "feddyn:by_size=true", "feddyn+normclip", "scaffold+normclip", "cwfedavg:distribution=true", "fedmtl:detached=true",
    "fedfew:models=2,loss_at=running", "fedfew:models=2,loss_at=after", "fedfew:models=2,weigh=client,scale=false",
    "fedsoft:models=2,every=2", "pacfl:by_label=false", "pacfl:measure=columns", "pacfl:measure=matched", "pfedhn:pc",
    "fedfomo:explore=0.5", "cfl:split_after=0",
    "flexlora:ranks=1+2", "lorafair:ranks=1+2", "hetlora:padding", "fedplora:ranks=all",
]
DECLARED = "what a client sends is declared, and is as declared"


@pytest.mark.parametrize("spec", [*METHODS, *VARIANTS])
def test_what_clients_send_is_declared_and_honest_clients_keep_to_it(spec):
    """Before each of three rounds, all clients introduce themselves and train: one has a single sample."""
    spec = {"fedfew": "fedfew:models=2", "fedsoft": "fedsoft:models=2"}.get(spec, spec)
    assert DEMANDS[DECLARED](spec) == ""


def test_updates_and_models_are_rows():
    """Whatever a method calls update or row is compared with others' lengths."""
    for name, cls in registry.methods().items():
        for field in ("update", "row", "offset"):
            assert isinstance(cls.uploads.get(field, Vectors()), Vectors), (name, field)


LOUD = '''
from dataclasses import dataclass

from coterie import Cohort, Model, Record, Upload, sent
from coterie.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Loud(FedAvg):
    """FedAvg that tells the loss."""

    def local(self, cohort: Cohort, payload: Model, mine: Record) -> tuple[Upload, Record]:
        upload, mine = super().local(cohort, payload, mine)
        return Upload(update=upload.update, loss=cohort.loss(payload.row)), mine
'''


def test_check_asks_for_the_declaration(tmp_path):
    """A method in a file of its own that uploads something else than updates is asked what that may be."""
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    found = {finding.demand: finding.wrong for finding in examine(f"{path}:Loud")}
    assert found.pop(DECLARED) == "'loss' is not declared; say what it may hold: uploads = sent.fields(loss=...)"
    assert set(found.values()) == {""}
    says = "    uploads = sent.fields(update=sent.Vectors(), loss=sent.{})\n\n    def local"
    path.write_text(LOUD.replace("    def local", says.format("Losses()")))
    assert DEMANDS[DECLARED](f"{path}:Loud") == ""
    path.write_text(LOUD.replace("    def local", says.format("Numbers(at_most=0.1)")))
    assert DEMANDS[DECLARED](f"{path}:Loud").startswith("client 0's 'loss' holds numbers above 0.1, which uploads")
