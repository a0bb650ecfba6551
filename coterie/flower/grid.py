"""Flower's grid for a server app that no single message holds up or ends."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest, PushObjectResponse
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.superlink.grid import HttpGrid

from coterie.errors import CoterieError

HEAD = 1 << 21
"""Bytes of what stands before an object's own: its kind and the names of its parts."""

log = logging.getLogger("coterie.server")


class Until(threading.local):
    """When a thread gives up what it pulls: `UNTIL.at`, by the monotonic clock."""

    at = math.inf


UNTIL = Until()


class LenientGrid(HttpGrid):
    """Flower's, but an object that nobody takes any more ends no push, and what does not come is given up in time.

    A node may say at once that it has received a message: Flower then takes no more objects of it, and would leave
    those of all other nodes' messages unsent.
    """

    @property
    def _runtime_client(self) -> Any:
        return _Lenient(super()._runtime_client, UNTIL.at)


class _Lenient:
    """A client of the SuperLink in one call of the grid; what it pulls in further threads has the same end."""

    def __init__(self, client: Any, end: float) -> None:
        self._client, self._end = client, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:  # noqa: N802 (Flower's name)
        if not self._client.PushObject(request).stored:
            log.debug("object %s of a message is not wanted any more", request.object_id)
        return PushObjectResponse(stored=True)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        if time.monotonic() > self._end:
            raise ObjectPullError(request.object_id, "it did not come in time.")
        found: PullObjectResponse = self._client.PullObject(request)
        if found.object_content.find(HEAD_BODY_DIVIDER, 0, HEAD) < 0 and len(found.object_content) > HEAD:
            raise CoterieError("an object names more parts than one may have.")  # Flower would list them all
        return found
