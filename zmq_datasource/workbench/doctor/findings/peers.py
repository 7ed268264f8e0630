"""Why there is no handshake; at most one finding."""

from __future__ import annotations

from zmq_datasource.workbench.doctor.facts import Examined
from zmq_datasource.workbench.doctor.findings.finding import Case, Conditions

__all__ = ["PEERS", "PeerCase"]

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
_SECURITY = {
    "CURVE": "Set -o zmq.curve_serverkey, -o zmq.curve_publickey and -o zmq.curve_secretkey, as for the source.",
    "PLAIN": "Set -o zmq.plain_username and -o zmq.plain_password, as for the source.",
    "NULL": "Remove the security options here, or set the peer's before it binds: it runs without any.",
}


class PeerCase(Case):
    """An endpoint without a handshake."""

    def __init__(self, one: Examined) -> None:
        self.endpoint, self.glance, self.handshake = one.endpoint, one.glance, one.handshake
        self.ours, self.theirs = one.mechanism, one.glance.mechanism
        self.kind, self.our_kind = one.glance.socket_type, one.socket_type
        tried = {
            "failed": f"libzmq says {self.handshake.event}",
            "hung_up": "connected, and the peer hung up before the handshake was done",
            "none": "no handshake within --wait",
        }
        self.tried = f"connecting: {tried.get(self.handshake.state)}"

        # Where nobody says why, with security on it is that.
        self.refused = self.handshake.state == "failed" or self.ours != "NULL"

    @property
    def their_security(self) -> str:
        return _SECURITY.get(str(self.theirs), f"Set up {self.theirs} on our side, or take it from the peer.")

    @property
    def does_not_send(self) -> bool:
        return self.kind is not None and self.kind not in _SENDERS.get(self.our_kind, (self.kind,))

    @property
    def a_kind(self) -> str:
        return f"{'an' if str(self.kind)[0] == 'X' else 'a'} {self.kind}"

    @property
    def instead(self) -> str:
        if taker := _TAKERS.get(str(self.kind)):
            return f"Use --socket-type {taker} (socketType={taker})."
        return f"Another endpoint: {_NO_SENDER.get(str(self.kind), 'it is no socket of a feed')}."

    @property
    def said(self) -> str:
        glance = self.glance
        if glance.state != "greeted":
            return "the peer was not asked for its greeting"
        return f"it greets with ZMTP {glance.version}, {glance.mechanism}, {glance.socket_type or 'no socket type'}"


PEERS: Conditions = (
    {
        "host_unknown": lambda c: c.glance.state == "unresolved",
        "refused": lambda c: c.glance.state == "refused",
        "no_answer": lambda c: c.glance.state == "no_answer",
        "silent_peer": lambda c: c.glance.state == "silent",
        "not_zeromq": lambda c: c.glance.state == "not_zeromq",
        "nobody_came": lambda c: c.glance.state == "not_asked" and c.handshake.state == "none",
        "security_mismatch": lambda c: c.theirs is not None and c.theirs != c.ours,
        "wrong_socket_type": lambda c: c.does_not_send,
        "credentials_refused-curve": lambda c: c.refused and c.ours == "CURVE",
        "credentials_refused-plain": lambda c: c.refused and c.ours == "PLAIN",
        "credentials_refused": lambda c: c.refused,
        "hung_up": lambda _: True,
    },
)
