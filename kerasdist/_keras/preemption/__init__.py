"""Workers that leave an elastic job on SIGTERM, and the next start after the last ones.

Here: the leaving in `fit`, and the checkpoint from which the script's next start
continues. Not here: the signal, and the agreement of the workers on which leave
(`kerasdist.collectives.elastic`).
"""
