"""TensorFlow's own collectives (NCCL, gRPC) as a transport.

Their operations stay in the graph. All other transports are in
`kerasdist.collectives`.
"""
