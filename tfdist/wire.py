"""Turns a TCP connection into framed, authenticated, size-limited messages with deadlines.

A frame is a fixed header (magic, kind, length) and a body; bodies are JSON objects, never pickles. `greet` and `answer`
are the two ends of one handshake: each side proves with HMAC-SHA256 that it knows the job's secret, over nonces of both
sides, its own role and the identity it claims. This authenticates; it does not encrypt.

Synopsis:

    theirs = greet(sock, secret=secret, identity={"task": "worker 1"}, deadline=deadline)     # who connected
    theirs = answer(sock, secret=secret, identity={"task": "worker 0"}, deadline=deadline)    # who accepted
    send(sock, HEARTBEAT, {"step": 5}, deadline=deadline)
    parser = FrameParser(limit=8192); frames = parser.feed(data)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PROTOCOL = 1
MAGIC = b"tfd\x01"
HEADER = struct.Struct("!4sBxxxI")  # magic, kind, length of the body

HELLO, PROOF, HEARTBEAT, GOODBYE, BROKEN = 1, 2, 3, 4, 5
KINDS = frozenset({HELLO, PROOF, HEARTBEAT, GOODBYE, BROKEN})

HELLO_LIMIT = 1024
# Read before the peer has proved anything, and holds the whole cluster: about 10,000 addresses.
PROOF_LIMIT = 1 << 20
CONTROL_LIMIT = 1 << 16

_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size


class WireError(Exception):
    """The connection ended, timed out, or does not speak this protocol; the text says which."""


class SecretError(WireError):
    """The other side speaks the protocol, but does not know this job's secret (or knows one where we have none)."""


class Frame(NamedTuple):
    """One message: its kind and its undecoded body."""

    kind: int
    body: bytes


def pack(kind: int, body: bytes) -> bytes:
    """Returns the bytes of one frame."""
    return HEADER.pack(MAGIC, kind, len(body)) + body


