"""Calls to Flower's processes on this machine: what `coterie server` asks of its SuperLink, and tasks to be done.

Flower's commands would do, but a SuperLink that answers nobody without its secret (`link`) needs a header that they do
not send; and a call takes milliseconds, a command seconds. Proxies are never used.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path
from typing import Any, Literal, Self

try:
    import httpx
    from flwr.cli.build import build_fab_from_files
    from flwr.common.constant import SubStatus
    from flwr.proto.control_pb2 import (
        ListRunsRequest,
        ListRunsResponse,
        RegisterNodeRequest,
        RegisterNodeResponse,
        StartRunRequest,
        StartRunResponse,
        StopRunRequest,
        StopRunResponse,
    )
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.runtime_pb2 import (
        AcquireTaskRequest,
        AcquireTaskResponse,
        PushTaskOutputRequest,
        PushTaskOutputResponse,
    )
    from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret
    from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
    from flwr.supercore.error import FlowerError
    from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
except ImportError as reason:
    from coterie.flower import missing

    raise missing("flwr") from reason

from coterie.errors import CoterieError
from coterie.flower.keys import public_pem

OPENING = "coterie-link"
"""The header that opens a SuperLink of ours."""
BUNDLE = b"""[project]
name = "coterie-run"
version = "1.0.0"
description = "a coterie run; whoever takes part runs the coterie that is installed there"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie.flower.server:app"
clientapp = "coterie.flower.client:app"
"""
"""All that a run of ours carries. Flower asks for a bundle; nobody here executes one."""
_MEDIA = "application/protobuf"
_KINDS = {"server": [TaskType.SERVER_APP], "client": [TaskType.CLIENT_APP, TaskType.AGENT_APP]}
"""A site answers whatever a server calls its messages: a node waits for ever for a task that nobody does."""
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def opening(secret: bytes) -> str:
    """The header's value: made of the secret that also signs for tasks, and tells nothing of it."""
    return hmac.new(secret, OPENING.encode(), hashlib.sha256).hexdigest()


class Calls:
    """Protobuf over HTTP to a process on this machine."""

    def __init__(self, address: str, ca: Path | None, headers: dict[str, str]) -> None:
        verify = ssl.create_default_context(cafile=ca) if ca is not None else False
        scheme = "http" if ca is None else "https"
        version = dict(RuntimeVersionMetadata.from_local_component("coterie").as_metadata())
        self._http = httpx.Client(base_url=f"{scheme}://{address}", verify=verify, trust_env=False, timeout=30,
                                  headers={"content-type": _MEDIA, "accept": _MEDIA, **version, **headers})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, path: str, request: Any, kind: Any, headers: dict[str, str] | None = None) -> Any:
        """One call; a refusal is a CoterieError with Flower's own words."""
        body = request.SerializeToString(deterministic=True)
        answer = self._http.post(f"/v1/{path}", content=body, headers=headers)
        if answer.is_error:
            told = FlowerError.from_json(answer.text)
            words = told.message if told is not None else f"status {answer.status_code}"
            raise CoterieError(f"Flower refused `{path}`: {words}")
        return kind.FromString(answer.content)


class Control(Calls):
    """What the operator of a SuperLink may ask of it."""

    def __init__(self, address: str, ca: Path | None, secret: bytes) -> None:
        super().__init__(address, ca, {OPENING: opening(secret)})

    def register(self, name: str, path: Path) -> str:
        """Admit the public key of a file; its node's id."""
        request = RegisterNodeRequest(public_key=public_pem(path), name=name)
        return str(self.call("control/register-node", request, RegisterNodeResponse).node_id)

    def submit(self) -> int:
        """A new run; its id."""
        bundle, _ = build_fab_from_files({"pyproject.toml": BUNDLE})
        fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
        found = self.call("control/start-run", StartRunRequest(fab=fab), StartRunResponse)
        if not found.HasField("run_id"):
            raise CoterieError("Flower took no run.")
        return int(found.run_id)

    def status(self, run: int) -> str:
        """`pending`, `starting`, `running`, `finished:completed`, `finished:failed` or `finished:stopped`."""
        found = self.call("control/list-runs", ListRunsRequest(run_id=run), ListRunsResponse).run_dict[run].status
        return f"{found.status}:{found.sub_status}" if found.sub_status else str(found.status)

    def stop(self, run: int) -> None:
        """End a run whose app is gone, so that no site works for it any longer."""
        self.call("control/stop-run", StopRunRequest(run_id=run), StopRunResponse)


class Tasks(Calls):
    """The tasks of a SuperLink or a SuperNode, for whoever has the secret it was started with."""

    def __init__(self, address: str, ca: Path | None, secret: bytes) -> None:
        super().__init__(address, ca, {})
        self._secret = derive_auth_secret(secret)

    def acquire(self, kind: Literal["client", "server"]) -> tuple[int, str] | None:
        """The next task of a kind: its run and the token by which it is done. None when there is none."""
        request = AcquireTaskRequest(supported_task_types=_KINDS[kind])
        signed = create_superexec_auth_metadata(auth_secret=self._secret, method=_ACQUIRE, request=request)
        try:
            found = self.call("runtime/acquire-task", request, AcquireTaskResponse, signed)
        except httpx.TransportError:  # it starts, or it ends: whoever supervises it knows
            return None
        return (int(found.task.run_id), str(found.token)) if found.HasField("task") and found.token else None

    def refuse(self, token: str, why: str) -> None:
        """Give a task back as failed, without doing it."""
        output = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=why)
        self.call("runtime/push-task-output", output, PushTaskOutputResponse, {TASK_TOKEN_HEADER: token})
