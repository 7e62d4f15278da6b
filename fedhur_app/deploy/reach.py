"""Is the server there, and is it the right one? Flower tries for ever and says little; this says what is wrong."""

import contextlib
import socket
import ssl
from pathlib import Path

from fedhur_app.deploy.errors import DeployError

_TIMEOUT = 5.0  # seconds


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`.

    Raises:
        DeployError: It is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise DeployError(f"{address!r} is no address of a server: it must be host:port, such as fed.example.org:9092")
    return host.removeprefix("[").removesuffix("]"), int(port)


def problem_of(address: str, authority: Path) -> str:
    """Connect to the server once with TLS, and hang up.

    Args:
        address: `host:port` of the SuperLink.
        authority: Certificate of the authority that signed the server's (PEM).

    Returns:
        What is wrong and what to do about it; empty if all is well.

    Raises:
        DeployError: An address that is none, or a damaged certificate file.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (ssl.SSLError, OSError) as error:
        raise DeployError(
            f"{authority} is no certificate ({error}): copy ca.crt from the deployment's ca/ again"
        ) from error
    try:
        with (
            socket.create_connection((host, port), timeout=_TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        return _certificate_problem(host, port, authority, error)
    except ssl.SSLError as error:
        if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
            return (
                f"what answers at {address} speaks plain text, not TLS: either the address is wrong, or the SuperLink "
                "was started with --insecure. Start it with the deployment's server/start.sh"
            )
        return f"no TLS connection with {address}: {error.reason or error}"
    except socket.gaierror as error:
        return (
            f"the host name {host!r} is unknown here ({error.strerror}): correct `superlink` in node.toml, or the DNS"
        )
    except TimeoutError:
        return f"no answer from {address} within {_TIMEOUT:.0f} s: is the port open in the server's firewall?"
    except ConnectionRefusedError:
        return (
            f"nothing listens at {address}: start the server (server/start.sh), or correct the address (`superlink` in "
            "node.toml, on the server `host` and `port` in superlink.toml)"
        )
    except OSError as error:
        return f"no connection with {address}: {error.strerror or error}"


def _certificate_problem(host: str, port: int, authority: Path, error: ssl.SSLCertVerificationError) -> str:
    where = f"{host}:{port}"
    text = error.verify_message
    if "not yet valid" in text:
        return f"the certificate of {where} is not yet valid: set the clock of this machine"
    if "expired" in text:
        return (
            f"the certificate of {where} has expired (or this machine's clock is wrong): make a new one with "
            "`fedhur deploy certificate`, copy server.crt and server.key to the server and start it again"
        )
    if "match" in text:  # "Hostname mismatch, ..." and "IP address mismatch, ..."
        return (
            f"the certificate of {where} is good for other names only: use one of those in node.toml, or make a new "
            f"one with `fedhur deploy certificate DIR --host {host}`, copy server.crt and server.key to the server "
            "and start it again"
        )
    return (
        f"the certificate of {where} was not signed by the authority in {authority} ({text}): either the server "
        "belongs to another deployment (or somebody stands in between), or ca.crt is not the deployment's; copy "
        "ca/ca.crt here if you trust the server"
    )


def release(address: str, authority: Path, private_key: Path, node_id: int) -> bool:
    """Tell the server, in the name of a device's dead SuperNode, that it is gone.

    The server would wait up to a minute for a sign of life, keep the round waiting so long, and refuse the next start.

    Args:
        address: `host:port` of the SuperLink.
        authority: Certificate of the authority.
        private_key: The device's key.
        node_id: Flower's number of the device.

    Returns:
        Whether the server took it.
    """
    # Flower's own client of the same interface: a signed request, which no other device can make.
    import httpx
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = load_ssh_private_key(private_key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    with contextlib.suppress(httpx.HTTPError, RuntimeError, OSError):
        with FleetHttpClient.from_server_address(
            address,
            False,
            str(authority),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        ) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))
        return True
    return False
