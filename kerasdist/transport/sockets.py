"""The transport over stream sockets: TCP between hosts, Unix inside one.

All sockets are non-blocking; every wait is one `poll` with a deadline. While
`poll` and the socket calls run the interpreter lock is free, so TensorFlow's
threads continue.

Before its first `poll` an exchange polls its sockets in a loop for a moment, and yields
its core in between: waking a sleeping processor takes longer than waiting for a peer
that is nearly ready (benchmarks/all_reduce).
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from kerasdist.errors import ProtocolError
from kerasdist.transport.base import (
    Aborted,
    CallMismatch,
    Collective,
    Peer,
    PeerClosed,
    PeerSilent,
    connection_broke,
)
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import (
    HEADER_BYTES,
    Call,
    FrameType,
    pack_header,
    unpack_header,
)
from kerasdist.transport.tracing import Recorder, now

# Passing file descriptors between processes of a host, over Unix sockets.
#
# A descriptor is sent with the first byte of a frame, even if the rest isn't sent.

# Received descriptors mustn't leak into processes that the script starts.
# (The socket module has a name for this flag only from Python 3.14 on.)
_CLOSE_ON_EXEC = 0x40000000 if sys.platform == "linux" else 0  # MSG_CMSG_CLOEXEC
# Seconds to wait when the kernel holds too many descriptors in sockets.
_CROWDED_SECONDS = 0.01


def receive_descriptor(sock: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive as `socket.recv_fds`, but close-on-exec: that ignores its flags."""
    fds = array.array("i")
    room = socket.CMSG_LEN(fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(count, room, _CLOSE_ON_EXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


_NOTHING = memoryview(bytearray())
# Seconds that an exchange spins before it sleeps.
_SPIN_SECONDS = 100e-6


class _Sending:
    """A frame that is being sent: header and payload, without the bytes sent.

    `ended` is the time of its end, if that is recorded.
    """

    __slots__ = ("_parts", "done", "ended", "peer", "sock")

    def __init__(
        self, sock: socket.socket, peer: Peer, parts: list[memoryview]
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.done = False
        self.ended = 0
        self._parts = parts

    def advance(self) -> None:
        """Send as much as the kernel takes now."""
        while self._parts:
            try:
                sent = self.sock.sendmsg(self._parts)
            except BlockingIOError:
                return
            except OSError as error:
                raise connection_broke(self.peer, error) from error
            while self._parts and sent >= len(self._parts[0]):
                sent -= len(self._parts[0])
                del self._parts[0]
            if sent:
                self._parts[0] = self._parts[0][sent:]
        self.done = True


class _Receiving:
    """A frame that is being received: the header, and memory for exactly the payload.

    The payload is written to its memory before the header is checked: if that is wrong,
    the memory's old contents are lost.

    `began` and `ended` are the times of its first and its last byte, if recorded.
    """

    __slots__ = (
        "_call",
        "_expected",
        "_header",
        "_left",
        "_room",
        "began",
        "done",
        "ended",
        "peer",
        "sock",
    )

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        call: Call,
        room: memoryview,
        expected: bytes,
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.done = False
        self.began = self.ended = 0
        self._call = call
        self._room = room
        self._expected = expected
        self._header: bytearray | None = bytearray(HEADER_BYTES)
        self._left = memoryview(self._header)

    def advance(self) -> None:
        """Receive as much as the kernel has now."""
        while not self.done:
            try:
                if self._header is None or not self._room:
                    count = self.sock.recv_into(self._left)
                else:
                    count = self.sock.recvmsg_into([self._left, self._room])[0]
            except BlockingIOError:
                return
            except OSError as error:
                raise connection_broke(self.peer, error) from error
            if count == 0:
                raise PeerClosed(self.peer, "its connection was closed")
            if count < len(self._left):
                self._left = self._left[count:]
                continue
            if self._header is not None:
                count -= len(self._left)
                if self._header != self._expected:
                    self._refuse(self._header)
                self._header = None
                self._left = self._room
            self._left = self._left[count:]
            self.done = not self._left

    @property
    def has_begun(self) -> bool:
        """Whether a byte was received."""
        return self._header is None or len(self._left) < HEADER_BYTES

    def _refuse(self, header: bytearray) -> None:
        kind, length, theirs = unpack_header(header)
        # First check the call: in another collective other frames are right.
        if theirs != self._call:
            raise CallMismatch(self.peer, self._call, theirs)
        if kind is not FrameType.DATA:
            raise ProtocolError(
                f"{self.peer} sent a {kind.name} frame where data was expected."
            )
        raise ProtocolError(
            f"A data frame of {self.peer} has the wrong length. "
            f"Received: {length} bytes, expected {len(self._room)}."
        )


class SocketTransport:
    """Connects the ranks of one group by stream sockets.

    Its one operation is `exchange`: send to one rank and receive from one rank at the
    same time, so that a ring in which all ranks send can't fill up and stop.

    Args:
        rank: This process's rank in the group.
        peers: The ranks, with their names in messages, by group rank.
        outgoing: Connected sockets to send on, by group rank.
        incoming: Connected sockets to receive on, by group rank. A rank may
            have the same socket in both. The transport owns all of them.

    Attributes:
        rank: This process's rank in the group, 0..size-1.
        size: Number of ranks in the group.
        peers: The ranks of the group, with their names in messages, by group rank.
        recorder: Gets spans of sending, waiting and receiving; or None.
        bytes_sent: Bytes of all frames that this rank has sent so far.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        outgoing: Mapping[int, socket.socket],
        incoming: Mapping[int, socket.socket],
    ) -> None:
        self.rank = rank
        self.size = len(peers)
        self.peers = tuple(peers)
        self._out = dict(outgoing)
        self._in = dict(incoming)
        self._aborted = False
        self.bytes_sent = 0
        self.recorder: Recorder | None = None
        for sock in self.sockets():
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def sockets(self) -> set[socket.socket]:
        """Return all sockets of this rank."""
        return {*self._out.values(), *self._in.values()}

    def exchange(
        self,
        collective: Collective,
        *,
        to: int | None = None,
        outgoing: memoryview | bytes = b"",
        source: int | None = None,
        incoming: memoryview | None = None,
    ) -> None:
        """Send `outgoing` to one rank and fill `incoming` from another, together.

        Args:
            collective: The collective that this is part of; the peer's must be equal.
            to: Group rank to send to, or None to send nothing.
            outgoing: The bytes to send, C-contiguous.
            source: Group rank to receive from, or None to receive nothing.
            incoming: Memory for the received bytes, C-contiguous and writable; it
                must have exactly the size of what is sent. None for no bytes.

        Raises:
            PeerClosed: A connection is closed.
            PeerSilent: The deadline passed.
            CallMismatch: The source is in another collective.
            ProtocolError: The received bytes aren't a data frame.
            Aborted: `abort` or `close` was called, here or by another thread.

        After an exception the connections are out of step: only `abort` may be called.
        """
        call, deadline = collective
        sending = receiving = None
        header = pack_header(FrameType.DATA, len(outgoing), call)
        if to is not None:
            parts = [memoryview(header)]
            if len(outgoing):
                parts.append(memoryview(outgoing))
            sending = _Sending(self._out[to], self.peers[to], parts)
            self.bytes_sent += len(header) + len(outgoing)
        if source is not None:
            room = _NOTHING if incoming is None else incoming
            if len(room) != len(outgoing):
                header = pack_header(FrameType.DATA, len(room), call)
            peer = self.peers[source]
            receiving = _Receiving(self._in[source], peer, call, room, header)
        recorder = self.recorder
        begin = 0 if recorder is None else now()
        try:
            self._drive(sending, receiving, deadline, recorder is not None)
        except PeerClosed:
            # A socket that another thread has shut down looks like a lost peer.
            if self._aborted:
                raise Aborted from None
            raise
        if recorder is not None:
            if sending is not None and len(outgoing):
                recorder.add("send", begin, sending.ended, len(outgoing))
            if receiving is not None:
                recorder.add("wait", begin, receiving.began)
                if len(room):
                    begin, end = receiving.began, receiving.ended
                    recorder.add("receive", begin, end, len(room))

    def _drive(
        self,
        sending: _Sending | None,
        receiving: _Receiving | None,
        deadline: Deadline,
        timing: bool = False,
    ) -> None:
        if self._aborted:
            raise Aborted
        spin_until = 0.0
        while True:
            if sending is not None:
                sending.advance()
                if sending.done:
                    if timing:
                        sending.ended = now()
                    sending = None
            if receiving is not None:
                if timing and not receiving.has_begun:
                    receiving.began = now()
                receiving.advance()
                if receiving.done:
                    if timing:
                        receiving.ended = now()
                    receiving = None
            if sending is None and receiving is None:
                return
            if not spin_until:
                spin_until = time.monotonic() + _SPIN_SECONDS
            elif time.monotonic() > spin_until:
                masks: dict[socket.socket, int] = {}
                for one, mask in (sending, select.POLLOUT), (receiving, select.POLLIN):
                    if one is not None:
                        peer = one.peer
                        # Of two ranks it's one socket.
                        masks[one.sock] = masks.get(one.sock, 0) | mask
                self._sleep(masks, peer, deadline)
                continue
            os.sched_yield()

    def _sleep(
        self, masks: dict[socket.socket, int], peer: Peer, deadline: Deadline
    ) -> None:
        """Wait until one of the sockets is ready; `peer` is named if none is."""
        poll = select.poll()
        for sock, mask in masks.items():
            poll.register(sock, mask)
        if deadline.expired:
            raise PeerSilent(peer, f"silent for {deadline.seconds:g} s")
        poll.poll(deadline.milliseconds())
        if self._aborted:
            raise Aborted

    def share_descriptor(
        self, collective: Collective, descriptor: int
    ) -> dict[int, int]:
        """Send a file descriptor to every other rank and receive theirs.

        Only for Unix sockets. It's a collective of all ranks.

        Returns:
            The descriptors received, by group rank; the caller owns them.

        Raises:
            The exceptions of `exchange`. Descriptors received before
            a failure are closed.
        """
        received: dict[int, int] = {}
        try:
            # One at a time: the number of descriptors that a user may have in sockets
            # is limited.
            for distance in range(1, self.size):
                to = (self.rank + distance) % self.size
                source = (self.rank - distance) % self.size
                self._give(to, collective, descriptor)
                received[source] = self._take(source, collective)
        except BaseException as error:
            for fd in received.values():
                os.close(fd)
            if self._aborted and isinstance(error, PeerClosed):
                raise Aborted from None
            raise
        return received

    def _give(self, to: int, collective: Collective, descriptor: int) -> None:
        """Send a file descriptor, which stays open here, too."""
        call, deadline = collective
        sock, peer = self._out[to], self.peers[to]
        header = memoryview(pack_header(FrameType.DESCRIPTOR, 0, call))
        rights = array.array("i", [descriptor])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        while header:
            if self._aborted:
                raise Aborted
            try:
                sent = sock.sendmsg([header], ancillary)
            except BlockingIOError:
                self._sleep({sock: select.POLLOUT}, peer, deadline)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise connection_broke(peer, error) from error
                if deadline.expired:
                    silence = f"silent for {deadline.seconds:g} s"
                    raise PeerSilent(peer, silence) from error
                # Other receivers must take theirs first; no event reports that.
                time.sleep(_CROWDED_SECONDS)
            else:
                header = header[sent:]
                ancillary = []  # it was sent with the first byte

    def _take(self, source: int, collective: Collective) -> int:
        """Receive a file descriptor, which the caller owns then."""
        call, deadline = collective
        sock, peer = self._in[source], self.peers[source]
        header = bytearray()
        descriptors: list[int] = []
        try:
            while len(header) < HEADER_BYTES:
                self._sleep({sock: select.POLLIN}, peer, deadline)
                try:
                    data, fds = receive_descriptor(sock, HEADER_BYTES - len(header))
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise connection_broke(peer, error) from error
                descriptors.extend(fds)
                if not data:
                    raise PeerClosed(peer, "its connection was closed")
                header += data
            kind, _, theirs = unpack_header(header)
            if theirs != call:
                raise CallMismatch(peer, call, theirs)
            if kind is not FrameType.DESCRIPTOR or len(descriptors) != 1:
                raise ProtocolError(
                    f"{peer} sent a {kind.name} frame with {len(descriptors)} "
                    "descriptors where one memory segment was expected."
                )
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return descriptors[0]

    def abort(self) -> None:
        """End every wait, now and later, with `Aborted`. Safe from any thread."""
        self._aborted = True
        for sock in self.sockets():
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer was faster, or it is closed already
                continue

    def close(self) -> None:
        """Close the sockets. Can be called twice."""
        self.abort()
        for sock in self.sockets():
            sock.close()
