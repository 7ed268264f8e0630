"""What is wrong with a feed, found by connecting to it as its receiver would.

The rules:

* What was measured is kept apart from what is concluded. ``facts`` are figures; a finding
  (``findings``) is a pure function of them, and says which figures it rests on.
* What cannot be known from outside is said to be so, with how to find out: no socket shows its peer's
  options, no queue its depth.
* Looking does as little as it can. A glance (``reach``) ends before the handshake does, so its peer gives
  it no message. Watching is one more subscriber. A stall, and taking from a PUSH, are felt by others and
  happen only when they are asked for.
* Every wait has an end.

Modules: ``zmtp`` reads a greeting's bytes; ``reach`` fetches them; ``link`` is one connection, a socket of
``transport``; ``guess`` finds the framing, ``watcher`` follows its numbers; ``watching`` receives and counts;
``stall`` takes nothing for a while, and ``hwm`` says which high-water mark explains what came then; ``durable`` looks
at a log, ``directory`` and ``storage`` at where one could be kept; ``examine`` does all that in its order;
``findings`` concludes from its facts; ``report`` shows it.
"""
