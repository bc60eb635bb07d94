"""Frames and the handshake: right ones pass, whatever else comes ends in WireError, in bounded time and memory."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist import wire
from tfdist.wire import Frame, FrameParser, SecretError, WireError

LIMIT = 1000
FRAMES = st.lists(st.builds(Frame, st.sampled_from(sorted(wire.KINDS)), st.binary(max_size=LIMIT)), max_size=5)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@settings(deadline=None)
@given(FRAMES, st.lists(st.integers(0, 40), max_size=30))
def test_frames_survive_being_cut_anywhere(frames, sizes):
    parser = FrameParser(limit=LIMIT)
    stream = b"".join(wire.pack(frame.kind, frame.body) for frame in frames)
    assert [frame for piece in cut(stream, sizes) for frame in parser.feed(piece)] == frames


@settings(deadline=None)
@given(FRAMES, st.binary(max_size=100), st.lists(st.integers(0, 20), max_size=10))
@example([], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", [])
@example([], wire.HEADER.pack(wire.MAGIC, wire.HELLO, 2**32 - 1), [])
def test_garbage_gives_frames_or_a_wire_error_and_nothing_else(frames, garbage, sizes):
    parser = FrameParser(limit=LIMIT)
    stream = b"".join(wire.pack(frame.kind, frame.body) for frame in frames) + garbage
    got: list[Frame] = []
    with suppress(WireError):
        for piece in cut(stream, sizes):
            got += parser.feed(piece)
    # Garbage never changes what stood before it; frames of the last piece may be lost with it.
    assert got[: len(frames)] == frames[: len(got)]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"GET / HTTP/1", "does not speak tfdist's protocol (sent b'GET / HTTP/1')"),
        (wire.HEADER.pack(wire.MAGIC, 99, 0), "unknown kind 99"),
        (wire.HEADER.pack(wire.MAGIC, wire.HELLO, LIMIT + 1), "announced 1,001 bytes where at most 1,000 are allowed"),
    ],
)
def test_a_wrong_header_is_an_error_before_its_body_comes(header, message):
    with pytest.raises(WireError) as error:
        FrameParser(limit=LIMIT).feed(header)
    assert message in str(error.value)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"1" * 5000)
@example(b'{"a": NaN}')
@example(b"\xff")
def test_a_body_is_a_json_object_or_a_wire_error(body):
    with suppress(WireError):
        assert isinstance(wire.decode(body), dict)


# The handshake, over a real pair of sockets


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def both(pair, *, connector, acceptor, seconds=5.0):
    """Returns what `greet` and `answer` returned or raised."""
    deadline = time.monotonic() + seconds
    results = {}

    def run(name, handshake, sock, secret):
        try:
            results[name] = handshake(sock, secret=secret, identity={"task": name}, deadline=deadline)
        except WireError as error:
            results[name] = error
            sock.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=run, args=("connector", wire.greet, pair[0], connector))
    thread.start()
    run("acceptor", wire.answer, pair[1], acceptor)
    thread.join(seconds + 1)
    assert not thread.is_alive()
    return results["connector"], results["acceptor"]


@pytest.mark.parametrize("secret", [None, b"", b"secret"], ids=["no secret", "empty secret", "secret"])
def test_equal_secrets_exchange_identities(pair, secret):
    assert both(pair, connector=secret, acceptor=secret) == ({"task": "acceptor"}, {"task": "connector"})


@pytest.mark.parametrize(
    ("connector", "acceptor", "words_to_connector", "words_to_acceptor"),
    [
        (b"one", b"other", "another job secret", "another job secret"),
        (b"one", None, "has no job secret, we have one", "has a job secret, we have none"),
        (None, b"one", "has a job secret, we have none", "has no job secret, we have one"),
    ],
)
def test_differing_secrets_are_named_on_both_sides(pair, connector, acceptor, words_to_connector, words_to_acceptor):
    to_connector, to_acceptor = both(pair, connector=connector, acceptor=acceptor)
    assert isinstance(to_connector, SecretError)
    assert isinstance(to_acceptor, SecretError)
    assert words_to_connector in str(to_connector)
    assert words_to_acceptor in str(to_acceptor)


def test_an_echo_of_our_own_proof_proves_nothing(pair):
    """A stranger that sends back what it gets would else be let in without the secret."""
    ours, theirs = pair

    def echo():
        while data := theirs.recv(4096):
            theirs.sendall(data)

    echoing = threading.Thread(target=echo)
    echoing.start()
    with pytest.raises(SecretError):
        wire.greet(ours, secret=b"secret", identity={"task": "worker 1"}, deadline=time.monotonic() + 5)
    ours.shutdown(socket.SHUT_WR)
    echoing.join()


@pytest.mark.parametrize("handshake", [wire.greet, wire.answer])
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello",
        wire.pack(wire.HELLO, b"not JSON"),
        wire.pack(wire.HELLO, b"[]"),
        wire.pack(wire.HELLO, wire.encode({"protocol": 2, "nonce": "00" * 32, "secret": False})),
        wire.pack(wire.HELLO, wire.encode({"protocol": 1, "nonce": "zz", "secret": False})),
        wire.pack(wire.HELLO, wire.encode({"protocol": 1, "nonce": 5, "secret": False})),
        wire.pack(wire.HELLO, b"x" * (wire.HELLO_LIMIT + 1)),
        wire.pack(wire.HELLO, wire.encode({"protocol": 1, "nonce": "00" * 32, "secret": False})) * 2,
        wire.HEADER.pack(wire.MAGIC, wire.PROOF, 10),
        b"",
    ],
    ids=[
        "HTTP",
        "TLS",
        "no JSON",
        "no object",
        "other version",
        "bad nonce",
        "number as nonce",
        "long hello",
        "two hellos",
        "proof first",
        "closes",
    ],
)
def test_a_stranger_is_an_error_at_once(pair, handshake, said):
    ours, theirs = pair
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError):
        handshake(ours, secret=None, identity={}, deadline=time.monotonic() + 60)


@pytest.mark.parametrize("handshake", [wire.greet, wire.answer])
def test_silence_ends_at_the_deadline(pair, handshake):
    with pytest.raises(WireError, match="no answer"):
        handshake(pair[0], secret=None, identity={}, deadline=time.monotonic() + 0.05)


def test_a_slow_sender_can_not_stretch_the_deadline(pair):
    ours, theirs = pair
    stop = threading.Event()

    def drip():
        for byte in wire.pack(wire.HELLO, b"{" + b" " * 500):
            if stop.wait(0.01):
                return
            theirs.sendall(bytes([byte]))

    dripper = threading.Thread(target=drip)
    dripper.start()
    started = time.monotonic()
    with pytest.raises(WireError, match="no answer"):
        wire.answer(ours, secret=None, identity={}, deadline=started + 0.2)
    stop.set()
    dripper.join()
    assert time.monotonic() - started < 2
