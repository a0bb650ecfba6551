"""The client app with faults of one site, round by round, for tests of real processes."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from coterie.flower import client, site
from coterie.flower.message import Encoder, parcels_of
from coterie.flower.wire import Parcel

app = ClientApp()
FAULTS = {2: "raise", 3: "nan", 4: "hang", 5: "shape", 6: "replay", 7: "die", 8: "norm", 9: "layout"}
"""Round, counted from 1 -> what oslo does in it."""
SITE = "oslo"


@app.query()
def answer(message, context):
    parcels = parcels_of(message.content)
    meta = parcels[0].meta
    trains = "local" in meta.get("do", ())
    home = Path(str(context.node_config["home"]))
    if context.node_config["name"] != SITE or not trains:
        return client.answer(message, context)
    t = meta["round"] + 1
    fault = FAULTS.get(t)
    if fault == "hang":
        site.Site.answer = lambda self, parcels: time.sleep(600)
    if fault == "raise":
        raise RuntimeError("the site's disk is full")
    reply = client.answer(message, context)
    (found,) = parcels_of(reply.content)
    if t == 1:
        (home / "first.pickle").write_bytes(pickle.dumps((found.meta, found.tensors)))
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "nan":
        found.tensors["update"][..., 0] = torch.nan
    if fault == "norm":
        found.tensors["update"] *= 1000
    if fault == "shape":
        found.tensors["update"] = found.tensors["update"][..., :-1]
    if fault == "layout":
        found.meta["layout"] = "0" * 16
    if fault == "replay":
        found = Parcel(*pickle.loads((home / "first.pickle").read_bytes()))
    return Message(Encoder().records([found]), reply_to=message)
