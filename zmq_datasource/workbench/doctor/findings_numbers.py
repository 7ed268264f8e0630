"""Findings about sequence numbers: losses, duplicates, and numbers that the doctor has found by itself."""

from __future__ import annotations

from collections.abc import Iterator

from zmq_datasource.workbench.doctor.facts import MAILBOX_SECONDS, Examined, Numbers
from zmq_datasource.workbench.doctor.findings import Finding, Severity

__all__ = ["number_findings"]

_NOTE = Severity.NOTE


def number_findings(one: Examined) -> Iterator[Finding]:
    """Sequences and losses."""
    traffic, numbers = one.traffic, one.numbers
    if traffic is None or numbers is None:
        return
    if numbers.malformed and not numbers.guessed:
        yield Finding(
            id="malformed",
            what=f"Messages do not fit framing={numbers.framing}.",
            evidence=f"{numbers.malformed:,} of {traffic.messages:,}; frames: {traffic.frames}",
            cause="The publisher uses another framing, or several kinds of messages share the feed.",
            fix="Leave the framing out, and the doctor guesses it. See docs/sequences.md.",
        )
    if not numbers.judged and one.socket_type == "SUB":
        yield Finding(
            id="unnumbered",
            severity=_NOTE,
            what="The messages have no sequence numbers that the doctor can follow, so a loss cannot be seen.",
            evidence=f"{traffic.messages:,} messages, framing seems {numbers.framing}, frames: {traffic.frames}",
            cause="A PUB drops messages for a subscriber that is full or late, and reports nothing. Without sequence "
            "numbers the receiver cannot notice it either.",
            fix="Let the publisher number its messages (the sink does so with framing=sequenced), and set the framing "
            "at the receiver.",
        )
    if not numbers.judged:
        return
    _, dollar, path = numbers.options.get("sequenceAt", "").partition("$")
    if dollar and numbers.guessed:
        yield Finding(
            id="numbers_in_json",
            severity=_NOTE,
            what="The messages have sequence numbers in their JSON text.",
            evidence=f"${path} goes up by one "
            + (f"for each topic ({numbers.counters:,})" if _by_topic(numbers) else "over the whole feed"),
            cause="The publisher numbers its messages in the payload. The source reads the numbers and counts what is "
            "missing, if you say where they are.",
            fix=f"Set {_as_options(numbers)}. For a table that has the messages already, see docs/recipes.md, Numbers "
            "in JSON.",
        )
    if numbers.missed_first and one.handshake.waited and numbers.framing != "custom":
        yield Finding(
            id="slow_joiner",
            what="The sender began to send before this subscriber had joined.",
            evidence=f"{numbers.missed_first:,} messages were sent before the first that came, though the doctor was "
            "waiting when the sender appeared",
            cause="To connect and subscribe takes some milliseconds. A PUB drops what it sends to this subscriber in "
            "that time. No high-water mark helps. (If the sender has long been sending to other subscribers, nothing "
            "is wrong: these are old messages. The sequence numbers do not tell the two cases apart.)",
            fix="Let the publisher wait for the subscription (XPUB), use a replay socket that keeps old messages "
            "(replayEndpoint), or send through PUSH. To sleep before the first send is only a guess.",
        )
    missing = (
        f"{numbers.lost:,} numbers missing in {numbers.gaps:,} gaps, {traffic.messages:,} messages came "
        f"({traffic.rate:,.0f}/s, at the peak {traffic.peak:,.0f}/s)"
    )
    if numbers.lost and traffic.saturated:
        yield Finding(
            id="doctor_too_slow",
            what="Sequence numbers are missing, and the doctor itself was behind all the time.",
            evidence=missing,
            cause="This feed is faster than the doctor can read. The doctor itself may have caused the gaps.",
            fix="Watch fewer topics (--topics), or compare with the gaps that the query itself counts.",
        )
    elif numbers.lost and one.lost_behind:
        yield Finding(
            id="proxy_drops",
            what="The proxy drops messages: those that are missing here came to a subscriber of the publisher.",
            evidence=f"{one.lost_behind:,} of the missing messages came from upstream; {missing}",
            cause="A proxy is two pairs of sockets with four high-water marks. The queue of its own SNDHWM towards us "
            "is full, or too small for a burst. The publisher's queue never fills, because the proxy continues to "
            "take messages.",
            fix="Raise SNDHWM of the proxy's backend (before its bind), and set XPUB_NODROP there. Then the proxy "
            "waits, and the publisher's own high-water mark decides.",
        )
    elif numbers.lost:
        least = max(2, round(traffic.peak * MAILBOX_SECONDS))
        yield Finding(
            id="messages_lost",
            what="Sequence numbers are missing, although the doctor takes every message at once.",
            evidence=missing,
            cause="The publisher dropped the messages at its own SNDHWM and reported nothing. Either its bursts are "
            "larger than the high-water mark (libzmq looks for room every 1.2 ms, so at this peak a PUB with a "
            f"high-water mark below {least:,} drops by mistake), or its NOBLOCK sends were refused. Or a proxy in "
            "between dropped them."
            + (
                " The same numbers are missing upstream, so it is not the proxy that drops."
                if one.lost_behind == 0
                else ""
            ),
            fix="Raise the publisher's SNDHWM before its bind. Behind a proxy, give the publisher's endpoint to "
            "--upstream: that tells whether the publisher or the proxy drops.",
        )
    repeated = f"{numbers.duplicates:,} duplicates in {traffic.messages:,} messages"
    if numbers.unequal and numbers.suggested:
        change = " and ".join(f"{name}={value}" for name, value in numbers.suggested.items())
        yield Finding(
            id="counter_per_topic",
            what="Each topic has a counter of its own, and the framing counts over all topics. So messages that came "
            "once look like duplicates.",
            evidence=f"{repeated}; {_unequal(numbers)}; counted for each topic, the numbers go up by one",
            cause="The publisher numbers each topic by itself.",
            fix=f"Set {change}. Do not set deduplicate: it would leave out messages that came once.",
        )
    elif numbers.unequal:
        yield Finding(
            id="equal_numbers",
            what="Different messages have the same sequence number, so these are no duplicates.",
            evidence=f"{repeated}; {_unequal(numbers)}",
            cause="Two publishers share a name or an endpoint, the publisher counts something smaller than the "
            "framing does (a topic, an instrument), or the framing is the wrong one.",
            fix="Name what has a counter with sequenceBy, let each publisher have a name or an endpoint of its own, or "
            "set sequenceBy=none. Do not set deduplicate: it would leave out messages that came once.",
        )
    elif numbers.duplicates:
        yield Finding(
            id="duplicates",
            what="Messages come twice.",
            evidence=f"{repeated}; "
            + (
                f"of {numbers.compared:,} that were compared, all are equal"
                if numbers.compared
                else _NOT_COMPARED
            ),
            cause="The sender repeats messages after a failure, or they come by two paths, such as two proxies.",
            fix="Set deduplicate=true to leave them out." if numbers.compared else _COMPARE_FIRST,
        )


_NOT_COMPARED = "they came too late to compare them with the messages that had these numbers first"
_COMPARE_FIRST = "Compare messages with equal numbers. Set deduplicate=true only if they are equal."


def _by_topic(numbers: Numbers) -> bool:
    return "topic" in numbers.options.get("sequenceBy", "")


def _as_options(numbers: Numbers) -> str:
    return ", ".join(f"{name}={value}" for name, value in {"framing": "custom", **numbers.options}.items())


def _unequal(numbers: Numbers) -> str:
    return f"of {numbers.compared:,} numbers that came twice, {numbers.unequal:,} have different topics or values"
