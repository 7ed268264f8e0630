"""What every socket has."""

from __future__ import annotations

from typing import Annotated

from zmq_datasource.errors import OptionError
from zmq_datasource.option_parser import OptionSet, doc
from zmq_datasource.option_types import Endpoints

__all__ = ["SocketOptions"]


class SocketOptions(OptionSet, frozen=True, kw_only=True, rename="camel"):
    """What every socket has. Subclasses add their side."""

    connect: Annotated[Endpoints, doc("Endpoints to connect to, comma-separated.")] = Endpoints()
    bind: Annotated[Endpoints, doc("Endpoints to bind, comma-separated.")] = Endpoints()

    @property
    def endpoints(self) -> str:
        """All of them, for names and messages."""
        return ",".join(map(str, (*self.connect, *self.bind)))

    def check(self) -> None:
        both = set(self.connect) & set(self.bind)
        if both:
            raise OptionError(f"{', '.join(map(str, both))} is in both connect and bind; keep one")