def encode(message: Mapping[str, Any]) -> bytes:
    """Returns a message as compact JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a frame's body.

    Raises:
        WireError: It is not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError(f"the body is not a JSON object but {type(message).__name__}")
    return message


def _parse_header(header: bytes, limit: int) -> tuple[int, int]:
    magic, kind, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError(f"does not speak tfdist's protocol (sent {bytes(header)!r})")
    if kind not in KINDS:
        raise WireError(f"sent a frame of the unknown kind {kind}")
    if length > limit:
        raise WireError(f"announced {length:,} bytes where at most {limit:,} are allowed")
    return kind, length


class FrameParser:
    """Cuts a stream of bytes, arriving in any pieces, into frames; holds at most one incomplete frame."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames completed by `data`.

        Raises:
            WireError: The stream is not ours, or a frame is over the limit; the parser is of no use afterwards.
        """
        self._pending += data
        frames = []
        while len(self._pending) >= HEADER.size:
            kind, length = _parse_header(bytes(self._pending[: HEADER.size]), self._limit)
            end = HEADER.size + length
            if len(self._pending) < end:
                break
            frames.append(Frame(kind, bytes(self._pending[HEADER.size : end])))
            del self._pending[:end]
        return frames


def send(sock: socket.socket, kind: int, message: Mapping[str, Any], *, deadline: float) -> None:
    """Sends one message before `deadline` (of time.monotonic)."""
    _send_body(sock, kind, encode(message), deadline)


def receive(sock: socket.socket, kind: int, *, limit: int, deadline: float) -> bytes:
    """Returns the body of the next frame, which must be of this kind and come whole before `deadline`."""
    got, length = _parse_header(_read(sock, HEADER.size, deadline), limit)
    if got != kind:
        raise WireError(f"sent a frame of kind {got} where kind {kind} was due")
    return _read(sock, length, deadline)


def _send_body(sock: socket.socket, kind: int, body: bytes, deadline: float) -> None:
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(pack(kind, body))
    except OSError as error:
        raise WireError(_reason(error)) from error


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            sock.settimeout(_left(deadline))
            piece = sock.recv(min(size - len(data), 65536))
        except OSError as error:
            raise WireError(_reason(error)) from error
        if not piece:
            # A lone "GET / HTTP/1.1" and a close is told apart from a peer that died.
            raise WireError(f"closed the connection after {bytes(data)!r}" if data else "closed the connection")
        data += piece
        if len(data) >= len(MAGIC) and size == HEADER.size and not data.startswith(MAGIC):
            raise WireError(f"does not speak tfdist's protocol (sent {bytes(data)!r})")
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def greet(sock: socket.socket, *, secret: bytes | None, identity: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """Returns the proved identity of the task we connected to, after proving ours.

    Raises:
        SecretError: It knows another secret, or one side has none.
        WireError: It is no task of tfdist, or did not answer in time.
    """
    mine = _hello(sock, secret, deadline)
    theirs = _hear_hello(sock, secret, deadline)
    _prove(sock, b"connector", secret, mine + theirs, identity, deadline)
    return _verify(sock, b"acceptor", secret, mine + theirs, deadline)


def answer(
    sock: socket.socket,
    *,
    secret: bytes | None,
    identity: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]],
    deadline: float,
) -> dict[str, Any]:
    """Returns the proved identity of the task that connected to us, then proves ours. Raises like `greet`.

    Args:
        identity: Ours, or a function that returns what to say to this peer.
    """
    # A stranger learns nothing from us, not even the protocol, before it has said a right hello.
    theirs = _receive_hello(sock, deadline)
    mine = _hello(sock, secret, deadline)
    nonce = _check_hello(theirs, secret)
    identity_of_peer = _verify(sock, b"connector", secret, nonce + mine, deadline)
    words = identity(identity_of_peer) if callable(identity) else identity
    _prove(sock, b"acceptor", secret, nonce + mine, words, deadline)
    return identity_of_peer


def _hello(sock: socket.socket, secret: bytes | None, deadline: float) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    message = {"protocol": PROTOCOL, "nonce": nonce.hex(), "secret": secret is not None}
    send(sock, HELLO, message, deadline=deadline)
    return nonce


def _hear_hello(sock: socket.socket, secret: bytes | None, deadline: float) -> bytes:
    return _check_hello(_receive_hello(sock, deadline), secret)


def _receive_hello(sock: socket.socket, deadline: float) -> dict[str, Any]:
    return decode(receive(sock, HELLO, limit=HELLO_LIMIT, deadline=deadline))


def _check_hello(message: Mapping[str, Any], secret: bytes | None) -> bytes:
    if message.get("protocol") != PROTOCOL:
        raise WireError(f"speaks protocol {message.get('protocol')!r}, we speak {PROTOCOL}: install one tfdist version")
    if message.get("secret") is not (secret is not None):
        raise SecretError("has no job secret, we have one" if secret is not None else "has a job secret, we have none")
    try:
        nonce = bytes.fromhex(message["nonce"])
    except (KeyError, TypeError, ValueError):
        nonce = b""
    if len(nonce) != _NONCE_BYTES:
        raise WireError("sent a hello without a nonce")
    return nonce


def _mac(role: bytes, secret: bytes | None, nonces: bytes, body: bytes) -> bytes:
    # The role keeps a proof from being sent back as the answer to itself.
    return hmac.new(secret or b"", b"tfdist " + role + b"\0" + nonces + body, hashlib.sha256).digest()


def _prove(
    sock: socket.socket, role: bytes, secret: bytes | None, nonces: bytes, identity: Mapping[str, Any], deadline: float
) -> None:
    body = encode(identity)
    _send_body(sock, PROOF, _mac(role, secret, nonces, body) + body, deadline)


def _verify(sock: socket.socket, role: bytes, secret: bytes | None, nonces: bytes, deadline: float) -> dict[str, Any]:
    frame = _parse_header(_read(sock, HEADER.size, deadline), PROOF_LIMIT)
    proof = _read(sock, frame[1], deadline)
    if frame[0] == GOODBYE:
        raise SecretError(str(decode(proof).get("reason"))[:500])
    if frame[0] != PROOF:
        raise WireError(f"sent a frame of kind {frame[0]} where a proof was due")
    mac, body = proof[:_MAC_BYTES], proof[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(role, secret, nonces, body)):
        send(sock, GOODBYE, {"reason": "has another job secret than we have"}, deadline=deadline)
        raise SecretError("has another job secret than we have")
    return decode(body)


# A forked child inherits every descriptor. If it outlived its parent, the parent's peers would never see the connection
# end, so the child closes its duplicates at once (closing, unlike shutdown, leaves the parent's connection alone).
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forked_child(sock: socket.socket) -> None:
    """Keeps children forked from this process (multiprocessing's "fork") from holding `sock` open."""
    _sockets.add(sock)


def _after_fork_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
