"""Findings about who answered, and whether it shook hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zmq_datasource.workbench.doctor.facts import Examined
from zmq_datasource.workbench.doctor.findings.finding import Finding, Severity

__all__ = ["of_peer"]

_SENDERS = {"SUB": ("PUB", "XPUB"), "PULL": ("PUSH",)}
_TAKERS = {"PUB": "SUB", "XPUB": "SUB", "PUSH": "PULL"}
_NO_SENDER = {
    "PULL": "it receives, as this does; name the endpoint of the sender, or let one side bind and the other connect",
    "SUB": "it receives, as this does; name the endpoint of the publisher, or let one side bind and the other connect",
    "XSUB": "it is the side of a proxy to which publishers connect; name the one for subscribers (its XPUB)",
    "ROUTER": "it takes transactions, of DEALER sinks and Producers (docs/protocol.md), or is a proxy's durable or "
    "replay endpoint (docs/proxy.md); a SUB or PULL has no business there",
    "DEALER": "it sends transactions; receive them with socketType=ROUTER and bind",
    "REP": "it answers requests; it is not a feed",
    "REQ": "it asks; it is not a feed",
    "PAIR": "it talks to one other PAIR; it is not a feed",
}


def of_peer(one: Examined) -> Iterator[Finding]:
    """Why there is no handshake; at most one finding."""
    glance, handshake = one.glance, one.handshake
    if handshake.state == "succeeded":
        return

    def found(name: str, what: str, evidence: str, cause: str, fix: str) -> Finding:
        return Finding(
            id=name,
            severity=Severity.UNREACHABLE,
            endpoint=one.endpoint,
            what=what,
            evidence=evidence,
            cause=cause,
            fix=fix,
        )

    tried = f"connecting: {_shown(one)}"
    match glance.state:
        case "unresolved":
            yield found(
                "host_unknown",
                "The host does not resolve.",
                glance.reason,
                "A misspelt name, or one that only another network or container knows. libzmq itself retries for ever "
                "without a word.",
                "Correct the host, or name its address.",
            )
        case "refused":
            yield found(
                "refused",
                "Nobody listens there.",
                f"{glance.reason}; {tried}",
                "The sender is not running, listens on another port or interface (127.0.0.1 instead of *), or connects "
                "itself, as to a proxy.",
                "Start it first, or look at its bind address; if it connects, give its endpoint to --bind.",
            )
        case "no_answer":
            yield found(
                "no_answer",
                "The host does not answer.",
                f"{glance.reason}; {tried}",
                "A firewall that drops packets, a wrong address, or a machine that is down.",
                "Try the port with nc -vz from this machine; open it.",
            )
        case "silent":
            yield found(
                "silent_peer",
                "The connection is accepted, and then nothing is said.",
                f"{glance.reason}; {tried}",
                "A process that is stopped or hangs (the kernel accepts for it), or a service that is not ZeroMQ.",
                "Look whether the process behind the port runs: ss -ltnp on its machine.",
            )
        case "not_zeromq":
            yield found(
                "not_zeromq",
                "Something else than ZeroMQ answers there.",
                f"its first bytes are no greeting of ZMTP; {tried}",
                "The port of another service.",
                "Look up the publisher's port.",
            )
        case "not_asked" if handshake.state == "none":
            yield found(
                "nobody_came",
                "Nobody has connected.",
                "listened for the whole --wait",
                "The sender is not running, connects to another address, or a firewall is in between.",
                "Start the sender, and let it connect to an address of this machine; a longer --wait.",
            )
        case _:
            yield _of_handshake(one, found)


def _of_handshake(one: Examined, make: Callable[[str, str, str, str, str], Finding]) -> Finding:
    glance, handshake = one.glance, one.handshake
    theirs, kind = glance.mechanism, glance.socket_type
    if theirs is not None and theirs != one.mechanism:
        return make(
            "security_mismatch",
            f"The peer wants security {theirs}, ours is {one.mechanism}.",
            f"its greeting (ZMTP {glance.version}) names {theirs}; connecting: {_shown(one)}",
            "One of the two has no keys set, or set them after bind or connect, where they are ignored.",
            _SECURITY.get(theirs, f"Set up {theirs} on our side, or take it from the peer."),
        )
    if kind is not None and kind not in _SENDERS.get(one.socket_type, (kind,)):
        return make(
            "wrong_socket_type",
            f"The peer is {'an' if kind[0] == 'X' else 'a'} {kind}; a {one.socket_type} cannot receive from it.",
            f"its READY command names {kind}; connecting: {_shown(one)}",
            "The socket types of the two sides do not belong together. libzmq hangs up without a word and never dials "
            "again.",
            f"Use --socket-type {_TAKERS[kind]} (socketType={_TAKERS[kind]})."
            if kind in _TAKERS
            else f"Another endpoint: {_NO_SENDER.get(kind, 'it is no socket of a feed')}.",
        )
    if handshake.state == "failed" or one.mechanism != "NULL":
        return make(
            "credentials_refused",
            "The handshake fails although both sides use the same security.",
            f"both use {one.mechanism}; connecting: {_shown(one)}",
            *_CREDENTIALS.get(
                one.mechanism, ("The authenticator (ZAP) of the peer.", "Look at the peer's own log.")
            ),
        )
    return make(
        "hung_up",
        "The peer ended the handshake.",
        f"{_said(one)}; connecting: {_shown(one)}",
        "It lets only some peers in (ZAP), or restarted in that moment. Which cannot be told from outside.",
        "Try again; look at the peer's own log or monitor.",
    )


_CREDENTIALS = {
    "CURVE": (
        "A wrong server key, our own keys not a pair, or an authenticator (ZAP) that does not let us in.",
        "Compare zmq.curve_serverkey with the server's public key; ask who runs the peer to let our public key in.",
    ),
    "PLAIN": (
        "A wrong username or password, or a peer without the authenticator (ZAP) that PLAIN needs: without one libzmq "
        "refuses everybody.",
        "Compare zmq.plain_username and zmq.plain_password with what the peer lets in; ask who runs it.",
    ),
}
_SECURITY = {
    "CURVE": "Set -o zmq.curve_serverkey, -o zmq.curve_publickey and -o zmq.curve_secretkey, as for the source.",
    "PLAIN": "Set -o zmq.plain_username and -o zmq.plain_password, as for the source.",
    "NULL": "Remove the security options here, or set the peer's before it binds: it runs without any.",
}


def _shown(one: Examined) -> str:
    handshake = one.handshake
    words = {
        "failed": f"libzmq says {handshake.event}",
        "hung_up": "connected, and the peer hung up before the handshake was done",
        "none": "no handshake within --wait",
        "succeeded": "the handshake succeeded",
    }
    return words[handshake.state]


def _said(one: Examined) -> str:
    glance = one.glance
    if glance.state != "greeted":
        return "the peer was not asked for its greeting"
    return (
        f"it greets with ZMTP {glance.version}, {glance.mechanism}, {glance.socket_type or 'no socket type'}"
    )
