"""`python -m fedhur_app.deploy.superlink OPERATORS ...`: Flower's SuperLink, whose orders only its operators may give.

Flower serves devices and operators on one port, and its free edition knows no accounts: whoever reaches the port could
register a device of his own or start a run, and a run brings code that every device executes. Here everything but the
devices' own interface (and /health) is for the server itself and the networks in OPERATORS.

OPERATORS is a list of networks with commas between them, or `-`; then come the options of `flower-superlink`.
"""

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedhur_app.deploy.errors import DeployError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_FOR_ALL = ("/v1/fleet/", "/health")
_REFUSAL = (
    b"Only the server itself and the networks in `operators` of its superlink.toml may give orders to this SuperLink.\n"
)


class OperatorsOnly:
    """An ASGI application in front of another: lets devices through, and orders from operators only.

    Args:
        app: The application behind.
        operators: Networks that may give orders, such as "10.0.0.0/24".

    Raises:
        DeployError: A text that is no network.
    """

    def __init__(self, app: App, operators: list[str]) -> None:
        self._app = app
        self._networks = [_network(text) for text in operators]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            head = [(b"content-type", b"text/plain"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": head})
            await send({"type": "http.response.body", "body": _REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allowed(self, scope: Scope) -> bool:
        if str(scope.get("path", "")).startswith(_FOR_ALL):
            return True
        client = scope.get("client")
        if client is None:
            return False
        address = ipaddress.ip_address(client[0].partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        # The machine's own addresses reach themselves as themselves.
        own = scope.get("server") or ("",)
        return address.is_loopback or client[0] == own[0] or any(address in network for network in self._networks)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise DeployError(
            f"superlink.toml: operators: {error}; give addresses or networks such as 10.0.0.0/24"
        ) from error


def main() -> None:
    """Entry point."""
    from flwr.superlink import main as superlink
    from flwr.superlink.cli.flower_superlink import flower_superlink

    operators = [] if sys.argv[1] == "-" else sys.argv[1].split(",")
    sys.argv[1:2] = []
    create_app = superlink.create_app

    def guarded(*arguments: Any, **options: Any) -> OperatorsOnly:
        return OperatorsOnly(create_app(*arguments, **options), operators)

    # Flower has no place for a middleware of one's own; it makes its application by this name.
    superlink.create_app = guarded  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
