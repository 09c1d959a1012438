"""TLS on the TCP connections of a job: certificates, the handshake, the socket.

`rendezvous.dial` and `rendezvous.listener` make each TCP connection of a job, and pass
it through here; everything else uses the socket that they return, as any other. Inside
a host, Unix sockets and shared memory aren't encrypted: their bytes stay there.
"""
