"""A server that says what a test wants to hear: answers that a real one gives only in rare moments."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Self

#: Takes the number of the connection (from 1) and the words of a command; returns the raw answer, or None to hang up.
Answer = Callable[[int, list[bytes]], bytes | None]


class FakeServer:
    """Speaks the Redis protocol on a port of 127.0.0.1; ``asked`` has what it was asked, without the CLIENT commands."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.asked: list[list[bytes]] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._sockets.append(connection)
                self._start(self._serve, connection, len(self._sockets))

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, connection.makefile("rb") as stream, suppress(OSError):
            while words := _read_command(stream):
                if words[0] == b"CLIENT":
                    connection.sendall(b"+OK\r\n")
                    continue
                self.asked.append(words)
                reply = self._answer(number, words)
                if reply is None:
                    return
                connection.sendall(reply)


def _read_command(stream: BinaryIO) -> list[bytes]:
    head = stream.readline()
    if not head:
        return []
    words = []
    for _ in range(int(head[1:])):
        length = int(stream.readline()[1:])
        words.append(stream.read(length + 2)[:-2])
    return words
