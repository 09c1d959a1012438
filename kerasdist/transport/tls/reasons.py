"""The reasons, in words, for which a TLS handshake has failed."""

from __future__ import annotations

import ssl

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
