"""One JSON request over HTTP on a bare socket.

An agent process lives for a fraction of a second, and importing `http.client` would double its start-up cost.
HTTP/1.0 is spoken on purpose: the answer then comes unchunked and ends where the connection ends.
"""

import json
import socket


class HttpError(Exception):
    """The server answered with something other than 2xx, or not at all."""


def post_json(url, key, body, timeout=600):
    """Posts `body` as JSON with `key` as bearer token and returns the decoded answer."""
    scheme, _, rest = url.partition("://")
    address, slash, path = rest.partition("/")
    host, _, port = address.partition(":")
    data = json.dumps(body).encode()
    head = (
        f"POST {slash}{path} HTTP/1.0\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        with connect(scheme, host, int(port) if port else None, timeout) as connection:
            connection.sendall(head.encode() + data)
            answer = read_to_end(connection)
    except OSError as error:
        raise HttpError(f"no answer from {url}: {error}") from error
    head, _, content = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].startswith(b"2"):
        raise HttpError(f"{url} answered {head.splitlines()[:1]}: {content[:2000].decode(errors='replace')}")
    return json.loads(content) if content.strip() else None


def connect(scheme, host, port, timeout):
    if scheme == "http":
        connection = socket.create_connection((host, port or 80), timeout)
        # Head and body leave in one segment; waiting for more to send would only delay it.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    if scheme == "https":
        import ssl  # costs 20 ms, so only where it is needed

        plain = socket.create_connection((host, port or 443), timeout)
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    raise HttpError(f"cannot speak {scheme or 'a URL without a scheme'}: expected http:// or https://")


def read_to_end(connection):
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)
