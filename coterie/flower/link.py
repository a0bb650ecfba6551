"""The SuperLink as `coterie server` starts it: `python -m coterie.flower.link`, with the options of `flower-superlink`.

Flower's commands (list runs, register a key, submit and stop a run) need no key, so whoever reaches its port could give
them, and loopback is reached by every user of the machine. Here every request must carry a header made of the secret in
`--superexec-auth-secret-file`, which the front (`gate`) adds to what it lets through and `calls` to what the operator
asks. Only the paths of apps do without: each of them needs a task's token, and a token needs the secret.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from coterie.flower.calls import OPENING, opening

RUNTIME = "/v1/runtime/"

Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class Locked:
    """An ASGI application for those who have the secret; to others there is nothing."""

    def __init__(self, application: Application, secret: bytes) -> None:
        self._application, self._value = application, opening(secret).encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._opens(scope)):
            await self._application(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close"})

    def _opens(self, scope: MutableMapping[str, Any]) -> bool:
        shown = [value for key, value in scope["headers"] if key == OPENING.encode()]
        return str(scope["path"]).startswith(RUNTIME) or any(hmac.compare_digest(one, self._value) for one in shown)


def main() -> None:
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    config = _parse_superlink_lifespan_config()
    if not config.superexec_auth_secret:
        raise SystemExit("--isolation process and --superexec-auth-secret-file are needed.")
    uvicorn.run(
        Locked(create_app(config, SuperLinkLifespan), config.superexec_auth_secret), host=config.host, port=config.port,
        log_config=get_uvicorn_log_config(console_handler.level), ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile, workers=1,
    )


if __name__ == "__main__":
    main()
