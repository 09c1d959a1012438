"""This task's certificate, its key and the job's CA, as `KERASDIST_TLS` names them."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Mapping, Sequence

from kerasdist.errors import ClusterError
from kerasdist.transport.handshake import job_secret

# The check of all settings that protect a job's connections, before it starts.


def checked_secret(addresses: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Check the job's secret and this task's certificates; return the secret.

    Args:
        addresses: The addresses of the job's tasks.
        environ: The environment, see `job_secret` and `Credentials`.

    Raises:
        ClusterError: There is no secret where one is needed; it is too short; or the
            certificates can't be used.
    """
    secret = job_secret(addresses, environ)
    credentials = Credentials.read(environ)
    if credentials is not None:
        credentials.check()
    return secret


# The reasons, in words, for which a TLS handshake has failed.

# Of OpenSSL's `X509_V_ERR_...`.
_VERIFICATIONS = {
    9: "isn't valid yet (is a clock wrong?)",
    10: "has expired",
    18: "is self-signed, and not signed by the job's CA",
    19: "isn't signed by the job's CA, but by another one",
    20: "isn't signed by the job's CA",
    21: "isn't signed by the job's CA",
    26: "isn't for this purpose: its extended key usage must have both serverAuth and "
    "clientAuth, or be absent",
}
# Parts of the names that OpenSSL's versions have for the alerts of TLS.
_ALERTS = {
    "UNKNOWN_CA": "isn't signed by that task's CA",
    "CERTIFICATE_EXPIRED": "has expired or isn't valid yet, by that task's clock",
    "CERTIFICATE_REQUIRED": "is missing",
    "UNSUPPORTED_CERTIFICATE": "isn't for this purpose",
    "BAD_CERTIFICATE": "isn't valid",
    "CERTIFICATE_REVOKED": "was revoked",
    "CERTIFICATE_UNKNOWN": "isn't acceptable",
}


def why_not_verified(error: ssl.SSLCertVerificationError) -> str:
    """Complete "the certificate ...", without a full stop."""
    known = _VERIFICATIONS.get(error.verify_code)
    return known or f"isn't valid ({error.verify_message})"


def why_refused(error: ssl.SSLError) -> str | None:
    """Complete "this task's certificate ...", if the other side has refused it."""
    name = error.reason or ""
    if "ALERT" not in name:
        return None
    return next((text for part, text in _ALERTS.items() if part in name), None)


VARIABLE = "KERASDIST_TLS"
_EXPECTED = (
    'Expected "certificate,key,ca": three files in PEM format, which exist on each '
    "host. docs/tls.md shows how to make them."
)
# A handshake with oneself takes two turns of each side.
_TURNS = 4


class _Encrypted(Exception):
    """The key needs a password, which no process could be asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The files that make up this task's side of a TLS connection.

    They are read for each connection, so certificates can be renewed while a job runs.

    Attributes:
        certificate: The path of this task's certificate, with those between it and the
            CA, if there are any.
        key: The path of the certificate's private key, without a password.
        ca: The path of the certificates of the job's CA.
    """

    certificate: str
    key: str
    ca: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Credentials | None:
        """Return what `KERASDIST_TLS` names, without a look at the files.

        Returns:
            The paths; None if the variable isn't set: then nothing is encrypted.

        Raises:
            ClusterError: These aren't three paths.
        """
        text = environ.get(VARIABLE, "")
        if not text.strip():
            return None
        paths = [path.strip() for path in text.split(",")]
        if len(paths) != 3 or not all(paths):
            raise ClusterError(
                f"{VARIABLE} can't be used: it doesn't have three paths. "
                f"Received: {text!r}. {_EXPECTED}"
            )
        return cls(certificate=paths[0], key=paths[1], ca=paths[2])

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the settings of one side of a connection: it verifies the other one.

        Args:
            server: Whether this side listens.

        Raises:
            ClusterError: The files can't be used any more.
        """
        protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        # Addresses change in clusters: the CA decides who belongs to the job, and the
        # handshake inside the tunnel which task of it this is.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The end of a stream is judged by authenticated frames, as without TLS.
        context.options |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
        if server:
            context.num_tickets = 0  # no connection is resumed
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, _Encrypted) as error:
            raise ClusterError(self._message([self._explain(error)])) from error
        return context

    def check(self) -> None:
        """Check that another task with certificates of the same CA can accept these.

        Raises:
            ClusterError: It can't; the message has all the reasons.
        """
        faults = [
            f"the {name} {path!r} can't be read ({error.strerror})"
            for name, path in self._files().items()
            if (error := _reading_error(path)) is not None
        ]
        if not faults:
            fault = _verify(self.context(server=True), self.context(server=False))
            if fault is not None:
                faults.append(f"the certificate {self.certificate!r} {fault}")
        if faults:
            raise ClusterError(self._message(faults))

    def _files(self) -> dict[str, str]:
        return {"certificate": self.certificate, "key": self.key, "CA": self.ca}

    def _explain(self, error: OSError | _Encrypted) -> str:
        """Find out which file can't be loaded."""
        if isinstance(error, _Encrypted):
            return (
                f"the key {self.key!r} is encrypted with a password, which a job can't "
                "ask for (`openssl pkey -in KEY -out PLAIN` decrypts it)"
            )
        for name, path in self._files().items():
            failed = _reading_error(path)
            if failed is not None:
                return f"the {name} {path!r} can't be read ({failed.strerror})"
        for name, path in (("certificate", self.certificate), ("CA", self.ca)):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
            except ssl.SSLError:
                return f"the {name} {path!r} isn't a certificate in PEM format"
        if "MISMATCH" in (getattr(error, "reason", None) or ""):
            return (
                f"the key {self.key!r} doesn't belong to the certificate "
                f"{self.certificate!r}"
            )
        return f"the key {self.key!r} isn't a private key in PEM format"

    def _message(self, faults: list[str]) -> str:
        shown = ",".join(self._files().values())
        return (
            f"{VARIABLE} can't be used: {'; '.join(faults)}. "
            f"Received: {shown!r}. {_EXPECTED}"
        )


def tls_fault(environ: Mapping[str, str]) -> str | None:
    """Describe why the certificates that are set can't be used; None if they can."""
    try:
        credentials = Credentials.read(environ)
        if credentials is not None:
            credentials.check()
    except ClusterError as error:
        return str(error)
    return None


def _reading_error(path: str) -> OSError | None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return error
    return None


def _no_password() -> str:
    raise _Encrypted


def _verify(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Connect both sides in memory; return why one refuses the certificate."""
    first, second = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(first, second), server.wrap_bio(second, first, True))
    for _ in range(_TURNS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return why_not_verified(error)
            except ssl.SSLError as error:
                return f"can't be used for TLS 1.3 ({error.reason or error})"
    return None
