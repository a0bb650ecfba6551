"""One task of Flower, done by the app that is installed here: `python -m coterie.flower.executor`, an order on stdin.

By itself Flower installs the bundle that a run brings and imports the app from it, at every site and on the server:
whoever controls the server runs programs at the sites. Its processes are therefore started without executors of their
own (`--isolation process`), and whoever supervises them takes the tasks (`calls.Tasks`) and starts this for each. An
order names the app; nothing of a bundle is unpacked, imported, put on the path or read as settings.

The order comes on standard input and not in the arguments, which every user of the machine can see: its token is what
lets a process take the task's message and answer it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

try:
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.clientapp import ClientApp
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.common.serde import context_from_proto, run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.serverapp import ServerApp
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
except ImportError as reason:
    from coterie.flower import missing

    raise missing("flwr") from reason

from coterie import memory
from coterie.errors import CoterieError
from coterie.flower.grid import LenientGrid
from coterie.flower.message import BoundedArray
from coterie.report.screen import LogLines

log = logging.getLogger("coterie.executor")


@dataclass(frozen=True)
class Order:
    """What is to be done: by which app of this installation, at which address, by which token."""

    kind: Literal["client", "server"]
    """A client's task is a message to be answered, a server's a run."""
    app: str
    """`module:name` of the ClientApp or the ServerApp."""
    runtime: str
    token: str
    ca: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a server app, from the operator."""

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def command() -> list[str]:
    """How the process of an order is started: with this Python, and without the current folder on its path."""
    return [sys.executable, "-P", "-m", "coterie.flower.executor"]


def installed(name: str, kind: type[Any]) -> Any:
    """The app of that name, imported from what is installed."""
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, kind):
        raise CoterieError(f"{name} is no {kind.__name__} of Flower.")
    return found


def _runtime(order: Order) -> Any:
    """A client of the process that has the task; it is told from now on that the task is being done."""
    client = RuntimeHttpClient.from_server_address(
        order.runtime, order.ca is None, _certificate(order),
        [RuntimeVersionHttpInterceptor(f"flwr-{order.kind}app"), RuntimeTokenHttpInterceptor(order.token)],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    return client


def _certificate(order: Order) -> bytes | None:
    return None if order.ca is None else Path(order.ca).read_bytes()


def answer(order: Order) -> int:
    """Answer the one message of a client's task; the exit status. An app that fails is an error reply.

    A worker that stays warm would call this again and again, with an app that is loaded once.
    """
    client = _runtime(order)
    BoundedArray.install(together=memory.free(torch.device("cpu")) // 2)
    try:
        message, context, _, _ = pull_task_input(client)
    except CoterieError as reason:
        log.error("the message is not read: %s", reason)
        return 1
    context.run_config = {}  # the bundle's
    failed, code = "", ErrorCode.LOAD_CLIENT_APP_EXCEPTION
    try:
        app = installed(order.app, ClientApp)
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        reply = app(message=message, context=context)
    except Exception as reason:
        log.exception("%s failed", order.app)
        failed = f"{type(reason).__name__} at the site"  # its text may quote data, and stays in the log
        reply = Message(Error(code=code, reason=failed), reply_to=message)
    push_message(client, reply, context)
    push_task_output(client, context, SubStatus.FAILED if failed else SubStatus.COMPLETED, failed)
    return int(bool(failed))


def serve(order: Order) -> int:
    """Run a server app to its end; the exit status."""
    client = _runtime(order)
    found = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, found.run.run_id  # messages are made with these
    TaskIdentity.node_id = found.context.node_id
    context = context_from_proto(found.context)
    context.run_config = dict(order.config)
    grid = LenientGrid(order.runtime, order.ca is None, _certificate(order), token=order.token)
    grid.set_run(run_from_proto(found.run))
    failed = ""
    try:
        installed(order.app, ServerApp)(grid=grid, context=context)
    except Exception as reason:
        log.exception("%s failed", order.app)
        failed = str(reason)[:1000] or type(reason).__name__
    client.PushTaskOutput(PushTaskOutputRequest(
        sub_status=SubStatus.FAILED if failed else SubStatus.COMPLETED, details=failed))
    return int(bool(failed))


def main() -> None:
    lines = logging.StreamHandler()
    lines.setFormatter(LogLines("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    order = Order(**json.loads(sys.stdin.readline()))
    code = serve(order) if order.kind == "server" else answer(order)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever still works in a thread has nothing to say any more


if __name__ == "__main__":
    main()
